"""The exact mean, one definition for every transport.

    mean = round(sum of w_r * x_r over the ranks r, in rank order / sum of w_r)

accumulated wider than the data (float64 for float32, float32 for 16 bits) and rounded once. So
all ranks end bit-equal, replicas that are equal do not change, and neither the size of a buffer
nor the way that bytes travel shows in the result. (float64 has nothing wider: there it is
``x_0 + sum of w_r * (x_r - x_0) / sum of w_r``, which leaves equal replicas alone too.)

Every rank owns a slice of the buffer: slices go to their owners, an owner takes the mean of what
it got, and the result comes back; 2 (n - 1) / n of the buffer for every rank, as in a ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from loosestep.flat import STAGING, slices
from loosestep.peers import Message, Peers, Transfer
from loosestep.wire.links import Incoming, Links, links_of
from loosestep.wire.reducer import Done, Handle, Stateless, Traffic

BLOCK = 1 << 15  # elements summed at a time: what is summed stays in the cache
SAMPLE = 1 << 12  # elements of every slice from which the replicas' drift is estimated


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of ``dtype`` are kept in."""
    return torch.float64 if dtype.itemsize >= 4 else torch.float32


def mean_into(
    out: torch.Tensor, replicas: Sequence[torch.Tensor], weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Write the mean of ``replicas``, in their order, to ``out`` and return the unrounded one.

    This is the whole arithmetic; it needs no process group.

    >>> mean_into(torch.empty(2), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    tensor([2., 4.], dtype=torch.float64)
    """
    wide = wide_dtype(out.dtype)
    if wide == out.dtype:
        total = _sum_of_differences(replicas, weights)
    else:
        total = _sum(replicas, wide, weights)
    _divide_(total, float(len(replicas)) if weights is None else sum(weights))
    if wide == out.dtype:
        total.add_(replicas[0])
    out.copy_(total)
    return total


def _sum(
    replicas: Sequence[torch.Tensor], wide: torch.dtype, weights: Sequence[float] | None
) -> torch.Tensor:
    total = replicas[0].to(wide)
    if weights is not None:
        total.mul_(weights[0])
    term = torch.empty_like(total)
    for index, replica in enumerate(replicas[1:], start=1):
        term.copy_(replica)  # adding mixed dtypes directly is slower than a copy and a sum
        if weights is not None:
            term.mul_(weights[index])  # not add_(alpha=): a fused multiply rounds differently
        total.add_(term)
    return total


def _sum_of_differences(
    replicas: Sequence[torch.Tensor], weights: Sequence[float] | None
) -> torch.Tensor:
    base, total = replicas[0], torch.zeros_like(replicas[0])
    for index, replica in enumerate(replicas[1:], start=1):
        # Equal values differ by nothing, also where they are infinite.
        term = torch.sub(replica, base).masked_fill_(replica == base, 0.0)
        total.add_(term if weights is None else term.mul_(weights[index]))
    return total


def _divide_(total: torch.Tensor, divisor: float) -> None:
    if math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
        total.mul_(1.0 / divisor)
    else:
        total.div_(divisor)


class Mean(Stateless):
    """The exact mean, bit-equal on all ranks, whatever the transport.

    >>> Mean().bytes_on_wire(numel=8, dtype=torch.float32, group_size=2)
    32
    """

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch the mean of ``buffer`` over ``peers``."""
        if peers.size == 1:
            return Done()
        return _MeanInFlight(buffer, peers, links_of(peers))

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the bytes sent: the others' slices, and my own to each of them."""
        start, stop = slices(numel, group_size)[group_rank]
        mine = stop - start
        return dtype.itemsize * ((numel - mine) + (group_size - 1) * mine)

    def __repr__(self) -> str:
        return "Mean()"


class _MeanInFlight:
    """One buffer's mean: scatter, then (in ``advance``) sum and gather, then ``wait``."""

    def __init__(self, buffer: torch.Tensor, peers: Peers, links: Links) -> None:
        self.traffic = Traffic()
        self._buffer, self._peers, self._links = buffer, peers, links
        self._slices = [buffer[a:b] for a, b in slices(buffer.numel(), peers.size)]
        self._mine = self._slices[peers.group_rank]
        self._tag = peers.next_tags(3)
        self._loaned: list[torch.Tensor] = []
        self._gathered: dict[int, Incoming] | None = None
        self._sent: list[Transfer] = []
        room = {p: self._room(p) for p in peers.others}
        self._scattered = self._move({p: self._slices[p] for p in peers.others}, room, self._tag)

    def advance(self) -> None:
        """Sum my slice and start to hand it round."""
        if self._gathered is not None:
            return
        for incoming in self._scattered.values():
            incoming.wait()
        self._reduce()
        for buffer in self._loaned:
            STAGING.give(buffer)
        others = self._peers.others
        # A peer sends its result after it has read my slice, so the place is free by then.
        room = {p: None if self._direct(p) else self._slices[p] for p in others}
        self._gathered = self._move(dict.fromkeys(others, self._mine), room, self._tag + 1)

    def wait(self) -> None:
        """Take in the other slices; return when nobody needs mine any more."""
        self.advance()
        assert self._gathered is not None
        for peer, incoming in self._gathered.items():
            incoming.wait()
            part = self._slices[peer]
            incoming.read(0, part.numel(), part)
        readers = [p for p in self._peers.others if self._direct(p)]
        for transfer in self._acknowledge(readers) + self._sent:
            transfer.wait()

    def _acknowledge(self, readers: list[int]) -> list[Transfer]:
        token = torch.zeros(1, dtype=torch.uint8)
        messages = [Message(token, p, outgoing=True) for p in readers if self._slices[p].numel()]
        messages += [
            Message(torch.zeros_like(token), p, outgoing=False)
            for p in readers
            if self._mine.numel()
        ]
        return self._peers.post(messages, self._tag + 2)

    def _move(
        self,
        outgoing: dict[int, torch.Tensor],
        room: dict[int, torch.Tensor | None],
        tag: int,
    ) -> dict[int, Incoming]:
        """Offer ``outgoing`` to the peers and start to receive from them; empty slices stay."""
        gathering = tag != self._tag
        expected = {
            p: self._links.expect(buffer, p)
            for p, buffer in room.items()
            if (self._slices[p] if gathering else self._mine).numel()
        }
        offers = [self._links.offer(part, p) for p, part in outgoing.items() if part.numel()]
        transfers = self._peers.post([*expected.values(), *offers], tag)
        self._sent += transfers[len(expected) :]
        self._count(outgoing)
        arriving = zip(expected.items(), transfers, strict=False)
        return {p: self._links.incoming(t, message, room[p]) for (p, message), t in arriving}

    def _count(self, outgoing: dict[int, torch.Tensor]) -> None:
        for peer, part in outgoing.items():
            size = part.numel() * part.element_size()
            if self._direct(peer):
                self.traffic.bytes_copied += size
            else:
                self.traffic.bytes_sent += size

    def _direct(self, peer: int) -> bool:
        return self._links.reads_memory(peer, self._buffer.device)

    def _room(self, peer: int) -> torch.Tensor | None:
        """Return a buffer for the slice that ``peer`` sends me, or None if I read it there."""
        if self._direct(peer):
            return None
        buffer = STAGING.take(self._mine.numel(), self._buffer.dtype, self._buffer.device)
        self._loaned.append(buffer)
        return buffer

    def _reduce(self) -> None:
        """Replace my slice by the mean, a block at a time."""
        numel = self._mine.numel()
        scratch = [self._mine.new_empty(min(BLOCK, numel)) for _ in self._peers.others]
        for start in range(0, numel, BLOCK):
            stop = min(start + BLOCK, numel)
            replicas = [self._mine[start:stop]] * self._peers.size
            for (peer, incoming), room in zip(self._scattered.items(), scratch, strict=True):
                replicas[peer] = incoming.read(start, stop, room)
            before = self._mine[:SAMPLE].clone() if start == 0 else None
            mean = mean_into(self._mine[start:stop], replicas, self._peers.weights)
            if before is not None:
                replicas[self._peers.group_rank] = before
                self._sample(mean[:SAMPLE], [replica[:SAMPLE] for replica in replicas])

    def _sample(self, mean: torch.Tensor, replicas: list[torch.Tensor]) -> None:
        self.traffic.magnitude += float(mean.square().sum()) * len(replicas)
        self.traffic.deviation += sum(float((mean - r).square().sum()) for r in replicas)
        self.traffic.samples += mean.numel() * len(replicas)
