"""Every rank gives every other a parcel: some ranges of a flat tensor of its own.

Gradients go to their owners so (each rank sends each owner the ranges that it owns), and
parameters come back so (each owner sends all others the same ranges). Parcels travel as one
message each, or are read where they lie, as in ``exchange``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from loosestep.comm.flat.packing import pack_flats, unpack_flats
from loosestep.comm.flat.ranges import Ranges, clip, length, pack_ranges
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Message, Peers, Transfer
from loosestep.comm.reducers.mean import reduce_into
from loosestep.comm.transport.exchange import reach
from loosestep.comm.transport.shared_memory import SharedMemory
from loosestep.comm.transport.shared_tensors import SharedParts, SharedTensor
from loosestep.telemetry.traffic import Traffic

BLOCK = 1 << 18  # elements summed at a time; smaller: more system calls, larger: more memory


@dataclass(frozen=True)
class Parcels:
    """What is given and got, by group rank; all ranges count elements of the giver's tensor."""

    source: torch.Tensor  # flat and contiguous; not to be written before ``release``
    outgoing: Sequence[Ranges]
    incoming: Sequence[Ranges]
    peers: Peers


class Delivery(Protocol):
    """Parcels under way between this rank and some of its peers."""

    members: list[int]
    in_memory: bool

    def ready(self) -> None:
        """Return when the parcels for this rank can be read."""

    def read(self, member: int, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Return some elements of a member's parcel; ``scratch`` may hold them."""

    def taken(self) -> None:
        """Say that this rank has read everything."""

    def release(self) -> None:
        """Return when nobody needs the source any more."""


def deliver(parcels: Parcels) -> list[Delivery]:
    """Start to deliver to all peers; a group's first call is collective."""
    shared, distant = reach(parcels.peers, parcels.source.device)
    started: list[Delivery] = []
    if shared is not None:
        started.append(MemoryDelivery(parcels, shared))
    if distant:
        started.append(SocketDelivery(parcels, distant))
    return started


class MemoryDelivery:
    """Parcels are read where they lie."""

    in_memory = True

    def __init__(self, parcels: Parcels, shared: SharedMemory) -> None:
        self._parcels, self._tensor = parcels, SharedTensor(shared, parcels.peers, [parcels.source])
        self.members = self._tensor.members

    def ready(self) -> None:
        """Return when the neighbours have told where their tensors lie."""
        for member in self.members:
            self._tensor.wait(member)

    def read(self, member: int, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Copy some of a neighbour's elements to the front of ``scratch``."""
        into = scratch[: stop - start]
        self._tensor.read(member, clip(self._parcels.incoming[member], start, stop), into)
        return into

    def taken(self) -> None:
        """Let the neighbours have their memory back."""
        for member in self.members:
            self._tensor.taken(member)

    def release(self) -> None:
        """Return when the neighbours have read mine."""
        self._tensor.close()


class SocketDelivery:
    """Parcels travel as messages."""

    in_memory = False

    def __init__(self, parcels: Parcels, members: list[int]) -> None:
        self.members = members
        self._peers = parcels.peers
        source = parcels.source
        sizes = {p: length(parcels.incoming[p]) for p in members}
        self._inbox = {p: STAGING.take(sizes[p], source.dtype, source.device) for p in members}
        self._packed: list[torch.Tensor] = []
        outbox = {p: self._pack(source, parcels.outgoing[p]) for p in members}
        self._arriving, self._leaving = self._post(outbox)

    def ready(self) -> None:
        """Return when all parcels have arrived."""
        for transfer in self._arriving:
            transfer.wait()

    def read(self, member: int, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Return a view of what arrived."""
        return self._inbox[member][start:stop]

    def unpack(self, member: int, places: Sequence[torch.Tensor]) -> None:
        """Copy what arrived to its places."""
        unpack_flats(self._inbox[member], places)

    def taken(self) -> None:
        """Keep the room for the next parcels."""
        for buffer in self._inbox.values():
            STAGING.give(buffer)
        self._inbox.clear()

    def release(self) -> None:
        """Return when everything that I sent has left."""
        for transfer in self._leaving:
            transfer.wait()
        for buffer in self._packed:
            STAGING.give(buffer)
        self._packed.clear()

    def _pack(self, source: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        if len(ranges) == 1:
            return source[ranges[0][0] : ranges[0][1]]
        self._packed.append(pack_ranges(source, ranges))
        return self._packed[-1]

    def _post(self, outbox: dict[int, torch.Tensor]) -> tuple[list[Transfer], list[Transfer]]:
        tag = self._peers.next_tags(1)
        receives = [_message(t, p, outgoing=False) for p, t in self._inbox.items() if t.numel()]
        sends = [_message(t, p, outgoing=True) for p, t in outbox.items() if t.numel()]
        transfers = self._peers.post([*receives, *sends], tag)
        if len(transfers) != len(receives) + len(sends):  # the backend made one of all
            return transfers, []
        return transfers[: len(receives)], transfers[len(receives) :]


def _message(tensor: torch.Tensor, peer: int, *, outgoing: bool) -> Message:
    return Message(tensor.view(torch.uint8), peer, outgoing=outgoing)


class ReduceToOwners:
    """The mean of a flat buffer, of which every member gets the ranges that it owns.

    The sum is taken in rank order, so it does not depend on who arrives first, and wider than the
    values where there is anything wider, as by ``Mean``.
    """

    def __init__(self, buffer: torch.Tensor, owned: Sequence[Ranges], peers: Peers) -> None:
        self._buffer, self._owned, self._peers = buffer, owned[peers.group_rank], peers
        incoming = [self._owned] * peers.size
        self._deliveries = deliver(Parcels(buffer, owned, incoming, peers))
        self.traffic = _traffic(self._deliveries, buffer, owned)

    def wait(self) -> torch.Tensor:
        """Return the mean of what this rank owns, packed into one flat tensor (from STAGING)."""
        for delivery in self._deliveries:
            delivery.ready()
        result = pack_ranges(self._buffer, self._owned)
        scratch = {
            member: STAGING.take(BLOCK, result.dtype, result.device)
            for delivery in self._deliveries
            for member in delivery.members
        }
        for start in range(0, result.numel(), BLOCK):
            self._sum(result[start : start + BLOCK], start, scratch)
        for room in scratch.values():
            STAGING.give(room)
        for delivery in self._deliveries:
            delivery.taken()
        return result

    def release(self) -> None:
        """Return when the buffer is this rank's alone again."""
        for delivery in self._deliveries:
            delivery.release()

    def _sum(self, own: torch.Tensor, start: int, scratch: dict[int, torch.Tensor]) -> None:
        replicas = [own] * self._peers.size
        for delivery in self._deliveries:
            for member in delivery.members:
                stop = start + own.numel()
                replicas[member] = delivery.read(member, start, stop, scratch[member])
        mean_of_gradients(own, replicas, self._peers.weights)


def mean_of_gradients(
    own: torch.Tensor, replicas: list[torch.Tensor], weights: Sequence[float] | None
) -> None:
    """Write the mean of ``replicas``, one of which is ``own``, to ``own``; the others are used up.

    >>> own = torch.tensor([1.0, 2.0])
    >>> mean_of_gradients(own, [own, torch.tensor([3.0, 6.0])], None)
    >>> own
    tensor([2., 4.])
    """
    if len(replicas) == 1:
        return
    if own.is_complex():  # whose sums would be kept in real numbers
        reals = {id(r): torch.view_as_real(r) for r in replicas}
        mean_of_gradients(reals[id(own)], [reals[id(r)] for r in replicas], weights)
        return
    if weights is not None or own.dtype != torch.float64:
        reduce_into([own], replicas, weights)
        return
    # Nothing is wider than float64: in rank order, so that ``own`` is added before it is written.
    total = own if any(own is replica for replica in replicas[:2]) else replicas[0]
    torch.add(replicas[0], replicas[1], out=total)
    for replica in replicas[2:]:
        total.add_(replica)
    torch.mul(total, 1.0 / len(replicas), out=own)


class GatherFromOwners:
    """Every member's parts of tensors, written to their places in all others' tensors.

    ``places`` has a list for every member: where its parts belong here, and this rank's own.
    """

    def __init__(self, places: Sequence[Sequence[torch.Tensor]], peers: Peers) -> None:
        self._places, self._mine = places, places[peers.group_rank]
        first = next(place for member in places for place in member)
        shared, distant = reach(peers, first.device)
        self._shared = None if shared is None else SharedParts(self._mine, peers, shared)
        self._sockets = self._send(first, distant, peers) if distant else None
        size = sum(part.nbytes for part in self._mine)
        self.traffic = Traffic(size * len(distant), size * (peers.size - 1 - len(distant)))

    def wait(self) -> None:
        """Return when all places hold their owners' values and nobody needs mine any more."""
        if self._shared is not None:
            self._shared.collect(self._places)
        if self._sockets is not None:
            self._sockets.ready()
            for member in self._sockets.members:
                self._sockets.unpack(member, self._places[member])
            self._sockets.taken()
            self._sockets.release()
            STAGING.give(self._packed)
        if self._shared is not None:
            self._shared.release()

    def _send(self, like: torch.Tensor, distant: list[int], peers: Peers) -> SocketDelivery:
        sizes = [sum(place.numel() for place in member) for member in self._places]
        self._packed = STAGING.take(sizes[peers.group_rank], like.dtype, like.device)
        pack_flats(self._mine, self._packed)
        outgoing = [[(0, self._packed.numel())]] * peers.size
        incoming = [[(0, size)] for size in sizes]
        return SocketDelivery(Parcels(self._packed, outgoing, incoming, peers), distant)


def _traffic(
    deliveries: Sequence[Delivery], source: torch.Tensor, outgoing: Sequence[Ranges]
) -> Traffic:
    traffic = Traffic()
    for delivery in deliveries:
        moved = source.element_size() * sum(length(outgoing[p]) for p in delivery.members)
        if delivery.in_memory:
            traffic.bytes_copied += moved
        else:
            traffic.bytes_sent += moved
    return traffic
