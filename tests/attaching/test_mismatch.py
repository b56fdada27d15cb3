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
    HierarchicalModelAverager,
    PeriodicModelAverager,
    RankMismatch,
    Strategy,
    Topology,
    attach,
    average_parameters,
    post_local_sgd,
)
from loosestep.reducers import Cast
from loosestep.schedules import always, every
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast

SECONDS = 5.0  # a mismatch is found by comparing, not by waiting for a time-out (of 30 s here)

# How many ranks, which of them is the odd one, and how they are joined.
WORLDS = [(2, 1, "memory"), (3, 0, "network"), (4, 2, "memory")]
worlds = pytest.mark.parametrize(("world", "odd", "transport"), WORLDS)
transports = pytest.mark.parametrize("transport", ["memory", "network"])


class Bag(torch.nn.Module):
    """Parameters without a purpose, filled with this rank's number."""

    a: torch.nn.Parameter
    b: torch.nn.Parameter
    c: torch.nn.Parameter

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
    except ValueError as error:  # as code that knows nothing of this library would say
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    after = bag.values()
    return Outcome(kind, text, seconds, all(map(torch.equal, before, after)))


def use(transport: str) -> None:
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0" if transport == "network" else "1"


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
    bag.b.requires_grad_(False)


def other_name(bag: Bag) -> None:
    value = bag.c.detach()
    del bag.c
    bag.put("renamed", value)


def quantised(bag: Bag) -> None:
    bag.put("b", torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))


def integer(bag: Bag) -> None:
    bag.put("b", torch.zeros(4, dtype=torch.int64))


Change = tuple[Callable[[Bag], None], list[str]]

# What is changed, and what the error must say: the tensor as it is here and as it is there.
CHANGES: dict[str, Change] = {
    "shape": (other_shape, ["(4,) float32 'b'", "(5,) float32 'b'"]),
    "dtype": (other_dtype, ["(4,) float32 'b'", "(4,) float64 'b'"]),
    "one more": (one_more, ["(7,) float32 'd'", "nothing"]),
    "one less": (one_less, ["(2, 2) float32 'c'", "nothing"]),
    "sparse": (sparse, ["'b' is torch.sparse_coo"]),
    "meta": (meta, ["'b' is on the meta device"]),
}
# These show only where names and requires_grad are looked at.
NAMED_CHANGES: dict[str, Change] = {
    "name": (other_name, ["(2, 2) float32 'c'", "(2, 2) float32 'renamed'"]),
    "frozen": (frozen, ["(4,) float32 'b'", "(2, 2) float32 'c'"]),
}
# These cannot require a gradient, so only the bare function is ever given them.
BARE_CHANGES: dict[str, Change] = {
    "quantised": (quantised, ["'b' is quantised"]),
    "integer": (integer, ["'b' is int64"]),
}
ALL_CHANGES = CHANGES | NAMED_CHANGES | BARE_CHANGES


def by_attach(bag: Bag) -> None:
    # An optimizer is not what is compared, and would not take a sparse parameter.
    attach(bag, torch.optim.SGD([bag.a]), Strategy(schedule=every(2)))


def by_averager(bag: Bag) -> None:
    PeriodicModelAverager(4, warmup_steps=9, module=bag).average_parameters(bag.parameters())


def by_hierarchy(bag: Bag) -> None:
    sizes = {2: dist.get_world_size()}
    HierarchicalModelAverager(sizes, module=bag).average_parameters(bag.parameters())


def by_function(bag: Bag) -> None:
    average_parameters(bag.parameters(), None)


WAYS: dict[str, Callable[[Bag], None]] = {
    "attach": by_attach,
    "averager": by_averager,
    "hierarchy": by_hierarchy,
    "function": by_function,
}


def change_on_one_rank(way: str, change: str, odd: int, transport: str) -> Outcome:
    use(transport)
    bag = Bag()
    if dist.get_rank() == odd:
        ALL_CHANGES[change][0](bag)
    return outcome(bag, lambda: WAYS[way](bag))


@worlds
@pytest.mark.parametrize("way", ["attach", "averager"])
@pytest.mark.parametrize("change", [*CHANGES, *NAMED_CHANGES])
def test_parameters_that_differ(
    pool: RankPool, way: str, change: str, world: int, odd: int, transport: str
) -> None:
    """Another shape, dtype, name or number of parameters on one rank is an error on all."""
    check(pool.run(world, change_on_one_rank, way, change, odd, transport), odd, *_words(change))


@worlds
@pytest.mark.parametrize("change", [*CHANGES, *BARE_CHANGES])
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


@pytest.mark.parametrize(("odd", "transport"), [(0, "memory"), (3, "network")])
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


@worlds
def test_a_hierarchy_compares_parameters_too(
    pool: RankPool, world: int, odd: int, transport: str
) -> None:
    """The hierarchical averager finds another shape at its first call."""
    outcomes = pool.run(world, change_on_one_rank, "hierarchy", "shape", odd, transport)
    check(outcomes, odd, *_words("shape"))


# After training has begun.


class Later(NamedTuple):
    """What a rank has after the change: the error, and the mean of each parameter."""

    text: str
    values: dict[str, float]


def step(bag: Bag, optimizer: torch.optim.Optimizer) -> None:
    """Lower every trainable parameter by this rank's number."""
    for parameter in bag.parameters():
        trains = parameter.requires_grad
        parameter.grad = torch.full_like(parameter, float(dist.get_rank())) if trains else None
    optimizer.step()


def try_step(bag: Bag, action: Callable[[], None]) -> Later:
    text, began = "", time.monotonic()
    try:
        action()
    except RankMismatch as error:
        text = str(error)
    assert time.monotonic() - began < SECONDS
    return Later(text, {name: float(p.detach().mean()) for name, p in bag.named_parameters()})


def freeze_later(ranks: list[int], transport: str) -> Later:
    """Train for three of four steps, freeze ``b`` and thaw ``c`` on some ranks, train on."""
    use(transport)
    bag = Bag()
    bag.c.detach().zero_()
    bag.c.requires_grad_(False)
    optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
    with attach(bag, optimizer, Strategy(schedule=every(2))):
        for _ in range(3):
            step(bag, optimizer)
        if dist.get_rank() in ranks:
            bag.b.requires_grad_(False)
            bag.c.requires_grad_(True)
        return try_step(bag, lambda: step(bag, optimizer))


@transports
def test_freezing_on_all_ranks_goes_on(pool: RankPool, transport: str) -> None:
    """What was frozen on all ranks is left out from then on, and what was thawed takes part."""
    # All start from rank 0's zeros and rank r takes steps of -r, averaged after every second:
    # a: 0, -2 -> -1; then -1, -3 -> -2. b stops at -1, -2. c starts late: 0, -1 -> -0.5.
    outcomes = pool.run(2, freeze_later, [0, 1], transport)
    assert outcomes[0] == Later("", {"a": -2.0, "b": -1.0, "c": -0.5})
    assert outcomes[1] == Later("", {"a": -2.0, "b": -2.0, "c": -0.5})


@worlds
def test_freezing_on_one_rank_is_an_error(
    pool: RankPool, world: int, odd: int, transport: str
) -> None:
    """What was frozen on one rank only is named on all, and no rank averages anything."""
    centre = -(world - 1)  # the mean of -2 r over the ranks, after the first two steps
    for rank, later in enumerate(pool.run(world, freeze_later, [odd], transport)):
        assert f"rank {odd} has (2, 2) float32 'c'" in later.text
        assert "(4,) float32 'b'" in later.text
        assert later.values["a"] == centre - 2 * rank


def add_group_later(ranks: list[int], transport: str) -> Later:
    """Average an optimizer's groups twice; in between, add ``c`` on some ranks."""
    use(transport)
    bag = Bag()
    optimizer = torch.optim.SGD([bag.a, bag.b])
    averager = PeriodicModelAverager(2, module=bag)
    averager.average_parameters(optimizer.param_groups)  # call 0 is due, call 1 is not
    averager.average_parameters(optimizer.param_groups)
    if dist.get_rank() in ranks:
        optimizer.add_param_group({"params": [bag.c]})
    return try_step(bag, lambda: averager.average_parameters(optimizer.param_groups))


@transports
def test_a_group_added_on_all_ranks_goes_on(pool: RankPool, transport: str) -> None:
    """A parameter group that all ranks added is averaged with the others."""
    for later in pool.run(2, add_group_later, [0, 1], transport):
        assert later == Later("", {"a": 0.5, "b": 0.5, "c": 0.5})


@worlds
def test_a_group_added_on_one_rank_is_an_error(
    pool: RankPool, world: int, odd: int, transport: str
) -> None:
    """A parameter group that one rank added is named on all, and keeps its values."""
    for rank, later in enumerate(pool.run(world, add_group_later, [odd], transport)):
        assert f"rank {odd} has (2, 2) float32 'c'" in later.text
        assert later.values["c"] == rank


def go_on_after_a_mismatch(transport: str) -> tuple[bool, float]:
    """Average what differs, then what does not, over the same process group."""
    use(transport)
    bag = Bag()
    wrong = [bag.a, bag.b] if dist.get_rank() == 0 else [bag.a, bag.c]
    averager = PeriodicModelAverager(2)
    first = outcome(bag, lambda: averager.average_parameters(wrong))
    averager.average_parameters(bag.parameters())
    return first.kind == "RankMismatch" and first.untouched, float(bag.c.detach().mean())


@transports
def test_a_mismatch_can_be_put_right(pool: RankPool, transport: str) -> None:
    """After a mismatch the same averager and process group work with the right parameters."""
    assert pool.run(3, go_on_after_a_mismatch, transport) == [(True, 1.0)] * 3


def groups_after_a_refusal() -> tuple[str, int]:
    bag, before = Bag(), len(dist.distributed_c10d._world.pg_map)
    strategy = Strategy(schedule=every(2 + dist.get_rank()))
    seen = outcome(bag, lambda: attach(bag, torch.optim.SGD(bag.parameters()), strategy))
    return seen.kind, len(dist.distributed_c10d._world.pg_map) - before


def test_a_refused_attachment_leaves_no_process_groups(pool: RankPool) -> None:
    """What ``attach`` made before it found the mismatch is freed."""
    assert pool.run(2, groups_after_a_refusal) == [("RankMismatch", 0)] * 2
