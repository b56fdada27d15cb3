"""Optimizers whose step is compiled: what loosestep does around it is no part of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    post_local_sgd,
    zero,
)
from loosestep.testing import RankPool
from tests.support.oracle import loss_of, make_net, snapshot
from tests.support.pairs import in_pairs

STEPS = 3
WAYS = ["called", "replaced", "inside a function"]


def compiled(optimizer: Any, way: str) -> Callable[[], Any]:
    """Return how the step is called, in the ways in which people compile it."""
    torch.compiler.reset()
    if way == "plain":
        return lambda: optimizer.step()
    if way == "called":
        return torch.compile(optimizer.step, backend="eager")
    if way == "replaced":
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        return lambda: optimizer.step()
    return torch.compile(lambda: optimizer.step(), backend="eager")


def loop(net: torch.nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), number).backward()
        step()


def attached(kind: str, way: str, first: str) -> tuple[dict[str, torch.Tensor], int, Any]:
    net = make_net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if kind == "sharded":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    strategy = {
        "local": post_local_sgd(2, gradients=None),
        "gradients": ddp(),
        "sharded": zero(),
    }[kind]
    step = compiled(optimizer, way) if first == "compile" else None
    with attach(net, optimizer, strategy) as run:
        loop(net, optimizer, step or compiled(optimizer, way))
        metrics = {level: found["syncs"] for level, found in run.metrics().items()}
        return snapshot(net), run.clock.step, metrics


def drop_in(way: str) -> tuple[dict[str, torch.Tensor], int, Any]:
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, module=net))
    if way == "inside":
        compiled(inner, "replaced")
    loop(net, optimizer, compiled(optimizer, "plain" if way == "inside" else way))
    return snapshot(net), optimizer.averager.step, None


def close(one: Any, other: Any) -> bool:
    """Compare values, steps and syncs; a compiled step rounds otherwise here and there."""
    return one[1:] == other[1:] and all(
        torch.allclose(one[0][name], other[0][name], atol=1e-5) for name in other[0]
    )


# Compiling takes a second or two for each.
@pytest.mark.parametrize(("kind", "way"), in_pairs(["local", "gradients", "sharded"], WAYS, each=1))
def test_attach_takes_a_compiled_optimizer(pool: RankPool, kind: str, way: str) -> None:
    """Compiled before or after, it counts and shares the same steps and trains the same."""
    expected = pool.run(2, attached, kind, "plain", "attach")
    results = pool.run(2, attached, kind, way, "compile" if way == "called" else "attach")
    assert all(map(close, results, expected)), results


@pytest.mark.parametrize(
    "way", ["called", "inside", *(pytest.param(way, marks=pytest.mark.long) for way in WAYS[1:])]
)
def test_post_local_sgd_takes_a_compiled_optimizer(pool: RankPool, way: str) -> None:
    """Around what is compiled, or compiled with what it wraps."""
    expected = pool.run(2, drop_in, "plain")
    assert all(map(close, pool.run(2, drop_in, way), expected))
