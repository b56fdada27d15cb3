"""The memory of buffers, used again."""

from __future__ import annotations

import torch

SMALLEST = 1 << 10  # bytes of a buffer


class Pool:
    """Buffers that are allocated once and used again, so that their pages stay warm."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat buffer of ``numel`` elements with any content."""
        room = size_class(numel * dtype.itemsize, SMALLEST)
        try:  # not "if there is one": another thread may take it in between
            memory = self._free[device, room].pop()
        except (KeyError, IndexError):
            memory = torch.empty(room, dtype=torch.uint8, device=device)
        return memory.view(dtype)[:numel]

    def give(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that nobody uses any more."""
        empty = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        memory = empty.set_(buffer.untyped_storage())
        self._free.setdefault((buffer.device, memory.numel()), []).append(memory)

    def clear(self) -> None:
        """Free all buffers."""
        self._free.clear()


# One for the process: however many averagers there are, few buffers are under way at once.
STAGING = Pool()


def size_class(size: int, smallest: int) -> int:
    """Return a power of two that has room, at least the smallest: few kinds of buffers.

    >>> size_class(5000, smallest=1024), size_class(5, smallest=1024)
    (8192, 1024)
    """
    return max(smallest, 1 << (size - 1).bit_length())
