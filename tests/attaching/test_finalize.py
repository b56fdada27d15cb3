"""``finalize`` leaves equal replicas, whatever has moved them since the last sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotFinite,
    PeriodicModelAverager,
    Strategy,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    zero,
)
from loosestep.reducers import Int8
from loosestep.schedules import always, every
from loosestep.testing import RankPool
from tests.support.oracle import Net, equal, exact_mean, loss_of, make_net, sgd, snapshot

pytestmark = pytest.mark.fast


def everyone(net: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return all ranks' snapshots."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, snapshot(net))
    return held


def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()


def nothing(_: Net) -> None:
    pass


def another_optimizer(net: Net) -> None:
    """Step by a gradient of this rank's own, which no backward has shared."""
    net.eval()  # or BatchNorm would move the replica too
    (gradient,) = torch.autograd.grad(loss_of(net, dist.get_rank(), 9), [net.gain])
    net.zero_grad()
    net.gain.grad = gradient
    torch.optim.SGD([net.gain], lr=1.0).step()


def an_edit(net: Net) -> None:
    with torch.no_grad():
        net.last.bias.add_(dist.get_rank())


def an_edit_of_data(net: Net) -> None:
    net.last.bias.data.add_(dist.get_rank())  # no version counter sees it


def an_edit_on_one_rank(net: Net) -> None:
    if dist.get_rank() == 1:
        an_edit(net)


def a_forward(net: Net) -> None:
    loss_of(net, dist.get_rank(), 9)


CHANGES: list[Callable[[Net], None]] = [
    nothing,
    another_optimizer,
    an_edit,
    an_edit_of_data,
    an_edit_on_one_rank,
    a_forward,
]


def attached(change: Callable[[Net], None]) -> tuple[bool, int]:
    """Return whether finalize made the mean of all replicas, and how many syncs there were."""
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, Strategy(schedule=every(2))) as run:
        go(net, optimizer, 4)
        change(net)
        before = everyone(net)
        run.finalize()
        return is_mean(everyone(net), before), run.metrics()["parameters/world"]["syncs"]


def shared(
    change: Callable[[Net], None], strategy: Strategy, *, in_ddp: bool = False
) -> tuple[bool, int]:
    """Return the same where gradients are shared at every step and nothing is averaged."""
    net = make_net()
    optimizer: torch.optim.Optimizer = sgd(net)
    if strategy.sharding is not None:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.05)
    net.eval()  # BatchNorm's forward would move replicas apart at every step
    model = DistributedDataParallel(net) if in_ddp else net
    with attach(model, optimizer, strategy) as run:
        go(model, optimizer, 4)
        net.train()
        change(net)
        before = everyone(net)
        run.finalize()
        syncs = run.metrics().get("parameters/world", {"syncs": 0})["syncs"]
        return is_mean(everyone(net), before), syncs


def averaged(change: Callable[[Net], None]) -> tuple[bool, int]:
    """Return the same for an averager."""
    net = make_net()
    optimizer, averager = sgd(net), PeriodicModelAverager(2, module=net)
    for _ in range(3):
        go(net, optimizer, 1)
        averager.average_parameters(net.parameters())
    change(net)
    before = everyone(net)
    averager.finalize(net.parameters())
    syncs = sum(figures["syncs"] for figures in averager.telemetry.metrics().values())
    return is_mean(everyone(net), before), syncs


def is_mean(after: list[dict[str, torch.Tensor]], before: list[dict[str, torch.Tensor]]) -> bool:
    floats = [name for name, value in before[0].items() if value.is_floating_point()]
    means = {name: exact_mean([replica[name] for replica in before]) for name in floats}
    same = all(equal(after[0], other) for other in after)
    return same and all(torch.equal(after[0][name], means[name]) for name in floats)


def all_changes() -> dict[str, list[tuple[bool, int]]]:
    return {change.__name__: [attached(change), averaged(change)] for change in CHANGES}


def all_changes_shared() -> dict[str, list[tuple[bool, int]]]:
    lossy = Strategy(schedule=always(gradients="world"), reducer=Int8())
    return {
        change.__name__: [
            shared(change, ddp()),
            shared(change, ddp(), in_ddp=True),
            shared(change, lossy),
            shared(change, zero()),
        ]
        for change in CHANGES
    }


def test_finalize_averages_where_gradients_are_shared_at_every_step(pool: RankPool) -> None:
    """Nothing is sent where replicas are equal; what else has moved them is averaged, exactly."""
    expected = {change.__name__: [(True, 1)] * 4 for change in CHANGES}
    expected["nothing"] = [(True, 0)] * 4
    for told in pool.run(2, all_changes_shared):
        assert told == expected


def not_finite(differ: bool) -> tuple[str, bool]:
    net = make_net()
    with attach(net, sgd(net), ddp()) as run, torch.no_grad():
        net.gain.fill_(float("nan"))
        if differ:
            net.last.bias.add_(dist.get_rank())
        before = snapshot(net)["last.bias"]
        try:
            run.finalize()
        except NotFinite as error:
            return str(error), torch.equal(net.last.bias, before)
        return "", torch.equal(net.last.bias, before)


def test_replicas_that_are_alike_may_be_infinite(pool: RankPool) -> None:
    """Nothing spreads where nothing is averaged; elsewhere the error is every sync's."""
    assert pool.run(2, not_finite, False) == [("", True)] * 2
    for text, unchanged in pool.run(2, not_finite, True):
        assert "'gain'" in text
        assert unchanged


def in_shards() -> bool:
    """Finalize a model whose shards only one rank holds each, with buffers that all hold."""
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp()) as run:
        net(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        run.finalize()
    return True


def test_shards_of_one_rank_have_no_mean(pool: RankPool) -> None:
    """FSDP2 over all ranks: there is nothing to average, and that is no error."""
    assert pool.run(2, in_shards) == [True, True]


def test_finalize_sees_what_moved_without_a_step(pool: RankPool) -> None:
    """The last step was a sync, then something else moved: replicas are averaged again."""
    expected = {change.__name__: [(True, 3), (True, 3)] for change in CHANGES}
    expected["nothing"] = [(True, 2), (True, 2)]
    for told in pool.run(2, all_changes):
        assert told == expected
