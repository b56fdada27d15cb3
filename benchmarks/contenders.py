"""The model that is averaged, and the ways of averaging it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.utils as in_tree

import loosestep
from benchmarks.report import Row
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.reducers import SharedMemoryMean
from loosestep.sync.averager import Averager

Contender = Callable[[], object]


def transformer_shapes(layers: int = 12, width: int = 512) -> list[tuple[int, ...]]:
    """Return the parameter shapes of a plain transformer: 144 tensors, 37.8M numbers."""
    layer = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
        *[(width,)] * 4,
    ]
    return layer * layers


def parameters(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    torch.manual_seed(dist.get_rank())
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def contenders(shapes: list[tuple[int, ...]]) -> dict[str, Contender]:
    """Return everything that is compared, each with tensors of its own."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    flat, copy = torch.randn(numel), torch.empty(numel)
    theirs, ours, networked = (parameters(shapes) for _ in range(3))
    sockets = private_twin_by_network()
    return {
        "in-tree": lambda: in_tree.average_parameters(iter(theirs), world_group()),
        "bare all_reduce": lambda: dist.all_reduce(flat),
        "loosestep": lambda: loosestep.average_parameters(iter(ours), None),
        "loosestep, resident": resident(parameters(shapes)),
        "loosestep, network only": lambda: loosestep.average_parameters(iter(networked), sockets),
        "memcpy": lambda: copy.copy_(flat),
    }


def resident(parameters: list[torch.nn.Parameter]) -> Contender:
    """Return the average of parameters that live in shared memory."""
    named = [(f"parameter {index}", parameter) for index, parameter in enumerate(parameters)]
    group = Group.make(tuple(range(dist.get_world_size())))
    averager = Averager(peers_of(group), reducer=SharedMemoryMean())
    return lambda: averager.average(named)


def private_twin_by_network() -> dist.ProcessGroup:
    """Return a group on which slices go through sockets, as they would between hosts."""
    group = dist.new_group(list(range(dist.get_world_size())))
    Group.of(group).use_network()
    assert isinstance(group, dist.ProcessGroup)
    return group


def alternate(contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Time the contenders in turn and return each one's seconds, of the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, run in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if round_number:  # the first round warms pages and connections up
                seconds[name].append(took.item())
    return seconds


def rows(condition: str, seconds: dict[str, list[float]], against: list[str]) -> list[Row]:
    """Turn seconds into rows with ratios of the medians."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = []
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        ratios = {other: medians[other] / medians[name] for other in against if other != name}
        spread = (low * 1e3, high * 1e3)
        result.append(Row(condition, name, medians[name] * 1e3, spread, ratios))
    return result
