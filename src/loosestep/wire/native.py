"""The backend's own all-reduce, for those who prefer it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from loosestep.peers import Peers
from loosestep.wire.reducer import Done, Handle, Stateless, Traffic


class Native(Stateless):
    """Reduce with the backend's ``all_reduce``: a sum in the data's own dtype, then a division.

    Fast on NCCL and able to overlap with backward. The order of the sum is the backend's, so
    the result is equal to float tolerance only, and equal 16-bit replicas may move.
    """

    lossy = False

    def __init__(self, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        self.op = op

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch an asynchronous all-reduce."""
        return Done() if peers.size == 1 else _AllReduce(buffer, peers, self.op)

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the bytes of a ring: 2 (n - 1) / n of the buffer."""
        return 2 * (group_size - 1) * numel * dtype.itemsize // group_size

    def __repr__(self) -> str:
        return f"Native({'' if self.op == dist.ReduceOp.SUM else self.op})"


class First(Stateless):
    """Not a mean at all: every rank takes the first rank's values, by the backend's broadcast."""

    lossy = False

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch an asynchronous broadcast."""
        if peers.size == 1:
            return Done()
        flat = buffer.view(torch.uint8)
        work = dist.broadcast(flat, group=peers.process_group, group_src=0, async_op=True)
        sent = self.bytes_on_wire(buffer.numel(), buffer.dtype, peers.size, peers.group_rank)
        return _Collective(work, peers, Traffic(bytes_sent=sent))

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the share of a rank, every other rank receiving the buffer once."""
        return (group_size - 1) * numel * dtype.itemsize // group_size


class _Collective:
    """An operation of the backend under way."""

    bytes_held = 0

    def __init__(self, work: dist.Work | None, peers: Peers, traffic: Traffic) -> None:
        assert work is not None, "asked for with async_op=True"
        self.traffic = traffic
        self._work, self._peers = work, peers

    def advance(self) -> None:
        """Nothing to do: the backend is on its own."""

    def wait(self) -> None:
        """Wait for the backend."""
        timeout, reason = self._peers.timeout, ""
        try:
            self._work.wait() if timeout is None else self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        if reason:
            raise self._peers.lost(None, reason)


class _AllReduce(_Collective):
    """A sum or a maximum under way; a sum is divided at the end."""

    def __init__(self, buffer: torch.Tensor, peers: Peers, op: dist.ReduceOp.RedOpType) -> None:
        self._buffer, self._op = buffer, op
        sent = Native(op).bytes_on_wire(buffer.numel(), buffer.dtype, peers.size)
        if peers.weights is not None and op == dist.ReduceOp.SUM:
            # By shares that add up to 1: large weights must not overflow narrow dtypes.
            buffer.mul_(peers.weights[peers.group_rank] / sum(peers.weights))
        work = dist.all_reduce(buffer, op, group=peers.process_group, async_op=True)
        super().__init__(work, peers, Traffic(bytes_sent=sent))

    def wait(self) -> None:
        """Wait for the sum and divide."""
        super().wait()
        if self._op == dist.ReduceOp.SUM and self._peers.weights is None:
            self._buffer.div_(self._peers.size)
