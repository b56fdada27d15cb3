"""The names that PyTorch users know: what they compute, and how they resume."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from loosestep.compat.parameters import average_parameters
from loosestep.testing import RankPool
from tests.support.oracle import (
    average,
    ddp_with_local_buffers,
    equal,
    loss_of,
    make_net,
    sgd,
    snapshot,
)

STEPS = 11


def make_averager(
    kind: str, group: dist.ProcessGroup | None = None, module: torch.nn.Module | None = None
) -> ModelAverager:
    if kind == "periodic":
        return PeriodicModelAverager(3, 2, group, module=module)
    size = dist.get_world_size(group)
    inner = 2 if size % 2 == 0 else 1
    sizes = OrderedDict([(2, inner), (4, size)])
    return HierarchicalModelAverager(sizes, 2, group, module=module)


def due_group(kind: str, call: int, ranks: list[int]) -> list[list[int]]:
    """Return who averages at a call, counted from 0, as torch's averagers do."""
    if call < 2:
        return []
    if kind == "periodic":
        return [ranks] if (call - 2) % 3 == 0 else []
    if call % 4 == 0:
        return [ranks]
    inner = 2 if len(ranks) % 2 == 0 else 1
    blocks = [ranks[i : i + inner] for i in range(0, len(ranks), inner)]
    return blocks if call % 2 == 0 else []


def train(kind: str, ranks: list[int]) -> dict[str, torch.Tensor]:
    group = dist.new_group(ranks) if len(ranks) < dist.get_world_size() else None
    if dist.get_rank() not in ranks:
        return {}
    net = make_net()
    optimizer = sgd(net)
    averager = make_averager(kind, group, net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()
        averager.average_parameters(net.parameters())
    return snapshot(net)


def in_one_process(kind: str, ranks: list[int]) -> dict[int, dict[str, torch.Tensor]]:
    nets = {rank: copy.deepcopy(make_net()) for rank in ranks}
    optimizers = {rank: sgd(net) for rank, net in nets.items()}
    for step in range(STEPS):
        for rank, net in nets.items():
            optimizers[rank].zero_grad()
            loss_of(net, rank, step).backward()
            optimizers[rank].step()
        for group in due_group(kind, step, ranks):
            average([nets[rank] for rank in group])
    return {rank: snapshot(net) for rank, net in nets.items()}


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_averagers_equal_replicas_of_one_process(pool: RankPool, kind: str, world: int) -> None:
    """K ranks with a drop-in averager train to what K replicas do, to the bit."""
    ranks = list(range(world))
    expected = in_one_process(kind, ranks)
    for rank, result in enumerate(pool.run(world, train, kind, ranks)):
        assert equal(result, expected[rank]), (kind, world, rank)


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
@pytest.mark.parametrize("ranks", [[2, 3], [1, 3], [1, 2, 3]], ids=str)
def test_averagers_on_a_subgroup(pool: RankPool, kind: str, ranks: list[int]) -> None:
    """A process group that does not start at rank 0 works like the world."""
    results = pool.run(4, train, kind, ranks)
    expected = in_one_process(kind, ranks)
    for rank in ranks:
        assert equal(results[rank], expected[rank]), (kind, rank)


class Stack:
    """DDP with the hook, and the optimizer with an averager, on one clock."""

    def __init__(self, kind: str) -> None:
        # Two ranks: DDP regroups its buckets after the first step, and the order of a sum of
        # more than two gradients would change with it.
        subgroup, _ = dist.new_subgroups(1)
        self.net = ddp_with_local_buffers(make_net())
        averager = make_averager(kind, None, self.net)
        self.hook = PostLocalSGDState(None, subgroup, 2, clock=averager.clock)
        self.net.register_comm_hook(self.hook, post_localSGD_hook)
        self.optimizer = PostLocalSGDOptimizer(
            torch.optim.AdamW(self.net.parameters(), lr=0.01), averager
        )

    def go(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.optimizer.zero_grad()
            loss_of(self.net, dist.get_rank(), step).backward()
            self.optimizer.step()

    def save(self) -> bytes:
        file = io.BytesIO()
        parts: dict[str, Any] = {
            "net": self.net,
            "hook": self.hook,
            "optimizer": self.optimizer,
            "averager": self.optimizer.averager,
        }
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def load(self, content: bytes) -> None:
        saved = torch.load(io.BytesIO(content), weights_only=True)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.hook.load_state_dict(saved["hook"])
        self.optimizer.averager.load_state_dict(saved["averager"])


def interrupted(kind: str, stop: int) -> bool:
    whole = Stack(kind)
    whole.go(0, STEPS)
    before = Stack(kind)
    before.go(0, stop)
    after = Stack(kind)
    after.load(before.save())
    after.go(stop, STEPS)
    same_clock = after.optimizer.averager.step == after.hook.iter == STEPS
    return same_clock and equal(snapshot(whole.net), snapshot(after.net))


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
def test_the_whole_stack_resumes_at_any_step(pool: RankPool, kind: str) -> None:
    """Hook, optimizer and averager, saved and loaded at any step, continue to the bit."""
    for stop in range(7):
        assert pool.run(2, interrupted, kind, stop) == [True] * 2, (kind, stop)


def idle_call() -> tuple[bool, int]:
    """Call an averager at a step that is not due with parameters that must not be looked at."""
    net = make_net()
    averager = PeriodicModelAverager(1000, 1000)
    averager.average_parameters(net.parameters())

    class Untouchable:
        def __iter__(self) -> Any:
            raise AssertionError("looked at")

    averager.average_parameters(Untouchable())
    return True, averager.step


def test_a_call_that_is_not_due_does_not_look(pool: RankPool) -> None:
    """After the first call, parameters are touched only at steps that are due."""
    assert pool.run(2, idle_call) == [(True, 2)] * 2


def averaged_in_the_first_rank_only() -> float:
    group = dist.new_group([0])  # on others torch's mark for "not in it"
    parameter = torch.nn.Parameter(torch.full((2,), float(dist.get_rank())))
    average_parameters(iter([parameter]), group)
    return float(parameter.detach()[1])


def test_a_rank_outside_the_group_changes_nothing(pool: RankPool) -> None:
    """Also where its process group is what ``new_group`` gives to those that are not in it."""
    assert pool.run(2, averaged_in_the_first_rank_only) == [0.0, 1.0]
