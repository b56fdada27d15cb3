"""One buffer's way through a group: slices to their owners, results back.

An ``Exchange`` serves some of the peers, in five steps that ``Mean`` calls in order:

    (made)    my slices are offered to their owners
    ready     the others' versions of my slice can be read
    publish   my slice holds the result and may be taken
    collect   the others' results are in my buffer
    release   nobody needs my memory any more

Neighbours on this host are served by memory that they share, all others by messages. A loopback
connection would copy every byte twice and wake a thread for every message. Through memory, a rank
copies the slices that its neighbours own into a *window* of its own, they sum straight out of all
windows, and everybody copies the results home. A few windows go round, so that one is filled while
another is summed and a third emptied. Both ways carry the same bytes, so results cannot depend on
which was taken.

A buffer that lies in shared memory already (see ``SharedMemoryMean``) needs no window: neighbours
read it where it is, and whoever owns a slice writes the result to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from loosestep.comm.flat.cuts import Bounds, slice_of, slices
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Message, Peers, Transfer
from loosestep.comm.transport.segments import Copy, open_copy
from loosestep.comm.transport.shared_memory import (
    DETAIL,
    OFFERED,
    OFFSET_BITS,
    PLACE,
    REDUCED,
    SINGLE,
    TAKEN,
    SharedMemory,
    Slot,
)


@dataclass(frozen=True)
class Task:
    """A buffer to be reduced over ``peers``; every member owns one slice of it."""

    buffer: torch.Tensor
    peers: Peers
    cut: Bounds | None = None  # None: into slices of about the same length, anywhere

    @cached_property
    def bounds(self) -> Bounds:
        """Where each member's slice begins and ends."""
        return slices(self.buffer.numel(), self.peers.size) if self.cut is None else self.cut

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


def exchanges(task: Task) -> list[Exchange]:
    """Start to exchange a task's slices with all peers; a group's first call is collective."""
    shared, distant = reach(task.peers, task.buffer.device)
    started: list[Exchange] = []
    if shared is not None:
        started.append(MemoryExchange(task, shared))
    if distant:
        started.append(SocketExchange(task, distant))
    return started


def reach(peers: Peers, device: torch.device) -> tuple[SharedMemory | None, list[int]]:
    """Return the memory through which members are reached, and who is not.

    None: nobody is. A group's first call is collective.
    """
    if peers.size == 1:
        return None, []
    shared = peers.shared_memory
    near = shared.neighbours if device.type == "cpu" else {}
    return (shared if near else None), [p for p in peers.others if p not in near]


def elements_moved(numel: int, group_size: int, group_rank: int) -> int:
    """Return what a member gives: the others' slices, and its own to each of them."""
    start, stop = slice_of(numel, group_size, group_rank)
    return numel + (group_size - 2) * (stop - start)


def largest(peers: Peers, buffer: torch.Tensor) -> int:
    """Return how many bytes of such a buffer may be under way as one; the same on all ranks."""
    shared = peers.shared_memory
    on_host = shared.any_neighbours and buffer.device.type == "cpu"
    return shared.layout.window_bytes if on_host else buffer.nbytes


class SocketExchange:
    """Slices travel as messages; what arrives is kept in buffers until it is summed."""

    in_memory = False

    def __init__(self, task: Task, members: list[int]) -> None:
        self.members = members
        self._task, self._tag = task, task.peers.next_tags(2)
        kind = (task.buffer.dtype, task.buffer.device)
        # Owners may be left with nothing when the buffer has fewer elements than there are ranks.
        self._inbox = {p: STAGING.take(task.mine.numel(), *kind) for p in members}
        self._arriving, self._leaving = self._post(
            {p: task.part(p) for p in members}, self._inbox, self._tag
        )

    def ready(self) -> None:
        """Return when all versions of my slice have arrived."""
        for transfer in self._arriving:
            transfer.wait()

    def read(self, member: int) -> torch.Tensor:
        """Return what arrived."""
        return self._inbox[member]

    def mirrors(self) -> list[torch.Tensor]:
        """Return nothing: results are sent."""
        return []

    def publish(self) -> None:
        """Send my slice to everybody and start to receive theirs."""
        for buffer in self._inbox.values():
            STAGING.give(buffer)
        # A peer sends its result after it has got my slice, so the place is free by then.
        places = {p: self._task.part(p) for p in self.members}
        self._arriving, leaving = self._post(
            dict.fromkeys(self.members, self._task.mine), places, self._tag + 1
        )
        self._leaving += leaving

    def collect(self) -> None:
        """Return when the results have arrived, each in its place."""
        for transfer in self._arriving:
            transfer.wait()

    def release(self) -> None:
        """Return when everything that I sent has left."""
        for transfer in self._leaving:
            transfer.wait()

    def _post(
        self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], tag: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        receives = [
            Message(part.view(torch.uint8), p, outgoing=False)
            for p, part in incoming.items()
            if part.numel()
        ]
        sends = [
            Message(part.view(torch.uint8), p, outgoing=True)
            for p, part in outgoing.items()
            if part.numel()
        ]
        transfers = self._task.peers.post([*receives, *sends], tag)
        return transfers[: len(receives)], transfers[len(receives) :]


class MemoryExchange:
    """Slices are read where they lie, and results written where they belong."""

    in_memory = True

    def __init__(self, task: Task, shared: SharedMemory) -> None:
        self._task, self._shared, self._slot = task, shared, Slot(shared, task.peers)
        self.members = self._slot.members
        self._first, self._last = task.bounds[task.peers.group_rank]
        self._copy: Copy | None = None
        self._views: dict[int, torch.Tensor] = {}
        home = shared.place_of(task.buffer)
        self._resident = home is not None
        self._mine = task.buffer  # what the neighbours see of it
        self._slot.offer(*(self._stage() if home is None else (home, 0)))

    def ready(self) -> None:
        """Return when the neighbours' slices can be read."""
        for member in self.members:
            self._slot.wait(member, OFFERED)
        self._views = {member: self._view(member) for member in self.members}

    def read(self, member: int) -> torch.Tensor:
        """Return a member's version of my slice, where it lies."""
        return self._views[member][self._first : self._last]

    def mirrors(self) -> list[torch.Tensor]:
        """Return where the result of my slice is to be written too."""
        resident = [m for m in self.members if self._slot.told(m, PLACE) >> OFFSET_BITS > 0]
        places = [self.read(member) for member in resident]
        if len(resident) < len(self.members) and not self._resident:
            places.append(self._mine[self._first : self._last])
        return places

    def publish(self) -> None:
        """Tell the neighbours that the result of my slice is where they look for it."""
        self._slot.tell_all(REDUCED)

    def collect(self) -> None:
        """Put every neighbour's result into the buffer, unless they have done so."""
        buffer = self._task.buffer
        for member in self.members:
            self._slot.wait(member, REDUCED)
            if not self._resident:
                first, last = self._task.bounds[member]
                buffer[first:last].copy_(self._views[member][first:last])
        self._slot.finish()
        self._slot.tell_all(TAKEN)

    def release(self) -> None:
        """Return when the neighbours have what they need, if they read it from more than a window.

        A window is waited for when it is needed again.
        """
        if self._resident or self._copy is not None:
            self._slot.wait_until_taken()
        if self._copy is not None:
            self._shared.copies.give(self._copy)
            self._copy = None

    def _stage(self) -> tuple[int, int]:
        """Copy the slices that neighbours own to where they find them, and say where that is."""
        index = self._free_window()
        if index is None:
            self._copy = self._shared.copies.take([self._task.buffer])
            self._mine = self._part(self._copy.memory, 0)
            return self._copy.key, self._copy.detail
        self._shared.windows[index] = self._slot.use
        self._mine = self._part(
            self._shared.arena_for(SINGLE, self._task.buffer.nbytes),
            index * self._shared.layout.window_bytes,
        )
        self._mine[: self._first].copy_(self._task.buffer[: self._first])
        self._mine[self._last :].copy_(self._task.buffer[self._last :])
        return -1 - index, 0

    def _free_window(self) -> int | None:
        """Return a window that nobody reads, waiting if it is for others; None: it is up to me.

        [Note: windows of one's own] Where this rank holds all windows for averages that it has
        not finished (two of them taking turns), waiting for a window would be for ever.
        """
        uses = self._shared.windows
        for index, use in enumerate(uses):
            if use is None or use.taken(self._shared):
                return index
        finished = [use for use in uses if use is not None and use.finished]
        if not finished:
            return None
        oldest = min(finished, key=lambda use: use.number)
        self._shared.wait_for_all(self._task.peers, oldest.column, oldest.number)
        return uses.index(oldest)

    def _view(self, member: int) -> torch.Tensor:
        """Return a member's buffer, wherever it lies."""
        place, neighbour = self._slot.told(member, PLACE), self._shared.neighbours[member]
        if place < 0:
            return self._part(neighbour.arena, (-1 - place) * self._shared.layout.window_bytes)
        if place >> OFFSET_BITS == 0:
            detail = self._slot.told(member, DETAIL)
            return self._part(open_copy(neighbour.copies, place, neighbour.pid, detail), 0)
        key, offset = place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)
        return self._part(neighbour.opened[key], offset)

    def _part(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return the part of some memory that holds a buffer like mine."""
        buffer = self._task.buffer
        return memory[start : start + buffer.nbytes].view(buffer.dtype)
