"""``finalize`` leaves equal replicas, whatever has moved them since the last sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import PeriodicModelAverager, Strategy, attach
from loosestep.schedules import every
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
    loss_of(net, dist.get_rank(), 9).backward()
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


def test_finalize_sees_what_moved_without_a_step(pool: RankPool) -> None:
    """The last step was a sync, then something else moved: replicas are averaged again."""
    expected = {change.__name__: [(True, 3), (True, 3)] for change in CHANGES}
    expected["nothing"] = [(True, 2), (True, 2)]
    for told in pool.run(2, all_changes):
        assert told == expected
