"""The backend's own all-reduce, for those who prefer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from loosestep.comm.failure import reason_of
from loosestep.comm.flat.cuts import sizes_of
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.reducer import Done, Handle, Place, Reducer
from loosestep.errors import check_instance
from loosestep.telemetry.traffic import Traffic


@dataclass(frozen=True)
class AllReduce(Reducer):
    """Reduce with the backend's ``all_reduce``: a sum in the data's own dtype, then a division.

    Fast on NCCL and able to overlap with backward. The order of the sum is the backend's, so
    the result is equal to float tolerance only, and equal 16-bit replicas may move.
    """

    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    def __post_init__(self) -> None:
        """Refuse what is no operation."""
        kinds = (dist.ReduceOp, dist.ReduceOp.RedOpType)
        check_instance("op", self.op, kinds, "one such as torch.distributed.ReduceOp.SUM")

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch an asynchronous all-reduce."""
        return Done() if peers.size == 1 else _Reduced(buffer, peers, self.op)

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the bytes of a ring: 2 (n - 1) / n of the buffer."""
        return 2 * (group_size - 1) * sum(sizes_of(numel)) * dtype.itemsize // group_size

    def __repr__(self) -> str:
        return f"AllReduce({'' if self.op == dist.ReduceOp.SUM else self.op})"


@dataclass(frozen=True)
class First(Reducer):
    """Not a mean at all: every rank takes the values of the first that has any weight."""

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch an asynchronous broadcast, the backend's."""
        if peers.size == 1:
            return Done()
        flat, weights = buffer.view(torch.uint8), peers.weights or (1.0,)
        first = next((rank for rank, weight in enumerate(weights) if weight), 0)
        group = peers.group.process_group
        work = dist.broadcast(flat, group=group, group_src=first, async_op=True)
        sent = self.bytes_on_wire(buffer.numel(), buffer.dtype, peers.size, peers.group_rank)
        return _Collective(work, peers, Traffic(bytes_sent=sent))

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the share of a rank, every other rank receiving the buffer once."""
        return (group_size - 1) * sum(sizes_of(numel)) * dtype.itemsize // group_size


class _Collective(Handle):
    """An operation of the backend under way."""

    def __init__(self, work: dist.Work | None, peers: Peers, traffic: Traffic) -> None:
        assert work is not None, "asked for with async_op=True"
        self.traffic = traffic
        self._work, self._peers = work, peers

    def wait(self) -> None:
        """Wait for the backend."""
        timeout, reason = self._peers.timeout, ""
        try:
            self._work.wait() if timeout is None else self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            reason = reason_of(error)
        if reason:  # not before: [Note: errors outside except]
            raise self._peers.lost(None, reason)


class _Reduced(_Collective):
    """A sum or a maximum under way; a sum is divided at the end."""

    def __init__(self, buffer: torch.Tensor, peers: Peers, op: dist.ReduceOp.RedOpType) -> None:
        self._buffer, self._op = buffer, op
        sent = AllReduce(op).bytes_on_wire(buffer.numel(), buffer.dtype, peers.size)
        if peers.weights is not None and op == dist.ReduceOp.SUM:
            # By shares that add up to 1: large weights must not overflow narrow dtypes.
            buffer.mul_(peers.weights[peers.group_rank] / sum(peers.weights))
        work = dist.all_reduce(buffer, op, group=peers.group.process_group, async_op=True)
        super().__init__(work, peers, Traffic(bytes_sent=sent))

    def wait(self) -> None:
        """Wait for the sum and divide."""
        super().wait()
        if self._op == dist.ReduceOp.SUM and self._peers.weights is None:
            self._buffer.div_(self._peers.size)
