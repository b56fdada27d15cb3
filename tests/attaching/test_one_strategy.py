"""One strategy for two models gives what two strategies give: it holds nothing of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    PeriodicModelAverager,
    Strategy,
    attach,
    ddp,
    diloco,
    sparseloco,
    streaming_diloco,
)
from loosestep.reducers import (
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Reducer,
    ReplicaFeedback,
    TwoLevel,
)
from loosestep.schedules import drift, every
from loosestep.testing import RankPool
from tests.support.oracle import Net, equal, loss_of, make_net, sgd, snapshot
from tests.support.pairs import in_pairs

STEPS = 6

MAKE: dict[str, Callable[[], Reducer]] = {
    "feedback": lambda: ErrorFeedback(Int2()),
    "feedback, two levels": lambda: TwoLevel(ErrorFeedback(Int4()), ranks_per_host=1),
    "by chance": lambda: Int8(rounding="stochastic"),
    "feedback by chance": lambda: ErrorFeedback(Int8(rounding="stochastic")),
    "replica feedback": lambda: ReplicaFeedback(Int2()),
}
MAKE_STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "diloco": lambda: diloco(2),
    "streaming_diloco": lambda: streaming_diloco(4, 2, overlap_steps=3),
    "sparseloco": lambda: sparseloco(2),
    "drift": lambda: diloco(drift(0.05, start=2)),
}
MAKE_GRADIENTS: dict[str, Callable[[], Reducer]] = {
    "feedback": lambda: ErrorFeedback(Int4()),
}

Snapshot = dict[str, torch.Tensor]


def go(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank() + seed, step).backward()
        optimizer.step()


def one_after_the_other(first: Strategy, second: Strategy) -> list[Snapshot]:
    found = []
    for seed, strategy in enumerate((first, second)):
        net = make_net()
        optimizer = sgd(net)
        with attach(net, optimizer, strategy) as run:
            go(net, optimizer, seed)
            run.finalize()
        found.append(snapshot(net))
    return found


def side_by_side(first: Strategy, second: Strategy) -> list[Snapshot]:
    nets = [make_net(), make_net()]
    optimizers = [sgd(net) for net in nets]
    with (
        attach(nets[0], optimizers[0], first) as one,
        attach(nets[1], optimizers[1], second) as other,
    ):
        for step in range(STEPS):
            for seed, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                loss_of(net, dist.get_rank() + seed, step).backward()
                optimizer.step()
        one.finalize()
        other.finalize()
    return [snapshot(net) for net in nets]


def by_averagers(first: Reducer, second: Reducer) -> list[Snapshot]:
    found = []
    for reducer in (first, second):
        net = make_net()
        optimizer, averager = sgd(net), PeriodicModelAverager(2, reducer=reducer)
        for step in range(STEPS):
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
            averager.average_parameters(net.parameters())
        averager.finalize(net.parameters())
        found.append(snapshot(net))
    return found


def same(one: list[Snapshot], other: list[Snapshot]) -> bool:
    return all(equal(a, b) for a, b in zip(one, other, strict=True))


def alike(name: str, way: str) -> bool:
    """Say whether a strategy, or a reducer, that is used again gives what two of them give."""
    make = MAKE[name]
    if way == "averagers":
        reducer = make()
        return same(by_averagers(reducer, reducer), by_averagers(make(), make()))
    run = {"one after the other": one_after_the_other, "side by side": side_by_side}[way]
    strategy = Strategy(schedule=every(2), reducer=make())
    two = [Strategy(schedule=every(2), reducer=make()) for _ in range(2)]
    return same(run(strategy, strategy), run(*two))


@pytest.mark.parametrize(
    ("name", "way"),
    in_pairs(MAKE, ["one after the other", "side by side", "averagers"], each=1),
)
def test_one_strategy_serves_two_models(pool: RankPool, name: str, way: str) -> None:
    """One after the other and at the same time, under attach and with averagers."""
    assert pool.run(2, alike, name, way) == [True, True]


def recipes_alike(name: str) -> bool:
    """Say so of a recipe that remembers more than its reducer does."""
    make = MAKE_STRATEGIES[name]
    strategy = make()
    return all(
        same(run(strategy, strategy), run(make(), make()))
        for run in (one_after_the_other, side_by_side)
    )


@pytest.mark.parametrize("name", MAKE_STRATEGIES)
def test_one_recipe_serves_two_models(pool: RankPool, name: str) -> None:
    """Anchors, momentum, fragments and periods belong to a run."""
    assert pool.run(2, recipes_alike, name) == [True, True]


def gradients_alike(name: str) -> bool:
    """Say so of a strategy that shares gradients."""
    make = MAKE_GRADIENTS[name]
    strategy = ddp(gradient_reducer=make())
    two = [ddp(gradient_reducer=make()) for _ in range(2)]
    return same(side_by_side(strategy, strategy), side_by_side(*two))


@pytest.mark.parametrize("name", MAKE_GRADIENTS)
def test_one_strategy_shares_gradients_of_two_models(pool: RankPool, name: str) -> None:
    """At the same time."""
    assert pool.run(2, gradients_alike, name) == [True, True]


class Incomplete(Reducer):
    def start(self, buffer: torch.Tensor, peers: Any, state: Any, place: Any) -> Any:
        raise NotImplementedError


class NoReducer:
    def start(self, buffer: torch.Tensor, peers: Any, state: Any, place: Any) -> Any:
        raise NotImplementedError


def test_an_incomplete_reducer_is_refused() -> None:
    """With the names of what is missing."""
    incomplete: Any = Incomplete
    with pytest.raises(TypeError, match="bytes_on_wire"):
        incomplete()
    none: Any = NoReducer()
    with pytest.raises(
        TypeError, match=r"NoReducer is no subclass of loosestep\.reducers\.Reducer"
    ):
        ddp(gradient_reducer=none)
