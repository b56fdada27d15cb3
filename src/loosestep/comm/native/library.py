"""Loading the C loops, and saying why there are none."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path
from typing import Any

from loosestep.comm.native.interface import EXPECTED_HASH, FUNCTIONS, STRUCTURES

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("libloosestep.loops.so")
REBUILD = "install loosestep again, with a C compiler"


def loops() -> Any | None:
    """Return the compiled loops, functions by the names of ``interface.h``; None: there are none.

    The reason why there are none is logged when it is found, once a process.
    """
    return _found()[0]


def why_not() -> str:
    """Return why there are no compiled loops here, or ''."""
    return _found()[1]


@functools.cache
def _found() -> tuple[Any | None, str]:
    if os.environ.get("LOOSESTEP_NATIVE") == "0":
        reason, level = "switched off by LOOSESTEP_NATIVE=0", logging.INFO
    elif not LIBRARY.exists():
        reason, level = f"they were not built with the package; {REBUILD}", logging.WARNING
    else:
        library, reason = load(LIBRARY)
        level = logging.WARNING
        if library is not None:
            return library, ""
    logger.log(level, "no loops in C, plain torch gives the same bits slower: %s", reason)
    return None, reason


def load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return a library whose interface is the header's, or None and what is wrong with it."""
    try:
        library = ctypes.CDLL(str(path))
        for name, signature in FUNCTIONS.items():
            function = library[name]
            function.argtypes, function.restype = signature
            setattr(library, name, function)
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error}); {REBUILD}"
    if library.interface_hash() != EXPECTED_HASH.encode():
        return None, f"{path.name} was built for another version of loosestep; {REBUILD}"
    sizes = {"Neighbour": library.size_of_neighbour(), "Train": library.size_of_train()}
    sizes["Chance"] = library.size_of_chance()
    strange = [n for n, size in sizes.items() if size != ctypes.sizeof(STRUCTURES[n])]
    if strange:
        return None, f"{path.name} lays {', '.join(strange)} out differently; {REBUILD}"
    return library, ""
