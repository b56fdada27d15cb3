"""Gradients of two hosts that live in their ranks' shared memory: few bits between, in two passes.

What ``TwoLevel`` does with ``Resident`` inside and a quantiser between hosts, to the bit, with
fewer waits and fewer passes over memory. Every rank owns a slice:

    pack     the mean of the host's replicas of my slice, as a message for my twin on the other host
    hear     whether all ranks' values were finite, before anything is changed
    unpack   the mean of both hosts' messages, written to all replicas on this host

A message begins with a bit for every rank of the host whose values are not finite, and with
``notes``: some numbers that lie behind the buffer, whose mean over all ranks is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

import loosestep.comm.codecs.in_c as codec_c
from loosestep.comm.flat import STAGING
from loosestep.comm.peers import Message, Peers
from loosestep.comm.reducers.nonfinite import all_finite, contributors
from loosestep.comm.reducers.packed import Packed
from loosestep.comm.reducers.reducer import Handle, NonFinite, Reducer
from loosestep.comm.transport.exchange import Task
from loosestep.comm.transport.shared_memory import (
    DETAIL,
    OFFERED,
    OFFSET_BITS,
    PLACE,
    REDUCED,
    TAKEN,
    Slot,
)
from loosestep.telemetry.traffic import Traffic

MOST_RANKS = 31  # of a host: a bit each, for two hosts, in a signed number
BITS_BYTES = 8  # of a message

Side = TypeVar("Side")


@dataclass(frozen=True)
class Route:
    """The ranks of this host, my twins on all hosts, everybody, and who is on which host."""

    inside: Peers
    across: Peers
    whole: Peers
    hosts: Sequence[tuple[int, ...]]


def can_pair(inner: Reducer, route: Route) -> bool:
    """Say whether this rank can do it by such a reducer; all ranks of both hosts must say so."""
    return (
        inner.packs
        and route.whole.weights is None
        and len(route.hosts) == 2
        and 1 < route.inside.size <= MOST_RANKS
        # All of them near: what is called a host may be several.
        and len(route.inside.shared_memory.neighbours) == route.inside.size - 1
        and codec_c.available(torch.empty(0))
    )


class HostPair(Handle):
    """One buffer on its way."""

    def __init__(
        self,
        task: Task,
        notes: torch.Tensor,
        route: Route,
        values: Packed,
        name: str,
    ) -> None:
        buffer = task.buffer
        self._task, self._notes, self._route, self._values = task, notes, route, values
        self._name, self._sent, self._done = name, False, False
        self._bad_members: list[int] = []  # of the whole group: their values are not finite
        self._head = BITS_BYTES + 4 * notes.numel()
        self._shared = route.inside.shared_memory
        self._slot = Slot(self._shared, route.inside)
        home = self._shared.place_of(buffer)
        assert home is not None, "it lives in shared memory"
        self._slot.offer(home)
        self._tag = route.across.next_tags(1)
        copied = buffer.nbytes + (route.inside.size - 2) * self._task.mine.nbytes
        self.traffic = Traffic(self._head + self._values.nbytes, copied)

    def advance(self) -> None:
        """Pack my slice and send it, as soon as the neighbours' values are there."""
        if not self._sent:
            self._sent = True
            self._send()

    def wait(self) -> None:
        """Leave the mean in the buffer and in the notes; to wait again changes nothing."""
        self.advance()
        if not self._done:
            self._done = True
            self._receive()
        contributors(self._route.whole, self._bad_members, NonFinite.RAISE, self._name)

    def commit(self) -> None:
        """Let the state have what was learnt."""
        self._values.commit()

    def _send(self) -> None:
        self._look()
        room = (self._head + self._values.nbytes, torch.uint8, torch.device("cpu"))
        self._mine, self._theirs = STAGING.take(*room), STAGING.take(*room)
        self._bad = self._pack()
        (twin,) = self._route.across.others
        there = Message(self._mine, twin, outgoing=True)
        back = Message(self._theirs, twin, outgoing=False)
        self._arriving, self._leaving = self._route.across.post([back, there], self._tag)

    def _receive(self) -> None:
        self._arriving.wait()
        found = self._hear()
        if not found:
            self._values.unpack(self._pair(self._head), self._replicas)
        self._slot.tell_all(TAKEN)
        for member in self._slot.members:
            self._slot.wait(member, TAKEN)
        self._slot.finish()
        if not found:
            self._note()
        self._leaving.wait()
        STAGING.give(self._mine)
        STAGING.give(self._theirs)
        self._bad_members = self._members(found)

    def _look(self) -> None:
        """Find all replicas of my slice, in the order of ranks, and add up the host's notes."""
        peers, buffer = self._task.peers, self._task.buffer
        self._replicas, self._sums = [self._task.mine] * peers.size, self._notes.clone()
        first, last = self._task.bounds[peers.group_rank]
        for member in self._slot.members:
            self._slot.wait(member, OFFERED)
            place = self._slot.told(member, PLACE)
            memory = self._shared.neighbours[member].opened[place >> OFFSET_BITS]
            start = place & ((1 << OFFSET_BITS) - 1)
            stop = start + buffer.nbytes + self._notes.nbytes
            values = memory[start:stop].view(torch.float32)
            self._replicas[member] = values[first:last]
            self._sums += values[buffer.numel() :]

    def _pack(self) -> int:
        """Write my message; return a bit for every rank here whose values are not finite."""
        bad = 0
        if not self._values.pack(self._replicas, self._mine[self._head :]):
            found = [m for m, replica in enumerate(self._replicas) if not all_finite(replica)]
            bad = sum(1 << member for member in found)
        self._mine[:BITS_BYTES].view(torch.int64).fill_(bad)
        self._mine[BITS_BYTES : self._head].view(torch.float32).copy_(self._sums)
        return bad

    def _hear(self) -> int:
        """Tell all neighbours what my twin and I have found, and return what everybody has."""
        theirs = int(self._theirs[:BITS_BYTES].view(torch.int64))
        low, high = self._in_order(self._bad, theirs)
        found = low | high << MOST_RANKS
        self._slot.add(found)
        self._slot.tell_all(REDUCED)
        for member in self._slot.members:
            self._slot.wait(member, REDUCED)
            found |= self._slot.told(member, DETAIL)
        return found

    def _note(self) -> None:
        self._sums += self._theirs[BITS_BYTES : self._head].view(torch.float32)
        self._notes.copy_(self._sums.div_(self._route.whole.size))

    def _members(self, found: int) -> list[int]:
        """Return the ranks that some bits stand for."""
        return [
            rank
            for host, members in enumerate(self._route.hosts)
            for place, rank in enumerate(members)
            if found >> (host * MOST_RANKS + place) & 1
        ]

    def _pair(self, start: int) -> list[torch.Tensor]:
        return list(self._in_order(self._mine[start:], self._theirs[start:]))

    def _in_order(self, mine: Side, theirs: Side) -> tuple[Side, Side]:
        """Return the first host's first, whichever this is."""
        return (mine, theirs) if self._route.across.group_rank == 0 else (theirs, mine)
