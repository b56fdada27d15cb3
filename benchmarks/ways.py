"""What each special way through shared memory is worth: on and off, in turn, on one host.

    loop in C   many buffers carried through by one loop, against one exchange for each window
                (and one agreement through memory, against one by messages)
    resident    parameters that live in shared memory, against such as are copied through windows
    gradients   the same of gradients, in a backward that computes next to nothing
    reading     gradients to owners and parameters back, read where neighbours have them, against
                copies that are lent

A way that is worth less than a tenth in the case that it was made for is to go.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, alternate, parameters, transformer_shapes
from benchmarks.report import Row
from loosestep import attach, ddp
from loosestep.comm.flat.cuts import slices
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.group import Group
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.parcels import GatherFromOwners, ReduceToOwners
from loosestep.reducers import Mean, Reducer, SharedMemoryMean
from loosestep.sync.averager import Averager
from loosestep.testing import run_ranks

Pair = dict[str, Contender]  # on, and off

WHOLE = transformer_shapes()
TENSORS: dict[str, list[tuple[int, ...]]] = {
    "100 x 1,000": [(1_000,)] * 100,
    "1,000 x 1,000": [(1_000,)] * 1_000,
    "5,000 x 200": [(200,)] * 5_000,
    "100 x 100,000": [(100_000,)] * 100,
    "37.8M": WHOLE,
}


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 4):
        for what, pair in pairs().items():
            seconds = run_ranks(world_size, measure, rounds, what, timeout=900, group_timeout=120)
            result += compared(f"{world_size} ranks, {what}", seconds[0], *pair)
    return result


def pairs() -> dict[str, tuple[str, str]]:
    """Return by what is measured the names of both contenders."""
    loops = {f"loop in C, {what}": ("loop in C", "by window") for what in TENSORS}
    return loops | {
        "resident, 37.8M": ("resident", "copied"),
        "resident, 1,000 x 1,000": ("resident", "copied"),
        "gradients, 37.8M": ("resident", "copied"),
        "reading, 37.8M": ("read", "lent"),
    }


def measure(rounds: int, what: str) -> dict[str, list[float]]:
    """Return seconds by contender."""
    way, _, tensors = what.partition(", ")
    if way == "reading":
        made: Pair = {"read": sharded(readable=True), "lent": sharded(readable=False)}
    elif way == "gradients":
        made = {"resident": backward(SharedMemoryMean()), "copied": backward(Mean())}
    elif way == "resident":
        made = {
            "resident": average(tensors, SharedMemoryMean()),
            "copied": average(tensors, Mean()),
        }
    else:
        made = {"loop in C": average(tensors, Mean()), "by window": average(tensors, Mean(), False)}
    return alternate(made, rounds)


def compared(condition: str, seconds: dict[str, list[float]], on: str, off: str) -> list[Row]:
    """Turn seconds into rows; the ratio is the median of those of the rounds, with quartiles."""
    rows = []
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        rows.append(
            Row(condition, name, 1e3 * statistics.median(values), (1e3 * low, 1e3 * high), {})
        )
    ratios = [a / b for a, b in zip(seconds[off], seconds[on], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    rows.append(Row(condition, f"{on} : {off}", middle, (low, high), {}, "times as fast"))
    return rows


def average(tensors: str, reducer: Reducer, fused: bool = True) -> Contender:
    """Return an average of parameters on a group of its own."""
    peers = _own_peers()
    peers.shared_memory.fused = fused
    named = [(f"parameter {i}", p) for i, p in enumerate(parameters(TENSORS[tensors]))]
    averager = Averager(peers, reducer=reducer)
    return lambda: averager.average(named)


def backward(reducer: Reducer) -> Contender:
    """Return a backward that shares all gradients."""
    weights = parameters(WHOLE)
    optimizer = torch.optim.SGD(weights)
    attach(torch.nn.ParameterList(weights), optimizer, ddp(gradient_reducer=reducer))

    def run() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack([weight.sum() for weight in weights]).sum())

    return run


def sharded(*, readable: bool) -> Contender:
    """Return what a sharded step moves: gradients to their owners, and parameters back."""
    peers = _own_peers()
    memory = peers.shared_memory
    memory.readable = memory.readable and readable
    numel = sum(torch.Size(shape).numel() for shape in WHOLE)
    gradients, flat = torch.randn(numel), torch.randn(numel)
    owned = slices(numel, peers.size)
    places = [[flat[start:stop]] for start, stop in owned]
    return _exchange(gradients, [[bounds] for bounds in owned], places, peers)


def _exchange(
    gradients: torch.Tensor,
    owned: list[list[tuple[int, int]]],
    places: list[list[torch.Tensor]],
    peers: Peers,
) -> Callable[[], None]:
    def exchange() -> None:
        reduction = ReduceToOwners(gradients, owned, peers)
        STAGING.give(reduction.wait())
        reduction.release()
        GatherFromOwners(places, peers).wait()

    return exchange


def _own_peers() -> Peers:
    return Peers(Group.make(tuple(range(dist.get_world_size()))))
