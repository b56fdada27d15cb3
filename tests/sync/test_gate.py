"""A gate for bad workers: who has a say in a sync, and how much of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    NotAttachable,
    Sharding,
    Strategy,
    Telemetry,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    diloco,
    hierarchical_sgd,
    streaming_diloco,
)
from loosestep.outer import Eager, Gate, InverseNorm, Outer, nesterov
from loosestep.reducers import ErrorFeedback, Int4, Mean, TwoLevel
from loosestep.schedules import every
from loosestep.strategy.gate import History
from loosestep.testing import RankPool, oracle
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot

PLAIN = Outer(torch.optim.SGD, lr=1.0)  # anchors, and the plain mean


def gated(gate: Gate, **options: Any) -> Strategy:
    return Strategy(schedule=every(1), outer=PLAIN, gate=gate, reducer=Mean(), **options)


class Records:
    """A sink that keeps who was left out, by step."""

    def __init__(self) -> None:
        self.left_out: dict[int, tuple[int, ...]] = {}

    def write(self, record: dict[str, Any]) -> None:
        if record["left_out"]:
            self.left_out[record["step"]] = record["left_out"]

    def close(self) -> None:
        pass


Seen = tuple[list[float], dict[int, tuple[int, ...]], dict[int, int]]


def move(strategy: Strategy, sizes: list[dict[int, float]], usual: float = 1.0) -> Seen:
    """Take steps of these sizes by rank; return where one weight is, and who was left out."""
    weight, sink = torch.nn.Parameter(torch.zeros(1)), Records()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    telemetry, seen = Telemetry(sinks=[sink]), []
    model = torch.nn.ParameterList([weight])
    with attach(model, optimizer, strategy, telemetry=telemetry, timeout=20) as run:
        for by_rank in sizes:
            weight.grad = torch.full((1,), -by_rank.get(dist.get_rank(), usual))
            optimizer.step()
            seen.append(float(weight))
        run.finalize()
        return seen, sink.left_out, run.metrics()["parameters/world"]["left_out"]


@pytest.mark.parametrize("late", [0, 1])
def test_one_worker_gone_astray_has_no_say_once(pool: RankPool, late: int) -> None:
    """Its norm is 100 times the others'; telemetry names it, and the next sync takes it back."""
    sizes: list[dict[int, float]] = [{}] * 12
    sizes[10] = {1: 100.0}  # the eleventh
    strategy = Strategy(schedule=every(2 if late else 1), outer=PLAIN, gate=Gate(), reducer=Mean())
    if late:  # every other step is a launch, and the mean arrives a step later
        strategy = dataclasses.replace(strategy, overlap_steps=1)
        sizes = [
            size
            for pair in zip([{0: 0.0, 1: 0.0, 2: 0.0}] * 12, sizes, strict=True)
            for size in pair
        ]
        sizes.append({0: 0.0, 1: 0.0, 2: 0.0})
    for seen, records, totals in pool.run(3, move, strategy, sizes):
        after = seen[2::2] if late else seen
        # All move by 1 at every sync; the eleventh takes the mean of ranks 0 and 2.
        assert after == [float(n) for n in range(1, 13)]
        assert records == {22 if late else 11: (1,)}
        assert totals == {1: 1}


def test_nobody_is_judged_by_a_few_norms(pool: RankPool) -> None:
    """The tenth sync still takes everybody."""
    sizes: list[dict[int, float]] = [{}] * 9 + [{1: 100.0}]
    for seen, records, _ in pool.run(3, move, gated(Gate()), sizes):
        assert seen[-1] == 9 + 34.0  # (1 + 100 + 1) / 3
        assert records == {}


def test_where_all_are_outliers_none_is_left_out(pool: RankPool) -> None:
    """Then it is not the worker that is bad; so is a worker alone."""
    sizes: list[dict[int, float]] = [{}] * 10 + [{0: 100.0, 1: 50.0}]
    for seen, records, _ in pool.run(2, move, gated(Gate()), sizes):
        assert (seen[-1], records) == (85.0, {})
    ((seen, records, _),) = pool.run(1, move, gated(Gate(clip=8.0)), sizes)
    assert (seen[-1], records) == (18.0, {})


def test_a_lasting_change_is_let_in(pool: RankPool) -> None:
    """An outlier enters its history as the largest norm that would have passed."""
    sizes: list[dict[int, float]] = [{}] * 10 + [{1: 2.0}] * 60
    _, records, totals = pool.run(2, move, gated(Gate(history=20)), sizes)[0]
    assert set(records.values()) == {(1,)}
    assert 1 < totals[1] < 50
    assert list(records) == list(range(11, 11 + totals[1]))  # and never again


def test_norms_are_clipped_before_they_are_averaged(pool: RankPool) -> None:
    """Each worker's own, to at most ``clip``."""
    # Norms 1 and 9: 9 is clipped to 3, the mean is 2; then from 2 on the same.
    for seen, _, _ in pool.run(2, move, gated(Gate(z=None, clip=3.0)), [{1: 9.0}] * 2):
        assert seen == [2.0, 4.0]


def test_a_copy_is_clipped_where_it_travels(pool: RankPool) -> None:
    """With a delay the own parameters stay what they are until the mean arrives."""
    strategy = Strategy(
        schedule=every(2), outer=PLAIN, gate=Gate(z=None, clip=3.0), overlap_steps=1, reducer=Mean()
    )
    # At 2 rank 0 is at 2 and rank 1 at 18, of which 3 travel: the mean is 2.5. At 3 rank 0 is at 3
    # and moves by 2.5 - 2; rank 1 is at 27 and moves by 2.5 - 18.
    zero, one = pool.run(2, move, strategy, [{1: 9.0}] * 3)
    assert zero[0] == [1.0, 2.0, 3.5]
    assert one[0] == [9.0, 18.0, 11.5]


def test_workers_count_by_their_inverse_norms(pool: RankPool) -> None:
    """1 / norm, so that no worker moves the mean by more than another."""
    # Norms 1, 2, 4 count 1, 1/2, 1/4: the mean is (1 + 1 + 1) / 1.75. Of equal norms it is plain.
    gate = Gate(z=None, weigh=InverseNorm())
    for seen, _, _ in pool.run(3, move, gated(gate), [{1: 2.0, 2: 4.0}, {}]):
        assert seen[0] == pytest.approx(3 / 1.75)
        assert seen[1] == pytest.approx(3 / 1.75 + 1)


def test_a_worker_that_is_not_finite_is_left_out(pool: RankPool) -> None:
    """Its norm is neither; it needs no history, and goes on with the others' mean."""
    for policy in ("pass", "skip"):
        strategy = gated(Gate(), on_nonfinite=policy)
        for seen, records, _ in pool.run(2, move, strategy, [{1: math.nan}, {}]):
            assert (seen, records) == ([1.0, 2.0], {1: (1,)}), policy


def test_a_history_by_hand() -> None:
    """Means and variances of the last norms; 0 and infinity do not enter."""
    gate, history = Gate(z=2.0, history=10), History()
    for norm in (1.0, 3.0, 0.0, math.inf):
        history = gate.following(norm, history)
    assert history == History(2, 2.0, 1.0)  # of 1 and 3
    full = History(10, 2.0, 1.0)
    assert [gate.is_outlier(norm, full) for norm in (0.1, 4.0, 4.1)] == [False, False, True]
    assert not gate.is_outlier(100.0, History(9, 2.0, 1.0))
    # A tenth of the way: mean 2 + 0.1 * 1, variance 0.9 * (1 + 0.1 * 1); 100 enters as 4.
    assert gate.following(3.0, full) == History(11, 2.1, 0.9 * 1.1)
    assert gate.following(100.0, full) == gate.following(4.0, full)
    # Equal norms have no spread: a hundredth of their mean stands for it.
    assert [gate.is_outlier(n, History(10, 100.0, 0.0)) for n in (102.0, 102.1)] == [False, True]


def erring(net: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return a loss that is far too large on one rank at one step."""
    return loss_of(net, rank, step) * (200.0 if (rank, step) == (1, 11) else 1.0)


def train(strategy: Strategy, steps: int, stop: int = -1) -> tuple[dict[str, Any], dict[int, int]]:
    """Train; at ``stop`` save, and go on in another model."""
    rank, net = dist.get_rank(), make_net()
    run = attach(net, sgd(net), strategy, timeout=20)
    for step in range(steps):
        if step == stop:
            saved = snapshot(net), run.optimizer.state_dict(), run.state_dict()
            run.detach()
            net = make_net(1)
            run = attach(net, sgd(net), strategy, timeout=20)
            net.load_state_dict(saved[0])
            run.optimizer.load_state_dict(saved[1])
            run.load_state_dict(saved[2])
        run.optimizer.zero_grad()
        erring(net, rank, step).backward()
        run.optimizer.step()
    left_out = run.metrics()["parameters/world"]["left_out"]
    run.detach()
    return snapshot(net), left_out


KINDS: dict[str, Callable[[], Strategy]] = {
    "diloco": lambda: diloco(1, gate=Gate(clip=0.3), reducer=Mean()),
    "weighed": lambda: diloco(1, gate=Gate(z=3.0, weigh=InverseNorm()), reducer=Mean()),
    "momentum and first buffers": lambda: dataclasses.replace(
        diloco(1, gate=Gate(), reducer=Mean()), optimizer_state="average", buffers="broadcast"
    ),
    "eager": lambda: dataclasses.replace(
        streaming_diloco(2, 2, overlap_steps=1, arrival=Eager(), reducer=Mean()),
        gate=Gate(clip=0.5, weigh=InverseNorm()),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_the_replicas_of_one_process(pool: RankPool, kind: str) -> None:
    """Also where one is left out."""
    strategy, topology = KINDS[kind](), Topology({"world": [[0, 1, 2]]})
    results = pool.run(3, train, strategy, 14)
    nets = oracle.train_replicas(strategy, topology, 14, make_net, sgd, erring)
    for rank, (values, left_out) in enumerate(results):
        assert equal(values, snapshot(nets[rank])), rank
        assert kind == "eager" or left_out.get(1, 0) > 0  # its parts have not enough norms yet


@pytest.mark.parametrize("kind", [*KINDS, "few bits"])
def test_resuming_goes_on_to_the_bit(pool: RankPool, kind: str) -> None:
    """Histories are saved, and by them the same verdicts fall."""
    bits = diloco(1, gate=Gate(), reducer=TwoLevel(ErrorFeedback(Int4())))
    strategy = bits if kind == "few bits" else KINDS[kind]()
    whole = pool.run(2, train, strategy, 14)
    for stop in (5, 11):
        again = pool.run(2, train, strategy, 14, stop)
        assert all(equal(one[0], other[0]) for one, other in zip(whole, again, strict=True)), stop


def test_few_bits_leave_the_others_alone(pool: RankPool) -> None:
    """With error feedback who is left out ends with the others' parameters."""
    (one, out), (other, _) = pool.run(
        2, train, diloco(1, gate=Gate(), reducer=TwoLevel(ErrorFeedback(Int4()))), 12
    )
    assert equal(one, other)
    assert out == {1: 1}


def refuse_sharded(kind: str) -> str:
    net = torch.nn.Linear(2, 2)
    strategy = diloco(4, gradients="world", gate=Gate())
    optimizer: torch.optim.Optimizer = sgd(net)
    if kind == "sharded":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    else:
        strategy = dataclasses.replace(
            hierarchical_sgd({"host": 2, "world": 4}), outer={"host": nesterov()}, gate=Gate()
        )
    with pytest.raises((NotAttachable, ValueError)) as told:
        attach(net, optimizer, strategy)
    return str(told.value)


def test_what_cannot_be_judged_is_not_attached(pool: RankPool) -> None:
    """Shards, and a widest level without anchors."""
    for text in pool.run(2, refuse_sharded, "sharded"):
        assert "is for whole replicas" in text
    for text in pool.run(2, refuse_sharded, "anchors"):
        assert "stands before 'world'" in text
        assert "['host'] only" in text


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a z of 0": (lambda: Gate(z=0.0), "z must be a finite number > 0, or None for none, got 0.0"),
    "a clip below 0": (lambda: Gate(clip=-1.0), "clip must be a finite number > 0"),
    "a short history": (lambda: Gate(history=3), "history must be a whole number >= 10, got 3"),
    "nothing": (lambda: Gate(z=None), "lets everything pass"),
    "a NaN that stays": (
        lambda: gated(Gate(), overlap_steps=1, on_nonfinite="pass"),
        "holds NaN, to which nothing can be added",
    ),
    "no anchors": (lambda: Strategy(schedule=every(4), gate=Gate()), "give outer=nesterov"),
    "shards": (
        lambda: Strategy(schedule=every(4), outer=PLAIN, gate=Gate(), sharding=Sharding()),
        "averages shards",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    """At construction, with the way out."""
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        make()


def test_a_weigher_must_be_one() -> None:
    """A boolean is none."""
    with pytest.raises(TypeError, match="weigh must be InverseNorm"):
        Gate(weigh=True)  # type: ignore[arg-type]
