"""Periods that follow from what was observed at the last sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import Strategy, attach, diloco, post_local_sgd
from loosestep.reducers import Mean
from loosestep.schedules import Observed, Rule, adacomm, after, always, drift, every, qsr
from loosestep.strategy.schedules import next_sync
from loosestep.testing import RankPool
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot


@dataclass(frozen=True)
class Growing(Rule):
    """One step longer every time: a rule of a user's own, with state."""

    @property
    def first(self) -> int:
        return 2

    @property
    def shortest(self) -> int:
        return 2

    def begin(self) -> dict[str, float]:
        return {"period": 2.0}

    def following(self, seen: Observed, state: dict[str, float]) -> tuple[int, dict[str, float]]:
        state["period"] += 1.0
        return int(state["period"]), state


def syncs_of(strategy: Strategy, steps: int, rates: list[float] | None = None) -> list[int]:
    """Train one weight; return after which steps there was a sync."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy) as run:
        seen: list[int] = []
        for step in range(steps):
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[step]
            # Replicas drift apart by what each rank adds: 0.0, 0.02, ...
            weight.grad = torch.full((1,), 0.2 * dist.get_rank())
            run.observe(loss=float(2 ** -(len(seen))))
            before = run.metrics().get("parameters/world", {"syncs": 0})["syncs"]
            optimizer.step()
            if run.metrics().get("parameters/world", {"syncs": 0})["syncs"] > before:
                seen.append(step + 1)
        run.finalize()
        return seen


def test_qsr_follows_the_live_learning_rate(pool: RankPool) -> None:
    """max(2, (0.2 / rate)^2): 4 while the rate is 0.1, then 16 at 0.05."""
    strategy = Strategy(schedule=every(qsr(2, 0.2)), reducer=Mean())
    rates = [0.1] * 5 + [0.05] * 35
    # The first is h_base = 2; at 2 the rate is 0.1: 2 + 4 = 6; there it is 0.05: 6 + 16 = 22.
    assert pool.run(2, syncs_of, strategy, 40, rates) == [[2, 6, 22, 38]] * 2


def test_adacomm_gets_denser_as_the_loss_falls(pool: RankPool) -> None:
    """ceil(sqrt(loss / first loss) * 8), where the loss halves after every sync."""
    strategy = post_local_sgd(adacomm(8, interval=1), gradients=None)
    # Mean losses between syncs: 1, 1/2, 1/4, 1/8. ceil(sqrt(1) * 8) is no less than 8, so 8 is
    # halved: 4. Then ceil(5.7) = 6 is no less than 4: 2; ceil(4) is no less than 2: 1; and so on.
    assert pool.run(2, syncs_of, strategy, 17) == [[8, 12, 14, 15, 16, 17]] * 2


def test_drift_keeps_replicas_as_far_apart_as_was_asked(pool: RankPool) -> None:
    """Twice the drift wanted halves the period."""
    strategy = Strategy(schedule=every(drift(0.02, start=4)), reducer=Mean())
    # Rank 1 moves 0.02 a step away from rank 0: after 4 steps they are 0.08 apart, so each is 0.04
    # from a mean of 0.96: a drift of 0.0417, and 4 * 0.02 / 0.0417 = 1.92 is bounded by half: 2.
    # After 2 more: 0.02 / 0.94 = 0.0213, 2 * 0.02 / 0.0213 = 1.88 makes 2 again, and so on.
    assert pool.run(2, syncs_of, strategy, 10) == [[4, 6, 8, 10]] * 2


def test_a_rule_of_ones_own_has_state(pool: RankPool) -> None:
    """Also after a warm-up, with a delay, and under an outer optimizer."""
    warm = after(3, every(Growing()), always(gradients="world"))
    late = Strategy(schedule=every(Growing()), reducer=Mean(), overlap_steps=1)
    assert pool.run(2, syncs_of, Strategy(schedule=warm), 16) == [[5, 8, 12]] * 2
    # Syncs are launched after 2, 5, 9 and 14 steps, and told when they arrive, a step later.
    assert pool.run(2, syncs_of, late, 16) == [[3, 6, 10, 15]] * 2
    assert pool.run(3, syncs_of, diloco(Growing()), 10) == [[2, 5, 9]] * 3


KINDS: dict[str, Callable[[], Strategy]] = {
    "qsr": lambda: Strategy(schedule=every(qsr(2, 0.15))),
    "adacomm": lambda: Strategy(schedule=every(adacomm(4, interval=2))),
    "drift": lambda: diloco(drift(0.05, start=3)),
    "drift, late": lambda: diloco(drift(0.05, start=3, least=3), overlap_steps=2),
    "growing, late": lambda: Strategy(schedule=after(2, every(Growing())), overlap_steps=1),
}


def interrupted(kind: str, stop: int) -> bool:
    """Say whether stopping and resuming equals going on."""
    rank = dist.get_rank()

    def start() -> tuple[Any, Any]:
        net = make_net()
        return net, sgd(net)

    def go(net: Any, run: Any, first: int, end: int) -> None:
        for step in range(first, end):
            run.optimizer.zero_grad()
            loss = loss_of(net, rank, step)
            run.observe(loss.detach())
            loss.backward()
            run.optimizer.step()

    net, optimizer = start()
    with attach(net, optimizer, KINDS[kind]()) as run:
        go(net, run, 0, 14)
        run.finalize()
    whole = snapshot(net)
    net, optimizer = start()
    with attach(net, optimizer, KINDS[kind]()) as run:
        go(net, run, 0, stop)
        saved = net.state_dict(), optimizer.state_dict(), run.state_dict()
        state = [{k: v.clone() for k, v in saved[0].items()}, *saved[1:]]
    net, optimizer = start()
    with attach(net, optimizer, KINDS[kind]()) as run:
        net.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        run.load_state_dict(state[2])
        go(net, run, stop, 14)
        run.finalize()
    return equal(whole, snapshot(net))


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_at_any_step_continues_to_the_bit(pool: RankPool, kind: str) -> None:
    """What a rule remembers is saved, also with an average under way."""
    for stop in (1, 3, 4, 7):
        assert pool.run(2, interrupted, kind, stop) == [True, True], stop


def uneven(batches: list[int]) -> tuple[dict[str, torch.Tensor], int]:
    net, rank = make_net(), dist.get_rank()
    with attach(net, sgd(net), diloco(drift(0.05, start=3)), timeout=20) as run:
        for step in range(batches[rank]):
            run.optimizer.zero_grad()
            loss_of(net, rank, step).backward()
            run.optimizer.step()
        run.finalize()
        return snapshot(net), run.metrics()["parameters/world"]["syncs"]


def test_ranks_may_run_out_of_batches(pool: RankPool) -> None:
    """Whoever is through learns every next sync at the one before."""
    (first, syncs), *others = pool.run(3, uneven, [4, 15, 9])
    assert syncs > 2
    assert all(equal(first, other) and syncs == count for other, count in others)


def forget_to_observe() -> str:
    net, rank = make_net(), dist.get_rank()
    with attach(net, sgd(net), Strategy(schedule=every(adacomm(2))), timeout=20) as run:
        for step in range(2):
            run.optimizer.zero_grad()
            loss = loss_of(net, rank, step)
            if rank == 0:
                run.observe(loss.detach())
            loss.backward()
            try:
                run.optimizer.step()
            except ValueError as error:
                return str(error)
    return ""


def test_a_loss_that_was_not_observed_is_missed_by_all(pool: RankPool) -> None:
    """On every rank, with what to call."""
    for text in pool.run(2, forget_to_observe):
        assert "group ranks [1] have observed none" in text
        assert "run.observe(loss)" in text


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an arrival after the next may be due": (
        lambda: Strategy(schedule=every(qsr(4, 0.1)), overlap_steps=4),
        "period of 4; give overlap_steps <= 3",
    ),
    "no base": (lambda: qsr(0, 0.1), "h_base must be a whole number >= 1"),
    "no alpha": (lambda: qsr(2, 0.0), "alpha must be a number > 0, got 0.0"),
    "no target": (lambda: drift(-1.0), "target must be a number > 0"),
    "bounds in disorder": (lambda: drift(0.1, start=2, least=4), "least <= start <= most"),
    "no shrinking": (lambda: adacomm(4, shrink=1.0), "shrink must lie"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    """At construction, with the way out."""
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        make()


def test_only_the_next_sync_is_known() -> None:
    """Before anything is observed that is the first."""
    schedule = after(3, every(Growing()))
    found = next_sync(schedule, 0)
    assert found is not None
    assert (found[0], found[1].parameters) == (5, "world")
