"""PyTorch's own averagers as contenders: they average when and with whom their records say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import Telemetry, Topology
from loosestep.lab.trainer.by_strategy import OptimizerPlan
from loosestep.lab.trainer.in_tree import InTree
from loosestep.lab.trainer.torch_plans import CONTENDERS
from loosestep.testing import RankPool
from tests.support.oracle import loss_of, make_net

STEPS = 7
OPTIONS: dict[str, dict[str, Any]] = {
    "torch-hierarchical": {"periods": {"host": 2, "world": 4}},
    "torch-post-local": {"period": 3, "warmup_steps": 2},
    "torch-ddp": {},
}
# The level that averages parameters after each step.
AVERAGED: dict[str, list[str | None]] = {
    "torch-hierarchical": ["world", None, "host", None, "world", None, "host"],
    "torch-post-local": [None, None, "world", None, None, "world", None],
    "torch-ddp": [None] * STEPS,
}
# The level that shares gradients in each step.
SHARED: dict[str, list[str]] = {
    "torch-hierarchical": ["host"] * STEPS,
    "torch-post-local": ["world"] * 2 + ["host"] * 5,
    "torch-ddp": ["world"] * STEPS,
}


class Kept:
    """A sink that keeps records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        """Keep them."""

    def levels(self, kind: str) -> list[str | None]:
        """Return by step which level did something of a kind."""
        found = {one["step"]: one["level"] for one in self.records if one["kind"] == kind}
        return [found.get(step) for step in range(STEPS)]


def make(name: str, sink: Kept) -> InTree:
    topology = Topology.from_sizes({"host": 2, "world": 4})
    net = make_net()
    optimizer = OptimizerPlan(torch.optim.SGD, [{"params": list(net.parameters())}], {"lr": 0.1})
    plan = CONTENDERS[name](**OPTIONS[name])
    return InTree(net, optimizer, plan, topology, Telemetry([sink]))


def go(sharing: InTree, first: int, end: int) -> list[list[int]]:
    """Train, and return for each step the first rank that holds the same weights, by rank."""
    seen = []
    for step in range(first, end):
        sharing.optimizer.zero_grad()
        loss_of(sharing.model, dist.get_rank(), step).backward()
        sharing.after_backward()
        sharing.optimizer.step()
        sharing.after_step()
        seen.append(same(sharing))
    return seen


def weights(sharing: InTree) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in sharing.model.parameters()])


def same(sharing: InTree) -> list[int]:
    own = weights(sharing)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [next(i for i, other in enumerate(every) if torch.equal(other, one)) for one in every]


def train(name: str) -> tuple[list[list[int]], Kept, int]:
    sink = Kept()
    sharing = make(name, sink)
    seen = go(sharing, 0, STEPS)
    parameters = sum(p.numel() for p in sharing.model.parameters())
    sharing.close()
    return seen, sink, parameters


@pytest.mark.parametrize("name", OPTIONS)
def test_they_average_when_and_with_whom_they_say(pool: RankPool, name: str) -> None:
    """Hosts agree, and all do after the world averaged; records have levels and bytes."""
    for seen, sink, parameters in pool.run(4, train, name):
        assert sink.levels("parameters") == AVERAGED[name]
        assert sink.levels("gradients") == SHARED[name]
        for step, found in enumerate(seen):
            equal = "world" in (SHARED[name][step], AVERAGED[name][step])
            assert found == ([0] * 4 if equal else [0, 0, 2, 2]), (step, found)
        # A ring of n sends 2 (n - 1) / n of what it reduces.
        share = {"host": 1.0, "world": 1.5}
        for record in sink.records:
            sent = 4 * parameters * share[record["level"]]
            assert record["bytes_sent"] == pytest.approx(sent, rel=0.1)


def look(name: str) -> tuple[list[int], bool, list[int]]:
    """Average for an evaluation while hosts differ; return who is equal inside and at the end."""
    sharing = make(name, Kept())
    go(sharing, 0, 4 if name == "torch-hierarchical" else 5)
    before = weights(sharing)
    with sharing.averaged():
        inside = same(sharing)
    unharmed = torch.equal(before, weights(sharing))
    sharing.finalize()
    ended = same(sharing)
    sharing.close()
    return inside, unharmed, ended


@pytest.mark.parametrize("name", OPTIONS)
def test_an_evaluation_sees_the_average_and_leaves_no_trace(pool: RankPool, name: str) -> None:
    for inside, unharmed, ended in pool.run(4, look, name):
        assert (inside, unharmed, ended) == ([0] * 4, True, [0] * 4)


def resume(name: str, stop: int) -> tuple[bool, list[str | None]]:
    """Stop, take it up with another one, and say whether it ends as if nothing was."""
    whole, half, sink = make(name, Kept()), make(name, Kept()), Kept()
    go(whole, 0, STEPS)
    go(half, 0, stop)
    again = make(name, sink)
    again.model.load_state_dict(half.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(half.optimizer.state_dict()))
    again.load_state_dict(half.state_dict())
    go(again, stop, STEPS)
    # DDP adds in an order that may differ from run to run.
    alike = torch.allclose(weights(again), weights(whole), rtol=1e-4, atol=1e-6)
    for sharing in (whole, half, again):
        sharing.close()
    return alike, sink.levels("parameters")[stop:]


@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_they_resume_where_they_were(pool: RankPool, name: str, stop: int) -> None:
    for alike, averaged in pool.run(4, resume, name, stop):
        assert alike
        assert averaged == AVERAGED[name][stop:]
