"""How much memory something takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

MB = 1 << 20


def figure(name: str) -> int:
    """Return one of the kernel's figures about this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def extra_bytes(action: Callable[[], object]) -> int:
    """Return by how much the process grew in between, shared and file pages included."""
    # What the heap has free but keeps would hide as much of what comes next.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = figure("VmRSS")
    action()
    return figure("VmHWM") - before
