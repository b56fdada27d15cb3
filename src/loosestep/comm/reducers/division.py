"""Averages divided among the ranks of a host, where those hold the same values.

    share       each rank takes one part of the tensors, as views
    average     with the ranks that take the same part on other hosts
    hand round  each rank gives its neighbours what came of its part

So of n ranks each copies, compresses and remembers one n-th, and one copy leaves the host.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loosestep.comm.agreement import Header
from loosestep.comm.cuts import slices
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers.parcels import GatherFromOwners
from loosestep.comm.reducers.reducer import Reducer
from loosestep.comm.tensors import Named
from loosestep.comm.transport.exchange import reach
from loosestep.errors import RankMismatch
from loosestep.telemetry.traffic import Traffic

SAMPLE = 16  # elements of every tensor that ranks of a host compare at a sync
ROWS = " rows "  # between the name of a tensor and those of its rows that a part holds


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
            places = [[home.contiguous().view(-1) for home in part] for part in homes]
            gather = GatherFromOwners(places, self.inside.during(phase))
            gather.wait()
            _copy_back(list(itertools.chain(*homes)), list(itertools.chain(*places)))
            traffic.add(gather.traffic)
        return traffic

    def check(self, peers: Peers, headers: Sequence[Header]) -> None:
        """Raise on all ranks if what they told of their values differs inside a host."""
        for host in self.hosts:
            if len({headers[member].sample for member in host}) > 1:
                ranks = [peers.global_ranks[member] for member in host]
                raise RankMismatch(
                    f"rank {peers.global_ranks[peers.group_rank]}: hosts='agree' says that the "
                    f"ranks of a host hold the same values, but those of ranks {ranks} differ "
                    f"(level {peers.level!r}). Nothing has been changed; share gradients inside "
                    "hosts at every step, or use TwoLevel(..., hosts='differ') (with ErrorFeedback "
                    "in place of ReplicaFeedback)"
                )


def shares(named: Sequence[Named], count: int, block: int = 1) -> list[list[Named]]:
    """Cut tensors into ``count`` parts of about the same size, between rows and blocks.

    The cut depends on shapes only, so that all ranks know all parts. Where few rows begin with a
    block of ``block`` elements, parts are the less alike.

    >>> w, b = torch.zeros(3, 2), torch.zeros(2)
    >>> [[(name, len(t)) for name, t in part] for part in shares([("w", w), ("b", b)], 2)]
    [[('w rows 0:2', 2)], [('w rows 2:3', 1), ('b', 2)]]
    """
    cuts = _cuts(tuple(tensor.shape for _, tensor in named), count, block)
    return [[_rows(*named[index], first, last) for index, first, last in cut] for cut in cuts]


@functools.lru_cache(maxsize=64)
def _cuts(
    shapes: tuple[torch.Size, ...], count: int, block: int
) -> list[list[tuple[int, int, int]]]:
    """Return for every part which rows of which tensors it holds."""
    bounds = slices(sum(shape.numel() for shape in shapes), count)
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in bounds]
    at = 0
    for index, shape in enumerate(shapes):
        for cut, (start, stop) in zip(cuts, bounds, strict=True):
            first, last = (_row(shape, element - at, block) for element in (start, stop))
            if first < last:
                cut.append((index, first, last))
        at += shape.numel()
    return cuts


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


def whole_name(name: str) -> str:
    """Return the name of the tensor that a part has rows of."""
    return name.partition(ROWS)[0]


def origin(name: str, part: torch.Tensor) -> tuple[str, int]:
    """Return which tensor a part has rows of, and the number of its first element in that.

    >>> origin("w rows 2:5", torch.zeros(3, 4)), origin("b", torch.zeros(4))
    (('w', 8), ('b', 0))
    """
    whole, _, rows = name.partition(ROWS)
    return whole, int(rows.partition(":")[0] or 0) * (part.numel() // _num_rows(part.shape))


def _num_rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _row(shape: torch.Size, element: int, block: int) -> int:
    """Return the row that begins next to an element, and with a block; none is cut."""
    rows, numel = _num_rows(shape), shape.numel()
    if not 0 < element < numel:
        return rows if 0 < numel <= element else 0
    size = math.lcm(numel // rows, block)  # of rows that are whole blocks together
    return min((2 * element + size - 1) // (2 * size) * (size * rows // numel), rows)


def _rows(name: str, tensor: torch.Tensor, first: int, last: int) -> Named:
    if last - first == _num_rows(tensor.shape):
        return name, tensor
    return f"{name}{ROWS}{first}:{last}", tensor[first:last]


def _copy_back(homes: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Write what came into homes whose elements do not follow each other."""
    for home, place in zip(homes, places, strict=True):
        if not home.is_contiguous():
            home.copy_(place.view(home.shape))
    # The kernel wrote the others: autograd must know that saved values are stale.
    torch.autograd.graph.increment_version([home for home in homes if home.is_contiguous()])
