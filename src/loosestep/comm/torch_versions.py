"""Where the versions of torch differ, and which of them the test suite has run on.

Another version is warned about and not refused: a newer torch mostly works, and whoever has a build
for their own accelerators should keep it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from loosestep.errors import warn_once

OLDEST = (2, 9)  # also the floor in pyproject.toml
NEWEST = (2, 14)


def version_of(text: str) -> tuple[int, int]:
    """Return major and minor, all that features depend on.

    >>> version_of("2.13.0+cpu"), version_of("2.16.0.dev20260101")
    ((2, 13), (2, 16))
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    if not found:  # a build that somebody named otherwise: it is not one of the tested ones
        return (0, 0)
    return int(found[1]), int(found[2])


def is_tested(text: str) -> bool:
    """Return whether a version is one that the suite has run on."""
    return OLDEST <= version_of(text) <= NEWEST


def tested_range() -> str:
    """Return the range in words."""
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def warn_if_untested() -> None:
    """Say it once where this torch is outside the range."""
    if not is_tested(torch.__version__):
        warn_once(
            "torch version",
            f"loosestep has been tested with torch {tested_range()}, and this is "
            f"{torch.__version__}: it may fail or behave otherwise. Install a version of that "
            "range, or run loosestep's tests on this one",
        )


def group_name(text: str) -> Any:
    """Return a process group's name as torch takes it.

    Some versions have a type for it, ``GroupName``. At run time it is a str in all of them.
    """
    return text


def buffers_are_broadcast(module: DistributedDataParallel) -> bool:
    """Return whether DDP broadcasts buffers at every forward."""
    return bool(getattr(module, _broadcast_attribute(module)))


def broadcast_buffers(module: DistributedDataParallel, wanted: bool) -> None:
    """Let DDP broadcast buffers at every forward, or not."""
    setattr(module, _broadcast_attribute(module), wanted)


def active_ddp_module() -> DistributedDataParallel | None:
    """Return the DDP module whose forward is running, if one is."""
    return DistributedDataParallel._active_ddp_module


def _broadcast_attribute(module: DistributedDataParallel) -> str:
    # The first is the newer name; versions that have it read the second one too, as deprecated.
    return (
        "forward_sync_buffers" if hasattr(module, "forward_sync_buffers") else "broadcast_buffers"
    )
