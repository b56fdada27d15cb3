"""Averages of many small tensors, where every tensor's own cost counts for more than its bytes.

The averager binds tensors at the first sync and looks at each of them at every later one; its
first sync is a row of its own. ``attach`` does the same behind ``optimizer.step()``, which has
nothing to step here: no parameter has a gradient.
"""

from __future__ import annotations

import time
import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.utils as in_tree

from benchmarks.contenders import Contender, alternate, parameters, rows
from benchmarks.report import Row
from loosestep import PeriodicModelAverager, attach, post_local_sgd
from loosestep.comm.group import world_group
from loosestep.testing import run_ranks

# How many tensors, and how many numbers each has.
SHAPES = [
    (10, 10_000),
    (100, 1_000),
    (100, 10_000),
    (100, 100_000),
    (1_000, 1_000),
    (5_000, 200),
    (20_000, 10),
    (20_000, 100),
]


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 4):
        for count, size in SHAPES:
            seconds, first = run_ranks(
                world_size, measure, rounds, count, size, timeout=600, group_timeout=120
            )[0]
            condition = f"{world_size} ranks, {count:,} x {size:,}"
            result += rows(condition, seconds, ["in-tree"])
            result.append(Row(condition, "loosestep, first sync", first, (first, first), {}))
    return result


def measure(rounds: int, count: int, size: int) -> tuple[dict[str, list[float]], float]:
    """Return seconds of later syncs by contender, and milliseconds of our first one."""
    warnings.simplefilter("ignore")
    # Apart: in-tree code gives parameters new memory at every average.
    theirs, ours, attached = (parameters([(size,)] * count) for _ in range(3))
    averager = PeriodicModelAverager(1)
    optimizer = torch.optim.SGD(attached[:1])
    attach(torch.nn.ParameterList(attached), optimizer, post_local_sgd(1, gradients=None))
    contenders: dict[str, Contender] = {
        "in-tree": lambda: in_tree.average_parameters(iter(theirs), world_group()),
        "loosestep": partial(averager.average_parameters, ours),
        "loosestep, attach": optimizer.step,
    }
    dist.barrier()
    began = time.perf_counter()
    contenders["loosestep"]()
    first = 1e3 * (time.perf_counter() - began)
    # Where a round takes a millisecond, many more of them say as much as a few of the others.
    return alternate(contenders, rounds * 20 if count * size <= 100_000 else rounds), first
