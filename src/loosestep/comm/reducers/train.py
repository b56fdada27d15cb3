"""Many buffers through shared memory in one go, driven by a loop in C.

What ``MemoryExchange`` does for one buffer at a time, by the same marks in the same slots, so that
ranks may do either. A train has windows of its own and is on its way only while it is waited for;
the loop comes back whenever it has to wait for long, so that somebody can look who is gone.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from loosestep.comm import native
from loosestep.comm.flat.cuts import cut
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.reducer import Handle
from loosestep.comm.transport.exchange import elements_moved
from loosestep.comm.transport.shared_memory import (
    PROBE_SECONDS,
    SLOTS,
    TRAINS,
    WINDOWS,
    Neighbour,
    SharedMemory,
)
from loosestep.telemetry.traffic import Traffic

DTYPES = (torch.float32, torch.bfloat16)
MOST_MEMBERS = native.CONSTANTS["MOST_MEMBERS"]
DONE, STRANGE = native.CONSTANTS["DONE"], native.CONSTANTS["STRANGE"]

Pointer = ctypes.c_void_p
Number = ctypes.c_int64
Real = ctypes.c_double
NeighbourInC, TrainInC = native.STRUCTURES["Neighbour"], native.STRUCTURES["Train"]


class Train(Handle):
    """The mean of some buffers of one dtype over ranks that all share memory."""

    def __init__(self, buffers: Sequence[torch.Tensor], peers: Peers, shared: SharedMemory) -> None:
        self.traffic = Traffic()
        self._peers, self._shared, self._done = peers, shared, False
        most = shared.layout.window_bytes
        cuts = (cut(buffer, most, peers.size) for buffer in buffers if buffer.numel())
        self._pieces = [piece for pieces in cuts for piece in pieces]
        self._count()

    def advance(self) -> None:
        """Nothing to do before the end: a train goes when it is waited for."""

    def wait(self) -> None:
        """Drive until all buffers hold their mean and nobody needs them any more."""
        if self._done or not self._pieces:
            return
        self._peers.check()
        loops = native.loops()
        assert loops is not None, "all ranks have said that they have it"
        train = self._describe()
        began, before = time.monotonic(), [-1]
        while (result := loops.drive(ctypes.byref(train), PROBE_SECONDS)) != DONE:
            assert result != STRANGE, "a neighbour's buffer lies where nobody was told of"
            now = [train.step, train.phase, train.at, train.offered]
            began, before = (began, before) if now == before else (time.monotonic(), now)
            self._look(train.waits_for, time.monotonic() - began)
        self._arrived(train)

    def _look(self, index: int, seconds: float) -> None:
        """Raise if a neighbour is gone or too slow."""
        if seconds > self._peers.seconds:
            member = self._shared.members[index]
            raise self._peers.lost(member, f"no answer within {self._peers.seconds:g} s")
        self._shared.look_round(self._peers)

    def _arrived(self, train: Any) -> None:
        self._done = True
        self.traffic.deviation, self.traffic.magnitude = train.deviation, train.magnitude
        self.traffic.samples = int(train.samples)

    def _count(self) -> None:
        for piece in self._pieces:
            moved = elements_moved(piece.numel(), self._peers.size, self._peers.group_rank)
            self.traffic.bytes_copied += moved * piece.element_size()

    def _windows(self) -> int:
        """Return where mine begin, for what does not live in shared memory."""
        needed = max(piece.nbytes for piece in self._pieces)
        return self._shared.arena_for(TRAINS, needed).data_ptr() + self._shared.layout.trains_start

    def _describe(self) -> Any:
        """Return the whole journey as C sees it; what it points to is kept with it."""
        shared, peers, pieces = self._shared, self._peers, self._pieces
        slots = [shared.next_number() for _ in pieces]
        homes = [shared.place_of(piece) for piece in pieces]
        weights = peers.weights
        neighbours = [_describe(shared, neighbour) for neighbour in shared.neighbours.values()]
        self._kept = (  # C only sees addresses
            (NeighbourInC * len(neighbours))(*neighbours),
            (Pointer * len(pieces))(*(piece.data_ptr() for piece in pieces)),
            (Number * len(pieces))(*(piece.numel() for piece in pieces)),
            (Number * len(pieces))(*(-1 if home is None else home for home in homes)),
            (Number * len(pieces))(*(number for number, _ in slots)),
            (Number * len(pieces))(*(previous for _, previous in slots)),
            (Number * WINDOWS)(*shared.train_numbers),
            (Real * peers.size)(*(weights or [1.0] * peers.size)),
        )
        addresses = [ctypes.addressof(array) for array in self._kept]
        near, buffers, numels, places, numbers, previous, before, shares = addresses
        for index, (number, _) in enumerate(slots):
            shared.train_numbers[index % WINDOWS] = number
        return TrainInC(
            neighbours=near,
            num_neighbours=len(neighbours),
            group_rank=peers.group_rank,
            group_size=peers.size,
            arena=self._windows() if None in homes else None,
            window_bytes=shared.layout.window_bytes,
            slots=SLOTS,
            buffers=buffers,
            numels=numels,
            places=places,
            num_buffers=len(pieces),
            element_bytes=pieces[0].element_size(),
            numbers=numbers,
            previous=previous,
            window_numbers=before,
            weights=None if weights is None else shares,
            divisor=float(peers.size) if weights is None else sum(weights),
        )


def _describe(shared: SharedMemory, neighbour: Neighbour) -> Any:
    most = max(neighbour.opened, default=0) + 1
    homes = (Pointer * most)()
    for key, memory in neighbour.opened.items():
        homes[key] = memory.data_ptr()
    neighbour.homes = homes  # kept while C may look at it
    return NeighbourInC(
        mine=neighbour.address,
        told=ctypes.addressof(shared.rows[neighbour.member]),
        arena=neighbour.arena.data_ptr() + shared.layout.trains_start,
        homes=ctypes.addressof(homes),
        num_homes=most,
        member=neighbour.member,
    )


def can_go(shared: SharedMemory, peers: Peers, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether a train can carry such buffers; all ranks of a group say the same."""
    fits = shared.fused and peers.size <= MOST_MEMBERS
    return fits and dtype in DTYPES and device.type == "cpu"
