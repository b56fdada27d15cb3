"""The exact mean, one definition for every transport.

    mean = round(sum of w_r * x_r over the ranks r, in rank order / sum of w_r)

accumulated wider than the data (float64 for float32, float32 for 16 bits) and rounded once. So
all ranks end bit-equal, replicas that are equal do not change, and neither the size of a buffer
nor the way that bytes travel shows in the result. (float64 has nothing wider: there it is
``x_0 + sum of w_r * (x_r - x_0) / sum of w_r``, which leaves equal replicas alone too. bfloat16
has the range of float32: a sum that is too large for it is taken anew in float64.)

Every rank owns a slice of the buffer: slices go to their owners, an owner takes the mean of what
it got, and the result comes back; 2 (n - 1) / n of the buffer for every rank, as in a ring.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loosestep.comm import native
from loosestep.comm.flat.cuts import cut, sizes_of
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.pieces import InPieces
from loosestep.comm.reducers.reducer import Done, Handle, Place, Reducer
from loosestep.comm.reducers.train import Train, can_go
from loosestep.comm.transport.exchange import Exchange, Task, elements_moved, exchanges, largest
from loosestep.telemetry.traffic import Traffic

BLOCK = 1 << 15  # elements summed at a time: what is summed stays in the cache
SAMPLE = native.CONSTANTS["DRIFT_SAMPLE"]  # elements of every slice that drift is estimated from
FUSED = {torch.float32: "mean_f32", torch.bfloat16: "mean_bf16"}


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
    if out.dtype == torch.bfloat16:
        _mend_overflow(total, replicas, weights)
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


def _mend_overflow(
    mean: torch.Tensor, replicas: Sequence[torch.Tensor], weights: Sequence[float] | None
) -> None:
    """Take means anew, in float64, whose sum float32 had no room for."""
    lost = ~mean.isfinite()
    anew = mean.new_empty(int(lost.sum()))
    if anew.numel():
        mean_into(anew, [replica[lost] for replica in replicas], weights)
        mean[lost] = anew


def reduce_into(
    outs: Sequence[torch.Tensor],
    replicas: Sequence[torch.Tensor],
    weights: Sequence[float] | None = None,
) -> None:
    """Write the mean of ``replicas`` to every one of ``outs``, which may be replicas themselves.

    The arithmetic is that of ``mean_into``, in one pass over memory where there are loops in C.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    >>> reduce_into([one, other], [one, other])
    >>> other
    tensor([2., 4.])
    """
    function = _fused(outs[0])
    if function is None:
        _reduce_plainly(outs, replicas, weights)
        return
    divisor = float(len(replicas)) if weights is None else sum(weights)
    factors = None if weights is None else (ctypes.c_double * len(weights))(*weights)
    sides = (_pointers(outs), len(outs), _pointers(replicas), len(replicas))
    function(*sides, factors, divisor, outs[0].numel())


def _fused(out: torch.Tensor) -> Callable[..., None] | None:
    if out.dtype not in FUSED or out.device.type != "cpu":
        return None
    loops = native.loops()
    return None if loops is None else getattr(loops, FUSED[out.dtype])


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _reduce_plainly(
    outs: Sequence[torch.Tensor],
    replicas: Sequence[torch.Tensor],
    weights: Sequence[float] | None,
) -> None:
    """Do the same a block at a time, so that what is summed stays in the cache."""
    wide = (wide_dtype(outs[0].dtype), outs[0].device)
    room = (STAGING.take(BLOCK, *wide), STAGING.take(BLOCK, *wide))
    for start in range(0, outs[0].numel(), BLOCK):
        blocks = [replica[start : start + BLOCK] for replica in replicas]
        first, *others = (out[start : start + BLOCK] for out in outs)
        mean_into(first, blocks, weights, room)
        for other in others:
            other.copy_(first)
    for buffer in room:
        STAGING.give(buffer)


@dataclass(frozen=True)
class Mean(Reducer):
    """The exact mean, bit-equal on all ranks, whatever the transport.

    >>> Mean().bytes_on_wire(numel=8, dtype=torch.float32, group_size=2)
    32
    """

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch the mean of ``buffer`` over ``peers``."""
        if peers.size == 1:
            return Done()
        most = largest(peers, buffer)
        if buffer.nbytes <= most:
            return MeanInFlight(Task(buffer, peers))
        pieces = cut(buffer, most, peers.size)
        return InPieces(pieces, lambda piece: MeanInFlight(Task(piece, peers)))

    def takes_many(self, peers: Peers, dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether ``start_many`` can be used; the same on all ranks."""
        own = type(self).start is Mean.start  # a subclass may want to see every buffer
        return own and peers.size > 1 and can_go(peers.shared_memory, peers, dtype, device)

    def start_many(self, buffers: Sequence[torch.Tensor], peers: Peers) -> Handle:
        """Launch the mean of several buffers of one dtype."""
        return Train(buffers, peers, peers.shared_memory)

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the bytes sent: the others' slices, and my own to each of them."""
        return dtype.itemsize * elements_moved(sum(sizes_of(numel)), group_size, group_rank)


class MeanInFlight(Handle):
    """One buffer's mean: scatter, then (in ``advance``) sum and gather, then ``wait``."""

    def __init__(self, task: Task) -> None:
        self.traffic = Traffic()
        self.task, self._reduced, self._collected = task, False, False
        self._exchanges = exchanges(task)
        _count_bytes(self.traffic, task, self._exchanges)

    @property
    def bytes_held(self) -> int:
        """The slices that are sent to this rank and wait to be summed."""
        stored = [len(e.members) for e in self._exchanges if not e.in_memory]
        return sum(stored) * self.task.mine.nbytes

    def advance(self) -> None:
        """Sum my slice and start to hand it round."""
        if not self._reduced:
            self.reduce()
            self.publish()
            self._reduced = True

    def wait(self) -> None:
        """Take in the other slices; return when nobody needs mine any more."""
        self.advance()
        self.collect()

    def ready(self) -> None:
        """Return when the others' versions of my slice can be read."""
        for exchange in self._exchanges:
            exchange.ready()

    def reduce(self) -> None:
        """Replace my slice by the mean, here and wherever else it is to be."""
        self.ready()
        peers = self.task.peers
        replicas = [self.task.mine] * peers.size
        for exchange in self._exchanges:
            for member in exchange.members:
                replicas[member] = exchange.read(member)
        sample(self.traffic, [replica[:SAMPLE] for replica in replicas])
        outs = [self.task.mine, *self._mirrors()]
        reduce_into(outs, replicas, peers.weights)

    def publish(self) -> None:
        """Let the others have my slice."""
        for exchange in self._exchanges:
            exchange.publish()

    def collect(self) -> None:
        """Take in the other slices; return when nobody needs mine any more."""
        if self._collected:
            return
        self._collected = True
        for exchange in self._exchanges:
            exchange.collect()
        for exchange in self._exchanges:
            exchange.release()

    def _mirrors(self) -> list[torch.Tensor]:
        return [place for exchange in self._exchanges for place in exchange.mirrors()]


def sample(traffic: Traffic, replicas: list[torch.Tensor]) -> None:
    """Add how far apart some elements of the replicas are."""
    deviation, magnitude = _spread(replicas)
    traffic.deviation += deviation
    traffic.magnitude += magnitude * len(replicas)
    traffic.samples += replicas[0].numel() * len(replicas)


def _spread(replicas: list[torch.Tensor]) -> tuple[float, float]:
    loops = native.loops() if replicas[0].dtype == torch.float32 else None
    if loops is None or replicas[0].device.type != "cpu":
        values = torch.stack(replicas).double()
        mean = values.mean(0)
        return float(values.sub(mean).square_().sum()), float(mean.square().sum())
    sums = (ctypes.c_double * 2)()
    loops.spread_f32(sums, _pointers(replicas), len(replicas), replicas[0].numel())
    return sums[0], sums[1]


def _count_bytes(traffic: Traffic, task: Task, exchanges: Sequence[Exchange]) -> None:
    for exchange in exchanges:
        moved = sum(task.part(p).nbytes + task.mine.nbytes for p in exchange.members)
        if exchange.in_memory:
            traffic.bytes_copied += moved
        else:
            traffic.bytes_sent += moved
