"""Ranks that disagree: an error on every rank that says about what, and nothing has changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    Cast,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    RankMismatch,
    Strategy,
    Topology,
    always,
    attach,
    average_parameters,
    every,
    post_local_sgd,
)
from loosestep.testing import RankPool

SECONDS = 5.0  # a mismatch is found by comparing, not by waiting for a time-out (of 30 s here)

WORLDS = [(2, 1), (3, 0), (4, 2)]  # how many ranks, and which of them is the odd one
worlds = pytest.mark.parametrize(("world", "odd"), WORLDS)
transports = pytest.mark.parametrize("transport", ["memory", "network"])


class Bag(torch.nn.Module):
    """Parameters without a purpose, filled with this rank's number."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (4, 3), "b": (4,), "c": (2, 2)}.items():
            self.put(name, torch.full(shape, float(dist.get_rank())))

    def put(self, name: str, value: torch.Tensor) -> None:
        trainable = value.is_floating_point() and not value.is_quantized
        self.register_parameter(name, torch.nn.Parameter(value, requires_grad=trainable))

    def values(self) -> list[torch.Tensor]:
        """Return copies of everything that can be compared."""
        return [
            p.detach().to_dense().clone()
            for p in self.parameters()
            if not (p.is_quantized or p.is_meta)
        ]


class Outcome(NamedTuple):
    """What a rank saw: the error, how long it took, and whether its parameters are untouched."""

    kind: str
    text: str
    seconds: float
    untouched: bool


def outcome(bag: Bag, action: Callable[[], object]) -> Outcome:
    before, began = bag.values(), time.monotonic()
    kind, text = "", ""
    try:
        action()
    except RankMismatch as error:
        assert isinstance(error, ValueError)
        kind, text = "RankMismatch", str(error)
    seconds = time.monotonic() - began
    after = bag.values()
    return Outcome(kind, text, seconds, all(map(torch.equal, before, after)))


def use(transport: str) -> None:
    os.environ["LOOSESTEP_READ_MEMORY"] = "0" if transport == "network" else "1"


def check(outcomes: list[Outcome], odd: int, *words: str) -> None:
    """Require of every rank the same, quick error that names the ranks and ``words``."""
    others = [rank for rank in range(len(outcomes)) if rank != odd]
    for rank, seen in enumerate(outcomes):
        assert seen.kind == "RankMismatch", (rank, seen)
        assert seen.text.startswith(f"rank {rank}: "), seen.text
        assert f"rank {odd} has" in seen.text, seen.text
        assert f"{', '.join(map(str, others))} ha" in seen.text, seen.text
        assert [word for word in words if word not in seen.text] == [], seen.text
        assert seen.seconds < SECONDS
        assert seen.untouched


# Parameters that differ.


def other_shape(bag: Bag) -> None:
    bag.put("b", torch.zeros(5))


def other_dtype(bag: Bag) -> None:
    bag.put("b", torch.zeros(4, dtype=torch.float64))


def one_more(bag: Bag) -> None:
    bag.put("d", torch.zeros(7))


def one_less(bag: Bag) -> None:
    del bag.c


def sparse(bag: Bag) -> None:
    bag.put("b", torch.eye(4).to_sparse())


def meta(bag: Bag) -> None:
    bag.put("b", torch.zeros(4, device="meta"))


def frozen(bag: Bag) -> None:
    bag.get_parameter("b").requires_grad_(False)


def other_name(bag: Bag) -> None:
    value = bag.get_parameter("c").detach()
    del bag.c
    bag.put("renamed", value)


def quantised(bag: Bag) -> None:
    bag.put("b", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))


def integer(bag: Bag) -> None:
    bag.put("b", torch.zeros(4, dtype=torch.int64))


# What is changed, and what the error must say: the tensor as it is here and as it is there.
CHANGES: dict[str, tuple[Callable[[Bag], None], list[str]]] = {
    "shape": (other_shape, ["(4,) float32 'b'", "(5,) float32 'b'"]),
    "dtype": (other_dtype, ["(4,) float32 'b'", "(4,) float64 'b'"]),
    "one more": (one_more, ["(7,) float32 'd'", "nothing"]),
    "one less": (one_less, ["(2, 2) float32 'c'", "nothing"]),
    "sparse": (sparse, ["'b' is torch.sparse_coo"]),
    "meta": (meta, ["'b' is on the meta device"]),
}
# These show only where names and requires_grad are looked at.
NAMED_CHANGES = {
    "name": (other_name, ["(2, 2) float32 'c'", "(2, 2) float32 'renamed'"]),
    "frozen": (frozen, ["(4,) float32 'b'", "(2, 2) float32 'c'"]),
}
# These cannot require a gradient, so only the bare function is ever given them.
BARE_CHANGES = {
    "quantised": (quantised, ["'b' is quantised"]),
    "integer": (integer, ["'b' is int64"]),
}
ALL_CHANGES = CHANGES | NAMED_CHANGES | BARE_CHANGES


def by_attach(bag: Bag) -> None:
    # An optimizer is not what is compared, and would not take a sparse parameter.
    attach(bag, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), Strategy(schedule=every(2)))


def by_averager(bag: Bag) -> None:
    PeriodicModelAverager(4, warmup_steps=9, module=bag).average_parameters(bag.parameters())


def by_hierarchy(bag: Bag) -> None:
    sizes = {2: dist.get_world_size()}
    HierarchicalModelAverager(sizes, module=bag).average_parameters(bag.parameters())


def by_function(bag: Bag) -> None:
    average_parameters(bag.parameters(), None)


WAYS = {
    "attach": by_attach,
    "PeriodicModelAverager": by_averager,
    "HierarchicalModelAverager": by_hierarchy,
}


def change_on_one_rank(way: str, change: str, odd: int, transport: str) -> Outcome:
    use(transport)
    bag = Bag()
    if dist.get_rank() == odd:
        ALL_CHANGES[change][0](bag)
    run = WAYS.get(way, by_function)
    return outcome(bag, lambda: run(bag))


@transports
@worlds
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES | NAMED_CHANGES)
def test_parameters_that_differ(
    pool: RankPool, way: str, change: str, world: int, odd: int, transport: str
) -> None:
    """Another shape, dtype, name or number of parameters on one rank is an error on all."""
    check(pool.run(world, change_on_one_rank, way, change, odd, transport), odd, *_words(change))


@transports
@worlds
@pytest.mark.parametrize("change", CHANGES | BARE_CHANGES)
def test_tensors_that_differ(
    pool: RankPool, change: str, world: int, odd: int, transport: str
) -> None:
    """The bare function, which knows no names, compares as well and counts parameters instead."""
    outcomes = pool.run(world, change_on_one_rank, "function", change, odd, transport)
    places = {"'b'": "'parameter 1'", "'c'": "'parameter 2'", "'d'": "'parameter 3'"}
    words = _words(change)
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    check(outcomes, odd, *words)


def _words(change: str) -> list[str]:
    return ALL_CHANGES[change][1]


# Settings that differ.


class Setting(NamedTuple):
    """What the usual ranks and the odd one are given, and what the error must say of each."""

    usual: dict[str, Any]
    odd: dict[str, Any]
    words: list[str]


def pairs(*groups: tuple[int, ...], weights: list[float] | None = None) -> Topology:
    return Topology({"pair": groups, "world": [range(4)]}, weights=weights)


PLAIN = pairs((0, 1), (2, 3))
STRATEGIES = {
    "schedule": Setting({"schedule": every(2)}, {"schedule": every(3)}, ["2", "3"]),
    "kind of schedule": Setting(
        {"schedule": every(2)},
        {"schedule": post_local_sgd(2).schedule},
        ["Levels(", "After("],
    ),
    "gradients": Setting(
        {"schedule": always(gradients="world")}, {"schedule": always()}, ["'world'", "None"]
    ),
    "reducer": Setting({}, {"reducer": Cast(torch.bfloat16)}, ["Mean()", "Cast(torch.bfloat16"]),
    "buffers": Setting({}, {"buffers": "local"}, ["Buffers.MEAN", "Buffers.LOCAL"]),
    "topology": Setting(
        {"topology": PLAIN}, {"topology": pairs((0, 2), (1, 3))}, ["(0, 1)", "(0, 2)"]
    ),
    "weights": Setting(
        {"topology": PLAIN},
        {"topology": pairs((0, 1), (2, 3), weights=[1, 2, 3, 4])},
        ["weights=None", "4.0"],
    ),
    "topology on one rank only": Setting({}, {"topology": PLAIN}, ["'host'", "'pair'"]),
}


def attach_with(name: str, odd: int, transport: str) -> Outcome:
    use(transport)
    setting, bag = STRATEGIES[name], Bag()
    given = setting.odd if dist.get_rank() == odd else setting.usual
    strategy = Strategy(**{"schedule": every(4)} | given)
    return outcome(bag, lambda: attach(bag, torch.optim.SGD(bag.parameters()), strategy))


@transports
@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_that_differ(pool: RankPool, name: str, odd: int, transport: str) -> None:
    """Another schedule, reducer, policy, topology or weight on one rank is an error on all."""
    check(pool.run(4, attach_with, name, odd, transport), odd, *STRATEGIES[name].words)


AVERAGERS = {
    "period": Setting({"period": 4}, {"period": 5}, ["every 4", "every 5"]),
    "warm-up": Setting({"warmup_steps": 1}, {"warmup_steps": 2}, ["after 1", "after 2"]),
    "reducer": Setting(
        {}, {"reducer": Cast(torch.bfloat16)}, ["reducer Mean()", "reducer Cast(torch.bfloat16"]
    ),
}


def average_with(name: str, odd: int, warmup_steps: int, transport: str) -> Outcome:
    use(transport)
    setting, bag = AVERAGERS[name], Bag()
    given = setting.odd if dist.get_rank() == odd else setting.usual
    averager = PeriodicModelAverager(**{"period": 3, "warmup_steps": warmup_steps} | given)
    return outcome(bag, lambda: averager.average_parameters(bag.parameters()))


@transports
@worlds
@pytest.mark.parametrize("warmup_steps", [0, 7])
@pytest.mark.parametrize("name", AVERAGERS)
def test_averagers_that_differ(
    pool: RankPool, name: str, warmup_steps: int, world: int, odd: int, transport: str
) -> None:
    """Another period, warm-up or reducer is found at the first call, also if nothing is due."""
    outcomes = pool.run(world, average_with, name, odd, warmup_steps, transport)
    check(outcomes, odd, *AVERAGERS[name].words)


def hierarchies(odd: int) -> Outcome:
    bag = Bag()
    sizes = {2: 4} if dist.get_rank() == odd else {2: 2, 4: 4}

    def average() -> None:
        HierarchicalModelAverager(sizes).average_parameters(bag.parameters())

    return outcome(bag, average)


@pytest.mark.parametrize("odd", [0, 3])
def test_hierarchies_that_differ(pool: RankPool, odd: int) -> None:
    """Other group sizes on one rank are an error on all, before groups are made that wait."""
    check(pool.run(4, hierarchies, odd), odd, "{2: 4}", "{2: 2, 4: 4}")


# After training has begun.


def step(bag: Bag, optimizer: torch.optim.Optimizer) -> None:
    """Move every trainable parameter by this rank's number, up to where ranks differ again."""
    for parameter in bag.parameters():
        parameter.grad = torch.full_like(parameter, float(dist.get_rank()))
    optimizer.step()


def freeze_later(transport: str, ranks: list[int]) -> tuple[Outcome, float, float, float]:
    """Train, freeze ``b`` on some ranks, train on; return what became of it, and a, b, d."""
    use(transport)
    bag = Bag()
    bag.put("d", torch.zeros(3))
    bag.get_parameter("d").requires_grad_(False)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    with attach(bag, optimizer, Strategy(schedule=every(2))):
        step(bag, optimizer)
        step(bag, optimizer)
        step(bag, optimizer)
        if dist.get_rank() in ranks:
            bag.get_parameter("b").requires_grad_(False)
            bag.get_parameter("d").requires_grad_(True)
        optimizer.step()
        seen = Outcome("", "", 0.0, True)
        try:
            optimizer.zero_grad()
        finally:
            values = [float(bag.get_parameter(name).detach().mean()) for name in "abd"]
    return seen, values[0], values[1], values[2]
