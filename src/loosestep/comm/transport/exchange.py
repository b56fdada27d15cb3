"""One buffer's way through a group: slices to their owners, results back.

An ``Exchange`` serves some of the peers, in five steps that ``Mean`` calls in order:

    (made)    my slices are offered to their owners
    ready     the others' versions of my slice can be read
    publish   my slice holds the result and may be taken
    collect   the others' results are in my buffer
    release   nobody needs my memory any more
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from loosestep.comm.flat import slices
from loosestep.comm.peers import Peers


@dataclass(frozen=True)
class Task:
    """A buffer to be reduced over ``peers``; every member owns one slice of it."""

    buffer: torch.Tensor
    peers: Peers

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Where each member's slice begins and ends."""
        return slices(self.buffer.numel(), self.peers.size)

    def part(self, member: int) -> torch.Tensor:
        """Return a member's slice of this rank's buffer."""
        start, stop = self.bounds[member]
        return self.buffer[start:stop]

    @cached_property
    def mine(self) -> torch.Tensor:
        """The slice that this rank owns."""
        return self.part(self.peers.group_rank)


class Exchange(Protocol):
    """Moves one task's slices between this rank and some of its peers."""

    members: list[int]  # the group ranks that this exchange serves
    in_memory: bool  # whether slices are read where they lie, so that none is sent

    def ready(self) -> None:
        """Return when ``read`` can be called."""

    def read(self, member: int) -> torch.Tensor:
        """Return a member's version of my slice."""

    def mirrors(self) -> list[torch.Tensor]:
        """Return where the result of my slice must be written besides my buffer."""

    def publish(self) -> None:
        """Hand out my slice, which now holds the result."""

    def collect(self) -> None:
        """Put the members' results into the buffer."""

    def release(self) -> None:
        """Return when the buffer is this rank's alone again."""
