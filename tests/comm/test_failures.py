"""Ranks that die, hang or give up: every survivor is told in time who it was, and where."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from loosestep import PeerLost, PeriodicModelAverager, Strategy, attach, average_parameters, ddp
from loosestep.comm.flat.windows import OWN_WINDOW_BYTES
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Mean, Place
from loosestep.comm.reducers.reducer import Around
from loosestep.schedules import every
from loosestep.testing import RankPool, RanksFailed
from tests.support.faults import FAULTS, Fault, kill, use
from tests.support.processes import eventually, running

TIMEOUT = 1.0  # seconds for every wait on a rank that hangs
PATIENCE = 20.0  # for one that is killed: what is found out much earlier was not a time-out
SLACK = 2.0  # for asking the other survivors, and for few cores


class FaultyMean(Mean):
    """The mean, until a fault strikes this rank at its ``window``-th use."""

    def __init__(self, fault: Fault | None, window: int, phase: str) -> None:
        self.fault, self.window, self.phase = fault, window, phase

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        self.window -= 1
        fault = self.fault if self.window == 0 else None
        if fault is not None and self.phase == "start":
            fault()
        handle = super().start(buffer, peers, state, place)
        return handle if fault is None else FaultyHandle(handle, fault, self.phase)

    def __repr__(self) -> str:
        return "FaultyMean()"


class FaultyHandle(Around):
    """A mean under way that a fault strikes before it is summed or before it is taken."""

    def __init__(self, inner: Handle, fault: Fault, phase: str) -> None:
        super().__init__(inner)
        self._fault, self._phase = fault, phase

    def advance(self) -> None:
        if self._phase == "advance":
            self._fault()
        super().advance()

    def wait(self) -> None:
        if self._phase == "wait":
            self._fault()
        super().wait()


# A run: five syncs of a model of many windows, and a fault on one rank.

NUM_WINDOWS = 28  # more than are ever under way, so that a fault leaves some undone
STRIKES_AT = NUM_WINDOWS + 3  # the third window of the second sync


class Plan(NamedTuple):
    """Who is struck by what, and when."""

    victim: int
    fault: str
    when: str  # first, between (syncs), or at a window's start, advance or wait
    timeout: float | None
    transport: str

    @property
    def mine(self) -> Fault | None:
        """The fault, if it is to strike this rank."""
        return FAULTS[self.fault] if dist.get_rank() == self.victim else None

    def strike(self, when: str) -> None:
        if self.when == when and self.mine is not None:
            self.mine()

    def reducer(self) -> FaultyMean:
        return FaultyMean(self.mine, STRIKES_AT, self.when)


class Layers(torch.nn.Module):
    """Layers that are just large enough to travel each on its own."""

    def __init__(self) -> None:
        super().__init__()
        weights = [
            torch.full((OWN_WINDOW_BYTES // 4,), float(dist.get_rank())) for _ in range(NUM_WINDOWS)
        ]
        self.layers = torch.nn.ParameterList(weights)


def by_attach(plan: Plan) -> Callable[[], object]:
    net = Layers()
    optimizer = torch.optim.SGD(net.parameters())
    strategy = Strategy(schedule=every(1), reducer=plan.reducer())
    run: list[Any] = []

    def step() -> None:
        if not run:
            run.append(attach(net, optimizer, strategy, timeout=plan.timeout))
        optimizer.step()

    return step


def by_averager(plan: Plan) -> Callable[[], object]:
    net = Layers()
    averager = PeriodicModelAverager(2, reducer=plan.reducer(), timeout=plan.timeout, module=net)

    def step() -> None:
        averager.average_parameters(net.parameters())  # every second call is not due
        averager.average_parameters(net.parameters())

    return step


WAYS = {"attach": by_attach, "averager": by_averager}


class Attempt(NamedTuple):
    """What became of one step."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    seconds: float


def attempt(step: Callable[[], object]) -> Attempt:
    began = time.monotonic()
    try:
        step()
    except PeerLost as error:
        return Attempt("PeerLost", error.ranks, str(error), time.monotonic() - began)
    return Attempt("nothing", (), "", time.monotonic() - began)


def survive(way: str, plan: Plan) -> tuple[Attempt, Attempt]:
    """Take steps until one fails, and then one more; return these two."""
    use(plan.transport)
    step = WAYS[way](plan)
    plan.strike("first")
    for index in range(5):
        if index == 2:
            plan.strike("between")
        last = attempt(step)
        if last.kind != "nothing":
            break
    return last, attempt(step)


def check(survivors: list[tuple[Attempt, Attempt]], plan: Plan, seconds: float) -> None:
    for failed, following in survivors:
        assert (failed.kind, failed.ranks) == ("PeerLost", (plan.victim,)), failed
        assert failed.seconds < seconds, failed
        check_text(failed.text, plan)
        if plan.when != "first":
            assert (following.kind, following.ranks) == ("PeerLost", (plan.victim,)), following
            assert following.seconds < 0.5, following


def check_text(text: str, plan: Plan) -> None:
    """Require rank, phase, tensor and step."""
    if plan.when == "first":
        assert f"ranks [{plan.victim}] did not come" in text
        return
    assert f"lost rank {plan.victim} while" in text, text
    assert "at step " in text, text
    assert ("agreeing what to average" if plan.when == "between" else "averaging 'layers.") in text


def run(pool: RankPool, way: str, world: int, plan: Plan) -> list[tuple[Attempt, Attempt]]:
    results = pool.run(world, survive, way, plan, allow_dead=[plan.victim])
    return [seen for rank, seen in enumerate(results) if rank != plan.victim]


transports = pytest.mark.parametrize("transport", ["memory", "network"])


@pytest.mark.parametrize(
    ("way", "when", "world", "victim", "transport"),
    [
        ("attach", "between", 4, 3, "memory"),
        ("averager", "between", 3, 0, "network"),
        ("attach", "start", 3, 0, "network"),
        ("averager", "start", 4, 3, "memory"),
        ("attach", "advance", 4, 0, "memory"),
        ("attach", "advance", 3, 2, "network"),
        ("averager", "wait", 3, 2, "memory"),
        ("averager", "wait", 4, 0, "network"),
    ],
)
def test_a_killed_rank_is_named_at_once(
    pool: RankPool, way: str, when: str, world: int, victim: int, transport: str
) -> None:
    """A rank killed before, inside or after a sync is named by all, long before the time-out."""
    plan = Plan(victim, "kill", when, PATIENCE, transport)
    # Where survivors that hung up miss each other in a circle, they ask for up to 5 s who it was.
    check(run(pool, way, world, plan), plan, 0.4 * PATIENCE)


@pytest.mark.parametrize(
    ("way", "fault", "when", "world", "victim", "transport"),
    [
        ("averager", "stop", "between", 3, 0, "memory"),
        ("attach", "stop", "between", 4, 3, "network"),
        ("attach", "stop", "advance", 4, 0, "memory"),
        ("averager", "stop", "advance", 3, 2, "network"),
        ("attach", "sleep", "start", 3, 2, "memory"),
        ("averager", "sleep", "wait", 4, 0, "network"),
    ],
)
def test_a_stuck_rank_is_named_at_the_time_out(
    pool: RankPool, way: str, fault: str, when: str, world: int, victim: int, transport: str
) -> None:
    """A rank that hangs is named by all others when the time-out is over, and not before."""
    plan = Plan(victim, fault, when, TIMEOUT, transport)
    survivors = run(pool, way, world, plan)
    check(survivors, plan, TIMEOUT + SLACK)
    assert all(failed.seconds > TIMEOUT / 2 for failed, _ in survivors)


@pytest.mark.parametrize(("way", "victim"), [("attach", 0), ("averager", 2)])
def test_a_rank_that_never_came_is_named(pool: RankPool, way: str, victim: int) -> None:
    """Making the process group without a rank that is dead ends at the time-out and names it."""
    plan = Plan(victim, "kill", "first", TIMEOUT, "memory")
    check(run(pool, way, 3, plan), plan, 2 * TIMEOUT + SLACK)


def test_the_time_out_is_by_default_the_process_groups(pool: RankPool) -> None:
    """Without ``timeout=`` a wait ends when the job's process group would give up."""
    plan = Plan(1, "stop", "advance", None, "memory")
    results = pool.run(3, survive, "attach", plan, allow_dead=[1], group_timeout=TIMEOUT)
    check([results[0], results[2]], plan, TIMEOUT + SLACK)


def fail_on(plan: Plan) -> None:
    """Train, with a bug that shows on one rank in the middle of a sync."""
    use(plan.transport)
    step = by_attach(plan)
    for _ in range(5):
        step()


@pytest.mark.parametrize(
    ("world", "victim", "transport"), [(3, 0, "memory"), (3, 2, "network"), (4, 3, "memory")]
)
def test_an_exception_is_told_apart_from_its_victims(
    pool: RankPool, world: int, victim: int, transport: str
) -> None:
    """The rank with the bug says so itself, and all others say that they lost this rank."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(world, fail_on, Plan(victim, "bug", "advance", PATIENCE, transport))
    failures = failed.value.failures
    assert sorted(failures) == list(range(world))
    assert "ZeroDivisionError: a bug in the user's code" in failures[victim]
    for rank in set(failures) - {victim}:
        assert f"PeerLost: rank {rank}: lost rank {victim} while averaging" in failures[rank]


def lose_in_backward(plan: Plan) -> Attempt:
    """Share gradients at every step, until one fails."""
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters())

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    attach(net, optimizer, ddp(), timeout=plan.timeout)
    step()
    plan.strike("between")
    return attempt(step)


@pytest.mark.parametrize(
    ("fault", "timeout", "world", "victim"),
    [("kill", PATIENCE, 4, 0), ("kill", PATIENCE, 3, 2), ("stop", TIMEOUT, 3, 0)],
)
def test_a_rank_lost_while_sharing_gradients_is_named(
    pool: RankPool, fault: str, timeout: float, world: int, victim: int
) -> None:
    """An all-reduce does not say who is missing; the survivors find out between them."""
    plan = Plan(victim, fault, "between", timeout, "network")
    results = pool.run(world, lose_in_backward, plan, allow_dead=[victim])
    for rank in set(range(world)) - {victim}:
        kind, ranks, text, seconds = results[rank]
        assert (kind, ranks) == ("PeerLost", (victim,)), text
        assert f"lost rank {victim} while sharing gradients at step 1" in text
        assert seconds < TIMEOUT + SLACK


def lose_in_function(victim: int) -> Attempt:
    values = [torch.nn.Parameter(torch.zeros(1 << 16))]
    average_parameters(iter(values), None)
    if dist.get_rank() == victim:
        kill()
    return attempt(lambda: average_parameters(iter(values), None))


def test_the_bare_function_names_a_killed_rank(pool: RankPool) -> None:
    """``average_parameters`` raises the same error, with no averager around it."""
    for kind, ranks, text, seconds in pool.run(3, lose_in_function, 0, allow_dead=[0])[1:]:
        assert (kind, ranks) == ("PeerLost", (0,)), text
        assert seconds < SLACK + TIMEOUT


def wait_for_a_straggler(transport: str) -> float:
    use(transport)
    value = torch.nn.Parameter(torch.full((1 << 16,), float(dist.get_rank())))
    averager = PeriodicModelAverager(2, timeout=TIMEOUT)
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT / 2)
    averager.average_parameters([value])
    return float(value.detach().mean())


@transports
def test_a_straggler_is_waited_for(pool: RankPool, transport: str) -> None:
    """A rank that comes late, but within the time-out, is averaged like the others."""
    assert pool.run(3, wait_for_a_straggler, transport) == [1.0] * 3


def test_no_process_is_left_behind() -> None:
    """After a run with a stopped rank, all its processes are gone when the pool closes."""
    plan = Plan(1, "stop", "advance", TIMEOUT, "memory")
    with RankPool(3) as ranks:
        pids = ranks.run(3, os.getpid)
        check(run(ranks, "attach", 3, plan), plan, TIMEOUT + SLACK)
    assert eventually(lambda: not any(map(running, pids)))
