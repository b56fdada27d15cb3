"""Exchange between processes of one host by reading each other's memory.

A loopback connection copies every byte twice and wakes a thread for every message. Where the
kernel lets a process read another (``process_vm_readv``), a rank tells its neighbours an address
and they copy once. Both ways carry the same bytes, so results cannot depend on which was taken.

Ranks tell each other how far they are by writing into each other's *board*, one row for each
neighbour. A rank only polls its own board, and the last thing it does to a neighbour is to write
that it needs nothing more, so nobody touches the memory of a process that may have gone.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loosestep.peers import Peers
from loosestep.wire.exchange import Task
from loosestep.wire.kernel import Spans, copy_from, copy_to

SLOTS = 128  # buffers that may be under way at once
ADDRESS, OFFERED, REDUCED, TAKEN = 0, 1, 2, 3  # the columns of a slot
COLUMNS = 4 * SLOTS
PROBE_SECONDS = 0.02  # how often a waiting rank looks whether its neighbours live
SPIN_SECONDS = 0.0002  # how long it only yields its core: the neighbours may be nearly there
NAP_SECONDS = 0.0001  # then it sleeps between looks, and leaves the core to those it waits for
LONGEST_NAP_SECONDS = 0.001  # the longer it has waited, the less an extra moment matters
NAP_SHARE = 0.05  # of the time waited so far

Row = ctypes.c_int64 * COLUMNS
Ranges = Sequence[tuple[int, int]]  # of elements: first, and one after the last
_kept: list[object] = []  # boards are never freed: a peer that gave up late may still write


@dataclass
class Neighbour:
    """A process on this host whose memory can be read and written."""

    member: int  # its group rank
    pid: int
    row: int  # the address of my row on its board


class Board:
    """What the neighbours have told this rank, and the way to tell them."""

    def __init__(self, group_size: int) -> None:
        self.rows = (Row * group_size)()
        self.neighbours: dict[int, Neighbour] = {}
        self.started = 0  # exchanges so far
        self.open: dict[int, int] = {}  # slot -> number of the exchange that uses it
        self.offered: dict[int, torch.Tensor] = {}  # kept while a neighbour may read it
        _kept.append(self.rows)

    def row_address(self, member: int) -> int:
        """Return where ``member`` is to write."""
        return ctypes.addressof(self.rows[member])

    def tell(self, peers: Peers, member: int, column: int, value: int) -> None:
        """Write a number into a neighbour's board."""
        neighbour = self.neighbours[member]
        number = ctypes.c_int64(value)
        error = copy_to(
            neighbour.pid, [(neighbour.row + 8 * column, 8)], [(ctypes.addressof(number), 8)]
        )
        if error:
            raise peers.lost(member, error)

    def wait(self, peers: Peers, member: int, column: int, value: int) -> None:
        """Return when a neighbour has reached ``value``; raise when it died or is too slow."""
        row = self.rows[member]
        if row[column] >= value:
            return
        began = time.monotonic()
        probe_at = began + PROBE_SECONDS
        while row[column] < value:
            now = time.monotonic()
            if now - began > peers.seconds:
                raise peers.lost(member, f"no answer within {peers.seconds:g} s")
            if now > probe_at:
                self._look_round(peers)
                probe_at = now + PROBE_SECONDS
            if now - began < SPIN_SECONDS:
                os.sched_yield()
            else:
                nap = NAP_SHARE * (now - began)
                time.sleep(min(LONGEST_NAP_SECONDS, max(NAP_SECONDS, nap)))

    def _look_round(self, peers: Peers) -> None:
        """Raise if a neighbour that still owes something is gone.

        The one that I wait for may wait for a dead one; one that owes nothing may have finished.
        """
        for member, neighbour in self.neighbours.items():
            if not self._owes(member):
                continue
            mine = ctypes.c_int64()
            error = copy_from(neighbour.pid, [(neighbour.row, 8)], [(ctypes.addressof(mine), 8)])
            if error:
                raise peers.lost(member, error)

    def _owes(self, member: int) -> bool:
        row = self.rows[member]
        return any(row[4 * slot + TAKEN] < number for slot, number in list(self.open.items()))


class Slot:
    """One buffer that this rank offers to its neighbours, and theirs that it reads in turn."""

    def __init__(self, board: Board, peers: Peers, buffer: torch.Tensor) -> None:
        self.members = sorted(board.neighbours)
        self._board, self._peers = board, peers
        board.started += 1
        self._number, self._place = board.started, board.started % SLOTS
        assert self._place not in board.open, "too many buffers under way at once"
        board.open[self._place], board.offered[self._place] = self._number, buffer
        self.tell(ADDRESS, buffer.data_ptr())
        self.tell(OFFERED)

    def tell(self, mark: int, value: int | None = None) -> None:
        """Tell all neighbours that I have come to ``mark``."""
        for member in self.members:
            self.tell_one(member, mark, value)

    def tell_one(self, member: int, mark: int, value: int | None = None) -> None:
        """Tell one of them."""
        said = self._number if value is None else value
        self._board.tell(self._peers, member, 4 * self._place + mark, said)

    def wait(self, member: int, mark: int) -> None:
        """Return when a neighbour has come to ``mark``."""
        self._board.wait(self._peers, member, 4 * self._place + mark, self._number)

    def read(self, member: int, ranges: Ranges, into: Sequence[torch.Tensor]) -> None:
        """Copy ranges of elements of a neighbour's buffer to contiguous tensors, in this order."""
        size = into[0].element_size()
        base = self._board.rows[member][4 * self._place + ADDRESS]
        there = [(base + start * size, (stop - start) * size) for start, stop in ranges]
        self.read_spans(member, there, into)

    def read_spans(self, member: int, there: Spans, into: Sequence[torch.Tensor]) -> None:
        """Copy pieces of a neighbour's memory to contiguous tensors, in this order."""
        here = [(tensor.data_ptr(), tensor.nbytes) for tensor in into]
        error = copy_from(self._board.neighbours[member].pid, there, here)
        if error:
            raise self._peers.lost(member, error)

    def close(self) -> None:
        """Return when the neighbours have taken what they need of my buffer."""
        for member in self.members:
            self.wait(member, TAKEN)
        del self._board.open[self._place], self._board.offered[self._place]


class MemoryExchange:
    """Slices are read where they lie."""

    in_memory = True

    def __init__(self, task: Task, board: Board) -> None:
        self._task, self._slot = task, Slot(board, task.peers, task.buffer)
        self.members = self._slot.members

    def ready(self) -> None:
        """Return when the neighbours have told where their buffers lie."""
        for member in self.members:
            self._slot.wait(member, OFFERED)

    def read(self, member: int, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Copy elements of my slice out of a neighbour's buffer."""
        first = self._task.bounds[self._task.peers.group_rank][0]
        into = scratch[: stop - start]
        self._slot.read(member, [(first + start, first + stop)], [into])
        return into

    def publish(self) -> None:
        """Tell the neighbours that my slice holds the result."""
        self._slot.tell(REDUCED)

    def collect(self) -> None:
        """Copy every neighbour's result into its place."""
        for member in self.members:
            self._slot.wait(member, REDUCED)
            self._slot.read(member, [self._task.bounds[member]], [self._task.part(member)])
            self._slot.tell_one(member, TAKEN)

    def release(self) -> None:
        """Return when the neighbours have taken my result."""
        self._slot.close()
