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
import functools
import os
import sys
import time
from dataclasses import dataclass

import torch

from loosestep.peers import Peers
from loosestep.wire.exchange import Task

SLOTS = 128  # buffers that may be under way at once
ADDRESS, OFFERED, REDUCED, TAKEN = 0, 1, 2, 3  # the columns of a slot
COLUMNS = 4 * SLOTS
PROBE_SECONDS = 0.02  # how often a waiting rank looks whether its neighbours live
SPIN_SECONDS = 0.0002  # how long it only yields its core: the neighbours may be nearly there
NAP_SECONDS = 0.0001  # then it sleeps between looks, and leaves the core to those it waits for

Row = ctypes.c_int64 * COLUMNS
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
        _kept.append(self.rows)

    def row_address(self, member: int) -> int:
        """Return where ``member`` is to write."""
        return ctypes.addressof(self.rows[member])

    def tell(self, peers: Peers, member: int, column: int, value: int) -> None:
        """Write a number into a neighbour's board."""
        neighbour = self.neighbours[member]
        number = ctypes.c_int64(value)
        error = copy_to(neighbour.pid, neighbour.row + 8 * column, ctypes.addressof(number), 8)
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
                time.sleep(NAP_SECONDS)

    def _look_round(self, peers: Peers) -> None:
        """Raise if a neighbour that still owes something is gone.

        The one that I wait for may wait for a dead one; one that owes nothing may have finished.
        """
        for member, neighbour in self.neighbours.items():
            if not self._owes(member):
                continue
            mine = ctypes.c_int64()
            error = copy_from(neighbour.pid, neighbour.row, ctypes.addressof(mine), 8)
            if error:
                raise peers.lost(member, error)

    def _owes(self, member: int) -> bool:
        row = self.rows[member]
        return any(row[4 * slot + TAKEN] < number for slot, number in self.open.items())


class MemoryExchange:
    """Slices are read where they lie."""

    in_memory = True

    def __init__(self, task: Task, board: Board) -> None:
        self.members = sorted(board.neighbours)
        self._task, self._board = task, board
        board.started += 1
        self._number, self._slot = board.started, board.started % SLOTS
        assert self._slot not in board.open, "too many buffers under way at once"
        board.open[self._slot] = self._number
        self._tell(ADDRESS, task.buffer.data_ptr())
        self._tell(OFFERED, self._number)

    def ready(self) -> None:
        """Return when the neighbours have told where their buffers lie."""
        for member in self.members:
            self._wait(member, OFFERED)

    def read(self, member: int, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Copy elements of my slice out of a neighbour's buffer."""
        first = self._task.bounds[self._task.peers.group_rank][0]
        return self._copy(member, first + start, scratch[: stop - start])

    def publish(self) -> None:
        """Tell the neighbours that my slice holds the result."""
        self._tell(REDUCED, self._number)

    def collect(self) -> None:
        """Copy every neighbour's result into its place."""
        for member in self.members:
            self._wait(member, REDUCED)
            self._copy(member, self._task.bounds[member][0], self._task.part(member))
            self._board.tell(self._task.peers, member, self._column(TAKEN), self._number)

    def release(self) -> None:
        """Return when the neighbours have taken my result."""
        for member in self.members:
            self._wait(member, TAKEN)
        del self._board.open[self._slot]

    def _copy(self, member: int, start: int, into: torch.Tensor) -> torch.Tensor:
        neighbour, size = self._board.neighbours[member], into.element_size()
        address = self._board.rows[member][self._column(ADDRESS)] + start * size
        error = copy_from(neighbour.pid, address, into.data_ptr(), into.numel() * size)
        if error:
            raise self._task.peers.lost(member, error)
        return into

    def _column(self, mark: int) -> int:
        return 4 * self._slot + mark

    def _tell(self, mark: int, value: int) -> None:
        for member in self.members:
            self._board.tell(self._task.peers, member, self._column(mark), value)

    def _wait(self, member: int, mark: int) -> None:
        self._board.wait(self._task.peers, member, self._column(mark), self._number)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _kernel_copy(name: str) -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        vectors = ctypes.POINTER(_IoVec)
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors] + [ctypes.c_ulong] * 2
    return function


def copy_from(pid: int, address: int, into: int, size: int) -> str:
    """Copy ``size`` bytes out of process ``pid``; return what went wrong, or ''."""
    return _copy("process_vm_readv", pid, into, address, size)


def copy_to(pid: int, address: int, source: int, size: int) -> str:
    """Copy ``size`` bytes into process ``pid``; return what went wrong, or ''."""
    return _copy("process_vm_writev", pid, source, address, size)


def _copy(name: str, pid: int, here: int, there: int, size: int) -> str:
    function = _kernel_copy(name)
    if function is None:
        return "reading other processes' memory is not available here"
    done = 0
    while done < size:
        local, remote = _IoVec(here + done, size - done), _IoVec(there + done, size - done)
        count = function(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            return f"its memory cannot be reached: {os.strerror(ctypes.get_errno())}"
        done += count
    return ""
