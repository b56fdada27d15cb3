"""Parameters that are averaged in parts, at steps of their own, and arrive some steps later."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from loosestep import (
    NotAttachable,
    Strategy,
    Topology,
    attach,
    diloco,
    hierarchical_sgd,
    streaming_diloco,
)
from loosestep.outer import Delta, Eager, Mix, nesterov
from loosestep.reducers import Mean
from loosestep.schedules import Fragments, every, fragments_of, streaming
from loosestep.testing import RankPool
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot

# By hand, on two ranks: one weight a part, its gradients chosen so that every step adds a number.


def move(strategy: Strategy, steps: list[float]) -> list[float]:
    """Take plain steps of these sizes times the rank; return the weight after each."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen = []
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy) as run:
        for size in steps:
            weight.grad = torch.full((1,), -size * dist.get_rank())
            optimizer.step()
            seen.append(float(weight))
        run.telemetry.close()
        run.finalize()
    return seen


def late(arrival: Delta | Eager | Mix) -> Strategy:
    """Return one that is launched every 4 steps, doubles the pseudo-gradient, and lands 2 later."""
    return Strategy(
        schedule=every(4),
        reducer=Mean(),
        outer=nesterov(lr=2.0, momentum=0.0),
        overlap_steps=2,
        arrival=arrival,
    )


def test_delta_by_hand(pool: RankPool) -> None:
    """What is added is g - p at launch."""
    # After 4 steps of 1 rank 1 is at 4, rank 0 at 0: mean 2, anchor 0, g = 0 - 2 * (0 - 2) = 4.
    # At 6 rank 1 is at 6 and moves by 4 - 4 = 0; rank 0 is at 0 and moves by 4 - 0 = 4.
    zero, one = pool.run(2, move, late(Delta()), [1.0] * 6)
    assert zero == [0, 0, 0, 0, 0, 4]
    assert one == [1, 2, 3, 4, 5, 6]


def test_mix_by_hand(pool: RankPool) -> None:
    """What comes is alpha p + (1 - alpha) g."""
    # g = 4 as above. At 6 with alpha 1/4: rank 1 has 6 / 4 + 3 * 4 / 4 = 4.5, rank 0 has 0 + 3 = 3.
    zero, one = pool.run(2, move, late(Mix(0.25)), [1.0] * 6)
    assert (zero[-1], one[-1]) == (3.0, 4.5)


def test_eager_by_hand(pool: RankPool) -> None:
    """The own difference at once, the others' when they arrive."""
    # At 4 rank 1 takes what its own 4 would lead to: 0 - 2 * (0 - 4) = 8; rank 0 stays at 0.
    # At 6 rank 1 is at 10 and moves by g - 8 = -4; rank 0 is at 0 and moves by 4 - 0.
    zero, one = pool.run(2, move, late(Eager()), [1.0] * 6)
    assert zero == [0, 0, 0, 0, 0, 4]
    assert one == [1, 2, 3, 8, 9, 6]


def two_parts() -> tuple[list[tuple[float, ...]], dict[str, Any]]:
    """Return where two weights are after every step, and the totals."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 5)]
    net, optimizer = torch.nn.ParameterList(weights), torch.optim.SGD(weights, lr=1.0)
    strategy = Strategy(schedule=streaming(4, 2), reducer=Mean())
    seen = []
    with attach(net, optimizer, strategy) as run:
        for step in range(1, 9):
            for weight in weights:
                weight.grad = torch.full_like(weight, -float(dist.get_rank()))
            optimizer.step()
            seen.append((step, *(float(weight[0]) for weight in weights)))
        totals = run.metrics()["parameters/world"]
    return seen, totals


def test_parts_take_turns(pool: RankPool) -> None:
    """Each part once a period, at its offset; traffic is a part's at every turn."""
    seen, totals = pool.run(2, two_parts)[1]
    # Rank 1 adds 1 a step, rank 0 nothing. Of the first part the means are 2 / 2 = 1 after 2 steps
    # and (1 + 5) / 2 = 3 after 6, of the other 4 / 2 = 2 after 4 and (2 + 6) / 2 = 4 after 8.
    assert seen[:4] == [(1, 1, 1), (2, 1, 2), (3, 2, 3), (4, 3, 2)]
    assert seen[4:] == [(5, 4, 3), (6, 3, 4), (7, 4, 5), (8, 5, 4)]
    assert totals["syncs"] == 4


def by_sockets() -> tuple[dict[str, Any], int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOSESTEP_SHARED_MEMORY", "0")
        _, totals = two_parts()
    sent = [Mean().bytes_on_wire(n, torch.float32, 2, dist.get_rank()) for n in (3, 5)]
    return totals, 2 * sum(sent), max(sent)


def test_bytes_are_those_that_were_told(pool: RankPool) -> None:
    """Over sockets, in all and at the step with the most."""
    for totals, total, peak in pool.run(2, by_sockets):
        assert (totals["bytes_sent"], totals["peak_bytes_sent"]) == (total, peak)


# One part.


def train(strategy: Strategy, steps: int) -> dict[str, torch.Tensor]:
    net = make_net()
    with attach(net, sgd(net), strategy) as run:
        for step in range(steps):
            run.optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            run.optimizer.step()
        run.finalize()
    return snapshot(net)


def test_one_part_that_nobody_waits_for_is_diloco(pool: RankPool) -> None:
    """Bit for bit, the tail included."""
    streamed = pool.run(3, train, streaming_diloco(4, 1, overlap_steps=0), 10)
    plain = pool.run(3, train, diloco(4), 10)
    assert all(equal(one, other) for one, other in zip(streamed, plain, strict=True))


def test_all_replicas_are_equal_in_the_end(pool: RankPool) -> None:
    """``finalize`` lets what is under way land and averages every part."""
    for arrival in (Delta(), Mix(0.5), Eager()):
        strategy = streaming_diloco(6, 3, overlap_steps=5, arrival=arrival)
        first, *others = pool.run(3, train, strategy, 10)
        assert all(equal(first, other) for other in others), arrival


def out_of_batches(batches: list[int]) -> tuple[dict[str, torch.Tensor], int]:
    net, rank = make_net(), dist.get_rank()
    strategy = streaming_diloco(4, 2, overlap_steps=3)
    with attach(net, sgd(net), strategy, timeout=20) as run:
        for step in range(batches[rank]):
            run.optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            run.optimizer.step()
        run.finalize()
        before = snapshot(net)
        run.finalize()  # nothing has changed since
        assert equal(before, snapshot(net))
        return snapshot(net), run.local_steps


@pytest.mark.parametrize("batches", [[7, 12, 3], [1, 9, 9]])
def test_ranks_may_run_out_of_batches(pool: RankPool, batches: list[int]) -> None:
    """Whoever is through answers the others' parts; nothing is averaged a second time."""
    (first, _), *others = pool.run(3, out_of_batches, batches)
    assert all(equal(first, other) and local == 0 for other, local in others)


# How parameters are split.


@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 40, 1000]), min_size=1, max_size=12),
    num=st.integers(1, 12),
)
def test_every_parameter_is_in_one_part_and_none_is_empty(sizes: list[int], num: int) -> None:
    """In the model's order, whatever the sizes."""
    named = [(f"p{index}", size) for index, size in enumerate(sizes)]
    if num > len(sizes):
        with pytest.raises(NotAttachable, match=f"give at most {len(sizes)}"):
            Fragments(num).split(named)
        return
    parts = Fragments(num).split(named)
    assert [name for part in parts for name in part] == [name for name, _ in named]
    assert all(parts)


def test_parts_are_about_equal_and_keep_modules_whole() -> None:
    """By bytes, and where asked for not inside a list's modules."""
    layers = [(f"layers.{n}.{part}", 10) for n in range(4) for part in ("weight", "bias")]
    assert [len(part) for part in Fragments(2).split(layers)] == [4, 4]
    odd = [("embed", 10), *layers]
    assert Fragments(3, whole="layers").split(odd) == [
        ("embed", "layers.0.weight", "layers.0.bias"),
        ("layers.1.weight", "layers.1.bias"),
        ("layers.2.weight", "layers.2.bias", "layers.3.weight", "layers.3.bias"),
    ]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "parts that overlap": (
        lambda: fragments_of([["a", "b"], ["b.c"]]),
        r"must not overlap: 'b.c' is given, and is in 'b'",
    ),
    "a part that misses one": (
        lambda: fragments_of([["a"], ["b"]]).split([("a", 1), ("b.c", 1), ("d", 1)]),
        "'d' are in none",
    ),
    "a part of nothing": (
        lambda: fragments_of([["a"], ["b"]]).split([("a", 1)]),
        r"\['b'\] holds no parameter",
    ),
    "a period that parts do not divide": (
        lambda: streaming_diloco(10, 4),
        "10 is no multiple of 4; give a period of 12 or 8",
    ),
    "an arrival after the next launch": (
        lambda: streaming_diloco(8, 2, overlap_steps=8),
        "overlap_steps is 8, and a fragment's period 8; give overlap_steps <= 7",
    ),
    "other numbers of parts": (
        lambda: streaming_diloco(8, 2, fragments=Fragments(4)),
        r"schedule has 2 fragments and fragments=.* has 4",
    ),
    "parts without a schedule of theirs": (
        lambda: Strategy(schedule=every(8), fragments=Fragments(2)),
        r"give schedule=streaming\(period, 2\)",
    ),
    "an arrival of nothing": (
        lambda: Strategy(schedule=every(8), arrival=Mix(0.5)),
        "overlap_steps is 0",
    ),
    "a guess of nothing": (
        lambda: Strategy(schedule=every(8), arrival=Eager(), overlap_steps=1),
        "give outer=nesterov",
    ),
    "a share of all": (lambda: Mix(1.0), r"alpha must lie in \[0, 1\), got 1.0"),
    "outer rules by level": (
        lambda: dataclasses.replace(streaming_diloco(8, 2), outer={"world": nesterov()}),
        "without naming levels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    """At construction, with the way out."""
    make, text = REFUSED[case]
    with pytest.raises((ValueError, NotAttachable), match=text):
        make()


def too_many() -> str:
    net = torch.nn.Linear(2, 2)
    try:
        attach(net, sgd(net), streaming_diloco(9, 3), timeout=10)
    except NotAttachable as error:
        return str(error)
    return ""


def test_more_parts_than_parameters_are_refused(pool: RankPool) -> None:
    """On all ranks, when they attach."""
    for text in pool.run(2, too_many):
        assert text == "2 parameters cannot be split into 3 fragments; give at most 2"


# What comes and goes.


def thaw() -> tuple[float, float, float]:
    """Freeze one of two parts after four steps and thaw it after eight; return where all is."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    net, rank = torch.nn.ParameterList(weights), dist.get_rank()
    optimizer = torch.optim.SGD(weights, lr=1.0)
    strategy = Strategy(schedule=streaming(2, 2), reducer=Mean(), outer=nesterov(1.0, 0.0))
    with attach(net, optimizer, strategy) as run:
        for step in range(12):
            weights[0].requires_grad_(not 4 <= step < 8)
            for weight in weights:
                weight.grad = torch.full((1,), -float(rank)) if weight.requires_grad else None
            optimizer.step()
            if step == 7:
                kept = float(weights[0])
        run.finalize()
    return kept, float(weights[0]), float(weights[1])


def test_a_frozen_part_stays_where_it_is(pool: RankPool) -> None:
    """Its turns average nothing, and when it is thawed it goes on from there."""
    # Ranks add 0 and 1 a step: the mean grows by a half. After 4 steps it is at 2 minus what the
    # last step of rank 1 added alone (its turn was after step 3): at most a half apart.
    one, other = pool.run(2, thaw)
    assert one[1:] == other[1:]
    assert one[2] == 6.0
    assert one[1] == 4.0


def test_levels_of_their_own_stay_whole() -> None:
    """Parts are of one level; hierarchies average all they have."""
    strategy = hierarchical_sgd(
        {"host": 2, "world": 4}, topology=Topology({"host": [[0]], "world": [[0]]})
    )
    assert strategy.parts is None
    assert streaming_diloco(8, 2).parts == Fragments(2)
