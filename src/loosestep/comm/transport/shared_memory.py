"""What the ranks of a host tell each other through memory that they share.

Every rank has a *segment*: a row of numbers for each member of a group, and behind them windows
for data. A rank writes how far it is into its row in its neighbours' segments and watches only its
own. Telling is a store; a rank that waits sleeps until the kernel wakes it (a futex), so that more
ranks than cores do not take each other's time.

[Note: slots and memory order] A *slot* is what a row says about one buffer: ``MARKS`` columns, of
which three hold the number of the last buffer that was offered, reduced or taken there. Who reads a
column compares it with the number of its own buffer. Numbers only grow, and nobody sets them back:
what is left from a buffer before is smaller, and so means "not yet". Nobody is told a number
either: all members open and finish their slots in one order, so they count alike, and all pass over
the same places. A place is taken again when all neighbours have said that they have taken what it
was about.

Whoever tells writes data first (a window, ``PLACE``, ``DETAIL``), then the column; whoever listens
reads the column first, then data. Between the two there is a fence on both sides. x86 keeps the
order of stores among themselves, and of loads, without one; other processors need the one in C, or
share no memory. The numbers lie at multiples of 8 bytes, so none is seen half written. One order is
not kept, and need not be: a rank that tells may look for a sleeper before its store is seen, and a
rank that falls asleep just then is not woken. It looks again after ``PROBE_SECONDS``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from loosestep.comm.flat.cuts import round_up
from loosestep.comm.native import CONSTANTS, loops
from loosestep.comm.transport.kernel import copy_from, sleep_on, wake
from loosestep.comm.transport.segments import CopyPool, Segment

if TYPE_CHECKING:
    from loosestep.comm.peers import Peers

# Of every rank: one is filled, one is summed, one is emptied; as many for trains.
WINDOWS = CONSTANTS["WINDOWS"]
WINDOW_BYTES = 4 << 20  # larger: fewer waits; smaller: less memory, and it stays in the cache
ARENA_BYTES = 24 << 20  # for all ranks' windows of one use on a host, in one group
SINGLE, TRAINS = "single buffers", "trains"  # the uses of windows
SLOTS = 128  # buffers and tensors that may be under way at once

# The columns of a slot: where it lies, and the number of the last one that is so far.
# The last is of the segment's owner: the number of the slot that one of its threads sleeps on.
PLACE, DETAIL, OFFERED = CONSTANTS["PLACE"], CONSTANTS["DETAIL"], CONSTANTS["OFFERED"]
REDUCED, TAKEN, SLEEPER = CONSTANTS["REDUCED"], CONSTANTS["TAKEN"], CONSTANTS["SLEEPER"]
MARKS = CONSTANTS["MARKS"]  # how many columns a slot has
# A place: in a window (-1, -2, ...), in a copy (its key), or where a buffer is resident (the key of
# that memory above the offset in it).
OFFSET_BITS = CONSTANTS["OFFSET_BITS"]
COLUMNS = MARKS * SLOTS

PROBE_SECONDS = 0.02  # how often a waiting rank looks whether its neighbours live
SPINS = 20  # looks before it goes to sleep: the neighbours may be nearly there
NAP_SECONDS = 0.0002  # between looks, where the kernel cannot wake a rank when there is news

Row = ctypes.c_int64 * COLUMNS
HEADER_BYTES = 64  # a random number at the front, by which neighbours know that they have met
ENDED = "its process has ended"

# Whether stores are seen in the order in which they were made ([Note: slots and memory order]).
ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def _fence() -> None:
    if not ORDERED:
        found = loops()
        assert found is not None, "without it no memory is shared on such a machine"
        found.fence()


class Home(NamedTuple):
    """Shared memory in which tensors live, known to the neighbours by a key."""

    address: int
    size: int
    key: int
    segment: Segment  # kept: the address must not come to mean something else


@dataclass
class Neighbour:
    """A process on this host that shares memory with this one."""

    member: int  # its group rank
    pid: int
    segment: Segment
    row: ctypes.Array[ctypes.c_int64]  # mine, in its segment
    arena: torch.Tensor  # its windows
    opened: dict[int, torch.Tensor] = field(default_factory=dict)  # resident storage, by key
    copies: dict[int, torch.Tensor] = field(default_factory=dict)  # made for us, by key
    address: int = 0  # of that row
    homes: object = None  # the addresses of what is opened, as C reads them
    _watch: int = -1  # a file descriptor that tells when it ends

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.row)
        try:
            self._watch = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self._watch = -1

    def __del__(self) -> None:
        if self._watch >= 0:
            os.close(self._watch)

    def has_ended(self) -> bool:
        """Say whether the process is gone (or a zombie, which is as bad)."""
        if self._watch >= 0:
            poll = select.poll()
            poll.register(self._watch, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def read(self, there: list[tuple[int, int]], here: list[tuple[int, int]]) -> str:
        """Copy parts of its memory, wherever they lie; return what went wrong, or ''."""
        return copy_from(self.pid, there, here)


class SharedMemory:
    """What a rank and its neighbours share for one group: rows, windows, and where tensors live."""

    def __init__(self, segment: Segment | None, group_size: int, layout: Layout) -> None:
        self.segment, self.layout = segment, layout
        self.neighbours: dict[int, Neighbour] = {}
        self.started = 0  # slots so far
        self.open: dict[int, int] = {}  # place of a slot -> its number, until all have taken it
        self.unfinished: set[int] = set()  # places of slots that this rank is not through with
        self.train_numbers = [0] * WINDOWS  # of the slots that used the trains' windows last
        self.fused = False  # whether all members are neighbours and have the loops in C
        self.windows: list[Use | None] = [None] * WINDOWS  # by whom they were used last
        self.any_neighbours = False  # whether any member of the group has some
        self.readable = False  # whether the kernel lets neighbours read each other's memory
        self.copies = CopyPool()
        self.homes: list[Home] = []  # where resident tensors of mine live
        self.rows: list[ctypes.Array[ctypes.c_int64]] = []
        self._arena: torch.Tensor | None = None
        self._reserved = {SINGLE: 0, TRAINS: 0}  # bytes of each window that have pages
        if segment is not None:
            self.rows = rows_of(segment, group_size)
            self._arena = arena_of(segment, group_size)

    def arena_for(self, use: str, needed_bytes: int) -> torch.Tensor:
        """Return the memory of all windows; those of a use have at least the bytes needed.

        Pages are asked for as buffers come that need them: small models take little.
        """
        assert self._arena is not None, "there are neighbours"
        before = self._reserved[use]
        if needed_bytes > before:
            wanted = max(64 << 10, 1 << (needed_bytes - 1).bit_length())
            self._reserved[use] = min(wanted, self.layout.window_bytes)
            self._reserve(
                self.layout.trains_start if use == TRAINS else 0, before, self._reserved[use]
            )
        return self._arena

    def _reserve(self, start: int, before: int, wanted: int) -> None:
        assert self.segment is not None, "there are neighbours"
        first = self.segment.size - self.layout.arena_bytes + start + before
        try:
            for window in range(WINDOWS):
                self.segment.reserve(first + window * self.layout.window_bytes, wanted - before)
        except OSError as error:
            raise RuntimeError(
                f"there is no memory for {WINDOWS * wanted} bytes of windows: {error}; free some, "
                "or set LOOSESTEP_SHARED_MEMORY=0 on all ranks"
            ) from error

    def place_of(self, buffer: torch.Tensor) -> int | None:
        """Return where neighbours find a buffer of mine, if it lies in memory they have mapped."""
        address = buffer.data_ptr()
        for home in self.homes:
            if home.address <= address and address + buffer.nbytes <= home.address + home.size:
                return (home.key << OFFSET_BITS) | (address - home.address)
        return None

    @property
    def members(self) -> list[int]:
        """The neighbours' group ranks."""
        return list(self.neighbours)

    def next_number(self) -> tuple[int, int]:
        """Reserve the next slot; return its number and that of the last one at its place, or 0.

        Places that this rank itself still holds are passed over: so do all ranks, since they open
        and finish their slots in the same order.
        """
        if len(self.unfinished) == SLOTS:
            raise RuntimeError(
                f"{SLOTS} buffers are under way at once; wait for some of them first"
            )
        self.started += 1
        while self.started % SLOTS in self.unfinished:
            self.started += 1
        place = self.started % SLOTS
        previous = self.open.get(place, 0)
        self.open[place] = self.started
        return self.started, previous

    def wait_for_all(self, peers: Peers, column: int, value: int) -> None:
        """Return when all neighbours have reached ``value``."""
        for member in self.neighbours:
            self.wait(peers, member, column, value)

    def wait(self, peers: Peers, member: int, column: int, value: int) -> None:
        """Return when a neighbour has reached ``value``; raise when it died or is too slow."""
        row = self.rows[member]
        if row[column] < value and not _comes_soon(row, column, value):
            self._sleep(peers, member, column, value)
        _fence()

    def _sleep(self, peers: Peers, member: int, column: int, value: int) -> None:
        row = self.rows[member]
        address = ctypes.addressof(row) + 8 * column
        began, limit = time.monotonic(), peers.seconds
        row[column - column % MARKS + SLEEPER] = value
        peers.check()
        while (now := row[column]) < value:
            if time.monotonic() - began > limit:
                raise peers.lost(member, f"no answer within {limit:g} s")
            if not sleep_on(address, now, PROBE_SECONDS):
                time.sleep(NAP_SECONDS)
            if row[column] < value:
                self.look_round(peers)

    def look_round(self, peers: Peers) -> None:
        """Raise if a neighbour that still owes something is gone.

        The one that I wait for may wait for a dead one; one that owes nothing may have finished.
        """
        peers.check()  # another thread may have given the group up
        for member, neighbour in self.neighbours.items():
            if self._owes(member) and neighbour.has_ended() and self._owes(member):
                raise peers.lost(member, ENDED)

    def _owes(self, member: int) -> bool:
        row = self.rows[member]
        return any(row[MARKS * place + TAKEN] < number for place, number in list(self.open.items()))


@dataclass
class Use:
    """A slot as whoever comes next sees it; without peers, so that no group is kept alive."""

    number: int
    column: int  # in which neighbours say that they have taken it
    finished: bool = False  # whether this rank has taken what it needs of the others'

    def taken(self, shared: SharedMemory) -> bool:
        """Say whether no neighbour needs it any more."""
        rows = shared.rows
        return all(rows[member][self.column] >= self.number for member in shared.neighbours)


class Slot:
    """A buffer or tensor of this rank that its neighbours see, and theirs that it sees in turn.

    All members of a group open their slots in the same order; how far each is may differ.
    """

    def __init__(self, shared: SharedMemory, peers: Peers) -> None:
        self.members = shared.members
        self._shared, self._peers = shared, peers
        peers.check()
        self.number, previous = shared.next_number()
        self._place = self.number % SLOTS
        self._first = MARKS * self._place
        self.use = Use(self.number, self._first + TAKEN)
        shared.wait_for_all(peers, self.use.column, previous)
        shared.unfinished.add(self._place)

    def offer(self, place: int, detail: int = 0) -> None:
        """Tell all neighbours where mine lies."""
        for neighbour in self._shared.neighbours.values():
            neighbour.row[self._first + PLACE] = place
            neighbour.row[self._first + DETAIL] = detail
        self.tell_all(OFFERED)

    def tell(self, member: int, mark: int) -> None:
        """Tell a neighbour that I have come to ``mark``, and wake it if it waits for that."""
        neighbour, column = self._shared.neighbours[member], self._first + mark
        _fence()
        row = neighbour.row
        row[column] = self.number
        _fence()
        if row[self._first + SLEEPER] == self.number:
            wake(neighbour.address + 8 * column)

    def tell_all(self, mark: int) -> None:
        """Tell all of them."""
        for member in self.members:
            self.tell(member, mark)

    def told(self, member: int, mark: int) -> int:
        """Return what a neighbour has told of its own slot."""
        return self._shared.rows[member][self._first + mark]

    def wait(self, member: int, mark: int) -> None:
        """Return when a neighbour has come to ``mark``."""
        self._shared.wait(self._peers, member, self._first + mark, self.number)

    def exchange(self, place: int, detail: int) -> list[tuple[int, int]]:
        """Tell all neighbours two numbers that stand for themselves, and return theirs."""
        self.offer(place, detail)
        for member in self.members:
            self.wait(member, OFFERED)
        heard = [(self.told(m, PLACE), self.told(m, DETAIL)) for m in self.members]
        self.finish()
        self.tell_all(TAKEN)
        return heard

    def finish(self) -> None:
        """Say that this rank is through with it, whatever the neighbours are."""
        self.use.finished = True
        self._shared.unfinished.discard(self._place)

    def wait_until_taken(self) -> None:
        """Return when no neighbour needs mine any more."""
        self._shared.wait_for_all(self._peers, self.use.column, self.number)


def _comes_soon(row: ctypes.Array[ctypes.c_int64], column: int, value: int) -> bool:
    return any(row[column] >= value for _ in range(SPINS))


@dataclass(frozen=True)
class Layout:
    """How large a segment's windows are; there are some for single buffers, some for trains."""

    window_bytes: int

    @classmethod
    def of(cls, ranks_of_a_host: int) -> Layout:
        """Return how large they may be where so many ranks share a host's memory.

        >>> Layout.of(2), Layout.of(8)
        (Layout(window_bytes=4194304), Layout(window_bytes=1048576))
        """
        share = ARENA_BYTES // (WINDOWS * ranks_of_a_host)
        return cls(max(64 << 10, min(WINDOW_BYTES, share >> 16 << 16)))

    @cached_property
    def arena_bytes(self) -> int:
        """How much all windows take, if all are used."""
        return 2 * self.trains_start

    @cached_property
    def trains_start(self) -> int:
        """Where the windows for trains begin."""
        return WINDOWS * self.window_bytes


def segment_bytes(group_size: int, layout: Layout) -> tuple[int, int]:
    """Return how much memory a segment takes in all, and for its rows alone."""
    rows = _arena_start(group_size)
    return rows + layout.arena_bytes, rows


def rows_of(segment: Segment, group_size: int) -> list[ctypes.Array[ctypes.c_int64]]:
    """Return the rows of a segment, one for every member."""
    size = ctypes.sizeof(Row)
    return [Row.from_buffer(segment.map, HEADER_BYTES + i * size) for i in range(group_size)]


def arena_of(segment: Segment, group_size: int) -> torch.Tensor:
    """Return the memory of the windows, behind the rows."""
    return segment.bytes(_arena_start(group_size))


def _arena_start(group_size: int) -> int:
    return round_up(HEADER_BYTES + group_size * ctypes.sizeof(Row), 4096)
