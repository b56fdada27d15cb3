"""Loops over memory in C, where the machine has a compiler; plain torch does the same elsewhere.

A mean or a quantiser in plain torch is ten passes over the data. Here it is one. The sources lie
beside this file and are compiled when first used, in a fraction of a second, into the user's cache;
a call lets go of the interpreter, so that a training thread runs on meanwhile. Every function has
a twin in plain torch that gives the same bits: which one runs shows in the clock only.

(``torch.compile`` gives the same bits too; a first call takes it some 20 seconds, every further
one 0.04 milliseconds before it begins, and it keeps the interpreter. ``LOOSESTEP_FUSED=0``
switches the C loops off.)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

# Nothing that would let the compiler round differently from torch.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_SECONDS = 60  # then the machine is better off without


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """Return the compiled loops of ``<name>.c``, or None where they cannot be had."""
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if os.environ.get("LOOSESTEP_FUSED") == "0" or compiler is None:
        logger.info("%s runs in plain torch: no compiler, or LOOSESTEP_FUSED=0", name)
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home, no compiler
        logger.warning("%s runs in plain torch: compiling failed: %s", name, error)
        return None


def _compiled(source: Path, compiler: str) -> Path:
    """Return the library, compiled now unless this user did so before on such a machine."""
    text = source.read_bytes()
    machine = f"{compiler} {platform.machine()} {' '.join(FLAGS)} {_processor()}"
    key = hashlib.sha256(text + machine.encode()).hexdigest()[:24]
    target = _cache() / f"{source.stem}-{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as room:
            fresh = Path(room) / target.name
            command = [compiler, *FLAGS, str(source), "-o", str(fresh), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            fresh.rename(target)  # at once: other ranks compile too
    return target


def _cache() -> Path:
    """Return a folder that nobody else can write to: what lies there is run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "loosestep"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise OSError(f"{folder} can be written by others; make it yours alone, with mode 0700")
    return folder


def _processor() -> str:
    """Return what the processor can do: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
