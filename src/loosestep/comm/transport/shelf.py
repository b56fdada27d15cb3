"""Shared memory for copies of what is lent to neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loosestep.comm.transport.segments import Segment

SIZE_BITS = 40  # of the number that tells file and size


class Shelf:
    """Shared memory for copies, used again and again; its files stay open for newcomers."""

    def __init__(self) -> None:
        self._free: dict[int, list[Copy]] = {}
        self._made = 0

    def take(self, pieces: Sequence[torch.Tensor]) -> Copy:
        """Return a copy of ``pieces``, one after the other."""
        needed = sum(piece.nbytes for piece in pieces)
        room = 1 << max(12, (needed - 1).bit_length())
        free = self._free.setdefault(room, [])
        if free:
            copy = free.pop()
        else:
            self._made += 1
            copy = Copy(Segment.create(room), self._made, room)
        copy.fill(pieces)
        return copy

    def give(self, copy: Copy) -> None:
        """Take back a copy that nobody reads any more."""
        self._free[copy.room].append(copy)


class Copy:
    """A segment of shared memory that holds a copy of something."""

    def __init__(self, segment: Segment, key: int, room: int) -> None:
        self.segment, self.key, self.room = segment, key, room
        self.memory = segment.bytes()

    @property
    def detail(self) -> int:
        """Which file it is and how large, in one number."""
        return (self.segment.fd << SIZE_BITS) | self.segment.size

    def fill(self, pieces: Sequence[torch.Tensor]) -> None:
        """Copy pieces in, one after the other."""
        at = 0
        for piece in pieces:
            self.memory[at : at + piece.nbytes].copy_(piece.reshape(-1).view(torch.uint8))
            at += piece.nbytes


def copy_of(opened: dict[int, torch.Tensor], key: int, pid: int, detail: int) -> torch.Tensor:
    """Return a neighbour's copy; what was mapped before is among those ``opened``."""
    if key not in opened:
        segment = Segment.open(pid, detail >> SIZE_BITS, detail & ((1 << SIZE_BITS) - 1))
        segment.seal()
        opened[key] = segment.bytes()
    return opened[key]
