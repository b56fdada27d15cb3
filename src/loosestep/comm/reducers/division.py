"""Averages divided among the ranks of a host, where those hold the same values.

    share       each rank takes one part of the tensors, as views
    average     with the ranks that take the same part on other hosts
    hand round  each rank gives its neighbours what came of its part

So of n ranks each copies, compresses and remembers one n-th, and one copy leaves the host.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loosestep.comm.agreement import Header
from loosestep.comm.flat.packing import flat_copies, write_back
from loosestep.comm.flat.rows import shares
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers.parcels import GatherFromOwners
from loosestep.comm.reducers.reducer import Reducer
from loosestep.comm.tensors import Named
from loosestep.comm.transport.exchange import reach
from loosestep.errors import RankMismatch
from loosestep.telemetry.traffic import Traffic

SAMPLE = 16  # elements of every tensor that ranks of a host compare at a sync


@dataclass(frozen=True)
class Division:
    """Who of a host takes which part."""

    inside: Peers  # the ranks of this host
    across: Peers  # those that take the same part, one on every host
    hosts: Sequence[tuple[int, ...]]  # all of them, by group rank
    reducer: Reducer  # what averages across
    undivided: Reducer  # and what over all ranks, where those of a host differ

    def share(self, named: Sequence[Named]) -> list[Named]:
        """Return this rank's part of the tensors."""
        return shares(named, self.inside.size, self.reducer.block)[self.inside.group_rank]

    def prepare(self, device: torch.device) -> None:
        """Meet the neighbours; collective."""
        reach(self.inside, device)

    def hand_round(self, named: Sequence[Named], step: int) -> Traffic:
        """Give the neighbours this rank's part of the tensors, and take theirs, in place."""
        traffic, phase = Traffic(), Phase("handing round inside the host", step=step)
        parts = shares(named, self.inside.size, self.reducer.block)
        for dtype in sorted({tensor.dtype for part in parts for _, tensor in part}, key=str):
            homes = [[t for _, t in part if t.dtype == dtype] for part in parts]
            places = [flat_copies(part) for part in homes]
            gather = GatherFromOwners(places, self.inside.during(phase))
            gather.wait()
            write_back(itertools.chain(*homes), itertools.chain(*places))
            traffic.add(gather.traffic)
        return traffic

    def check(self, peers: Peers, headers: Sequence[Header]) -> None:
        """Raise on all ranks if what they told of their values differs inside a host."""
        for host in self.hosts:
            if len({headers[member].sample for member in host}) > 1:
                ranks = [peers.global_ranks[member] for member in host]
                raise RankMismatch(
                    f"rank {peers.global_ranks[peers.group_rank]}: ranks_of_host='equal' says that "
                    f"the ranks of a host hold the same values, but those of ranks {ranks} differ "
                    f"(level {peers.level!r}). Nothing has been changed; share gradients inside "
                    "hosts at every step, or use TwoLevel(..., ranks_of_host='differ') (with "
                    "ErrorFeedback in place of ReplicaFeedback)"
                )


def sampled(named: Sequence[Named], step: int) -> bytes:
    """Return a hash of some elements of every tensor, of others at another step.

    By their logical order: a neighbour may keep them in another one.
    """
    held = [tensor for _, tensor in named if tensor.numel()]
    if not held:
        return b"nothing"
    some = torch.cat([_some(tensor, step) for tensor in held]).cpu()
    content = ctypes.string_at(some.data_ptr(), some.nbytes)
    return hashlib.blake2b(content, digest_size=8).digest()


def _some(tensor: torch.Tensor, step: int) -> torch.Tensor:
    stride = max(1, tensor.numel() // SAMPLE)
    first = (step * 40_503) % stride
    if tensor.is_contiguous():
        return tensor.view(-1)[first::stride]
    return torch.take(tensor, torch.arange(first, tensor.numel(), stride, device=tensor.device))
