"""Hosts given by number, on levels and groups that they do not divide."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    Strategy,
    Topology,
    attach,
    gradient_hook,
)
from loosestep.reducers import Cast, Reducer, TwoLevel
from loosestep.schedules import always, levels
from loosestep.testing import RankPool, RecordingReducer

pytestmark = pytest.mark.fast

UNEVEN = {"host": [[0, 1, 2], [3]], "world": [[0, 1, 2, 3]]}


def attached(narrow: list[list[int]], reducer: Reducer, what: str = "parameters") -> None:
    """Attach and train a few steps, averaging on the narrow level and on the world."""
    net = torch.nn.Linear(3, 2)
    topology = Topology({"host": narrow, "world": UNEVEN["world"]})
    if what == "parameters":
        schedule = levels({"host": 1, "world": 2})
        strategy = Strategy(schedule=schedule, topology=topology, reducer=reducer)
    else:
        shared = always(gradients="host")
        strategy = Strategy(schedule=shared, topology=topology, gradient_reducer=reducer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, strategy, timeout=5):
        for step in range(2):
            net(torch.full((1, 3), float(dist.get_rank() + step))).sum().backward()
            optimizer.step()


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "parameters": (
        lambda: attached(UNEVEN["host"], TwoLevel(ranks_per_host=2)),
        "'host' ranks [0, 1, 2] are 3, no multiple of 2",
    ),
    "gradients": (
        lambda: attached(UNEVEN["host"], TwoLevel(ranks_per_host=2), "gradients"),
        "'host' ranks [0, 1, 2] are 3, no multiple of 2",
    ),
    "inside a cast": (
        lambda: attached(UNEVEN["host"], Cast(torch.bfloat16, TwoLevel(ranks_per_host=2))),
        "'host' ranks [0, 1, 2] are 3, no multiple of 2",
    ),
    "gradients inside a cast": (
        lambda: attached(
            UNEVEN["host"], Cast(torch.bfloat16, TwoLevel(ranks_per_host=2)), "gradients"
        ),
        "'host' ranks [0, 1, 2] are 3, no multiple of 2",
    ),
    "inside a wrapper": (
        lambda: attached(UNEVEN["host"], RecordingReducer(TwoLevel(ranks_per_host=2))),
        "'host' ranks [0, 1, 2] are 3, no multiple of 2",
    ),
    "hosts larger than a group": (
        lambda: attached([[0, 1], [2, 3]], TwoLevel(ranks_per_host=4)),
        "'host' ranks [0, 1] are 2, no multiple of 4",
    ),
    "a hook of DDP": (
        lambda: gradient_hook(TwoLevel(ranks_per_host=3)),
        "ranks [0, 1, 2, 3] are 4, no multiple of 3",
    ),
    "periodic": (
        lambda: PeriodicModelAverager(2, reducer=TwoLevel(ranks_per_host=3)),
        "'every 2' ranks [0, 1, 2, 3] are 4, no multiple of 3",
    ),
    "hierarchical": (
        lambda: HierarchicalModelAverager(
            OrderedDict([(1, 2), (2, 4)]), reducer=TwoLevel(ranks_per_host=4)
        ),
        "'every 1' ranks [0, 1] are 2, no multiple of 4",
    ),
}


def refusals() -> dict[str, str]:
    said = {}
    for name, (make, _) in REFUSED.items():
        with pytest.raises(ValueError, match="leave ranks_per_host away") as error:
            make()
        said[name] = str(error.value)
    return said


def test_hosts_that_do_not_divide_a_level_are_refused(pool: RankPool) -> None:
    """Every rank refuses at once, also one whose own group is divided."""
    for said in pool.run(4, refusals):
        for name, (_, words) in REFUSED.items():
            assert words in said[name]


def accepted() -> bool:
    """Attach what fits; a group of one needs no hosts."""
    attached([[0, 1], [2], [3]], TwoLevel(ranks_per_host=2))
    attached([[0, 1], [2, 3]], TwoLevel(ranks_per_host=2), "gradients")
    attached(UNEVEN["host"], TwoLevel())
    return True


def test_hosts_that_divide_every_group_are_taken(pool: RankPool) -> None:
    """Levels of whole hosts and of single ranks train."""
    assert pool.run(4, accepted) == [True] * 4
