"""Whether real ranks come to what a strategy must come to, on a model of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep.attaching.attached import attach
from loosestep.errors import check_instance, check_whole
from loosestep.strategy.recipes import ddp
from loosestep.strategy.schedules import every
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology
from loosestep.testing.oracle import LossOf, MakeOptimizer, train_replicas
from loosestep.testing.pool import run_ranks

MakeModel = Callable[[], torch.nn.Module]
Values = dict[str, torch.Tensor]


def check(
    strategy: Strategy,
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    loss_of: LossOf,
    *,
    topology: Topology | None = None,
    world_size: int = 2,
    steps: int = 12,
    timeout: float = 120.0,
) -> None:
    """Train on real ranks and in one process; raise ``AssertionError`` where they part.

    Also on this model: plain SGD that averages after every step must equal DDP. The functions must
    be top-level ones of a module, ``make_model`` must give equal models at every call, and
    ``loss_of(model, rank, step)`` the same loss for the same rank and step. Two ranks are compared
    to the bit; with more the order of the backend's sum of gradients is its own, and parameters
    need only be close where gradients are shared.

    Example::

        check(diloco(5), make_model, make_optimizer, loss_of)
    """
    check_instance("strategy", strategy, Strategy, "a strategy such as diloco(5)")
    check_whole("world_size", world_size, 1)
    check_whole("steps", steps, 1)
    if topology is None:
        topology = Topology({"host": [range(world_size)], "world": [range(world_size)]})
    expected = train_replicas(strategy, topology, steps, make_model, make_optimizer, loss_of)
    body = (make_model, make_optimizer, loss_of, steps)
    found = run_ranks(world_size, _train, strategy, topology, *body, timeout=timeout)
    shared = strategy.schedule.gradient_levels()
    exact = not shared or all(len(topology.members(level, 0)) <= 2 for level in shared)
    for rank, model in expected.items():
        _compare(f"rank {rank}", found[rank], _values(model), exact=exact)
    averaged = run_ranks(world_size, _train_by_sgd, *body, timeout=timeout)
    for rank, (ours, theirs) in enumerate(averaged):
        _compare(f"rank {rank}, averaging after every step beside DDP", ours, theirs, exact=False)


def _train(
    strategy: Strategy,
    topology: Topology,
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    loss_of: LossOf,
    steps: int,
) -> Values:
    model = make_model()
    strategy = dataclasses.replace(strategy, topology=topology)
    with attach(model, make_optimizer(model), strategy) as run:
        _go(model, run.optimizer, loss_of, steps)
        return _values(model)


def _train_by_sgd(
    make_model: MakeModel, make_optimizer: MakeOptimizer, loss_of: LossOf, steps: int
) -> tuple[Values, Values]:
    """Return the parameters that averages after every step lead to, and those of DDP."""
    rates = [group.get("lr", 0.1) for group in make_optimizer(make_model()).param_groups]
    results: list[Values] = []
    for strategy in (Strategy(schedule=every(1)), ddp()):
        model: Any = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=float(rates[0]))
        wrapped = DistributedDataParallel(model) if strategy == ddp() else model
        with attach(wrapped, optimizer, strategy):
            _go(wrapped, optimizer, loss_of, steps)
        results.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return results[0], results[1]


def _go(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, steps: int
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, dist.get_rank(), step))
        optimizer.step()


def _values(model: torch.nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _compare(who: str, found: Values, expected: Values, *, exact: bool) -> None:
    for name, value in expected.items():
        # The order of the backend's own sum of gradients shows in the last bits.
        close = torch.allclose(found[name], value, rtol=1e-4, atol=1e-6)
        if not (torch.equal(found[name], value) if exact else close):
            apart = (found[name].double() - value.double()).abs().max()
            raise AssertionError(
                f"{who}: {name!r} is not what it must come to; values are up to {float(apart):.3g} "
                "apart. Is make_model the same at every call, and loss_of the same for a step?"
            )
