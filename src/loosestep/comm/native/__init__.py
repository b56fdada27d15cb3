"""Loops over memory in C, built with the package; plain torch does the same where they are not.

A mean or a quantiser in plain torch is ten passes over the data; here it is one, and a call lets go
of the interpreter, so that a training thread runs on meanwhile. Every function has a twin in plain
torch that gives the same bits: which one runs shows in the clock only.

The sources beside this file are compiled when the package is built, into one plain shared library
without ``Python.h``. Where that could not be done, ``loops()`` is None and the log says so once.
``LOOSESTEP_NATIVE=0`` leaves them out.

(``torch.compile`` gives the same bits too; a first call takes it some 20 seconds, every further
one 0.04 milliseconds before it begins, and it keeps the interpreter.)
"""

from loosestep.comm.native.interface import CONSTANTS, STRUCTURES
from loosestep.comm.native.library import LIBRARY, loops, why_not

__all__ = ["CONSTANTS", "LIBRARY", "STRUCTURES", "loops", "why_not"]
