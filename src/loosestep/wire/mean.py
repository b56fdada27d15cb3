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
from loosestep.peers import Peers
from loosestep.wire.exchange import Task
from loosestep.wire.links import exchanges
from loosestep.wire.reducer import Done, Handle, Stateless, Traffic

BLOCK = 1 << 15  # elements summed at a time: what is summed stays in the cache
SAMPLE = 1 << 12  # elements of every slice from which the replicas' drift is estimated


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums of ``dtype`` are kept in."""
    return torch.float64 if dtype.itemsize >= 4 else torch.float32


def mean_into(
    out: torch.Tensor,
    replicas: Sequence[torch.Tensor],
    weights: Sequence[float] | None = None,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Write the mean of ``replicas``, in their order, to ``out`` and return the unrounded one.

    This is the whole arithmetic; it needs no process group. ``room`` are two wide tensors to work
    in, which saves the page faults of new ones.

    >>> mean_into(torch.empty(2), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])])
    tensor([2., 4.], dtype=torch.float64)
    """
    total, term = (_wide(out), _wide(out)) if room is None else (t[: out.numel()] for t in room)
    base = replicas[0] if total.dtype == out.dtype else None
    if base is not None:
        _sum_differences(total, replicas, weights)
    else:
        _sum(total, term, replicas, weights)
    _divide_(total, float(len(replicas)) if weights is None else sum(weights))
    if base is not None:
        total.add_(base)
    out.copy_(total)
    return total


def _wide(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=wide_dtype(like.dtype), device=like.device)


def _sum(
    total: torch.Tensor,
    term: torch.Tensor,
    replicas: Sequence[torch.Tensor],
    weights: Sequence[float] | None,
) -> None:
    total.copy_(replicas[0])
    if weights is not None:
        total.mul_(weights[0])
    for index, replica in enumerate(replicas[1:], start=1):
        term.copy_(replica)  # adding mixed dtypes directly is slower than a copy and a sum
        if weights is not None:
            term.mul_(weights[index])  # not add_(alpha=): a fused multiply rounds differently
        total.add_(term)


def _sum_differences(
    total: torch.Tensor, replicas: Sequence[torch.Tensor], weights: Sequence[float] | None
) -> None:
    base = replicas[0]
    total.zero_()
    for index, replica in enumerate(replicas[1:], start=1):
        # Equal values differ by nothing, also where they are infinite.
        term = torch.sub(replica, base).masked_fill_(replica == base, 0.0)
        total.add_(term if weights is None else term.mul_(weights[index]))


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
        return _MeanInFlight(Task(buffer, peers))

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

    def __init__(self, task: Task) -> None:
        self.traffic = Traffic()
        self._task, self._reduced = task, False
        self._exchanges = exchanges(task)
        self._count_bytes()

    @property
    def bytes_held(self) -> int:
        """The slices that are sent to this rank and wait to be summed."""
        stored = [len(e.members) for e in self._exchanges if not e.in_memory]
        return sum(stored) * self._task.mine.nbytes

    def advance(self) -> None:
        """Sum my slice and start to hand it round."""
        if self._reduced:
            return
        for exchange in self._exchanges:
            exchange.ready()
        self._reduce()
        for exchange in self._exchanges:
            exchange.publish()
        self._reduced = True

    def wait(self) -> None:
        """Take in the other slices; return when nobody needs mine any more."""
        self.advance()
        for exchange in self._exchanges:
            exchange.collect()
        for exchange in self._exchanges:
            exchange.release()

    def _reduce(self) -> None:
        """Replace my slice by the mean, a block at a time."""
        mine = self._task.mine
        wide = (wide_dtype(mine.dtype), mine.device)
        room = (STAGING.take(BLOCK, *wide), STAGING.take(BLOCK, *wide))
        scratch = [STAGING.take(BLOCK, mine.dtype, mine.device) for _ in self._task.peers.others]
        for start in range(0, mine.numel(), BLOCK):
            own = mine[start : start + BLOCK]
            replicas = self._replicas(start, own, scratch)
            before = own[:SAMPLE].clone() if start == 0 else None
            mean = mean_into(own, replicas, self._task.peers.weights, room)
            if before is not None:
                replicas[self._task.peers.group_rank] = before
                self._sample(mean[:SAMPLE], [replica[:SAMPLE] for replica in replicas])
        for buffer in (*room, *scratch):
            STAGING.give(buffer)

    def _replicas(
        self, start: int, own: torch.Tensor, scratch: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return all members' versions of a block of my slice, in rank order."""
        replicas = [own] * self._task.peers.size
        spaces = iter(scratch)
        for exchange in self._exchanges:
            for member in exchange.members:
                stop = start + own.numel()
                replicas[member] = exchange.read(member, start, stop, next(spaces))
        return replicas

    def _sample(self, mean: torch.Tensor, replicas: list[torch.Tensor]) -> None:
        self.traffic.magnitude += float(mean.square().sum()) * len(replicas)
        self.traffic.deviation += sum(
            float((mean - replica.to(mean.dtype)).square().sum()) for replica in replicas
        )
        self.traffic.samples += mean.numel() * len(replicas)

    def _count_bytes(self) -> None:
        for exchange in self._exchanges:
            moved = sum(
                self._task.part(p).nbytes + self._task.mine.nbytes for p in exchange.members
            )
            if exchange.in_memory:
                self.traffic.bytes_copied += moved
            else:
                self.traffic.bytes_sent += moved
