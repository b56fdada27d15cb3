"""Sharded steps with ranks that die, hang or have a bug: every survivor is told in time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import PeerLost
from loosestep.sharding.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from loosestep.sharding.optimizer import ZeroRedundancyOptimizer
from loosestep.sharding.options import ZeroOptions
from loosestep.testing import RankPool
from tests.support.faults import FAULTS, use
from tests.support.pairs import in_pairs
from tests.support.zero_models import BUCKET_MB, WIDTH, Layers

TIMEOUT = 1.5  # seconds for every wait on a rank that hangs
PATIENCE = 20.0  # for one that is killed: what is found out much earlier was not a time-out
SLACK = 3.0  # for asking the other survivors, and for few cores
NUM_STEPS = 3
HOOKS: dict[str, Callable[..., Any]] = {
    "last": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}
WAYS = [*HOOKS, "at step"]


class Plan(NamedTuple):
    """Who is struck by what, and when."""

    victim: int
    fault: str
    when: str  # "backward": between two buckets; "step": before the optimizer's; "first": at all
    timeout: float
    transport: str

    def strike(self, when: str, step: int = 0) -> None:
        due = when == self.when and step == (0 if when == "first" else NUM_STEPS - 1)
        if due and dist.get_rank() == self.victim:
            FAULTS[self.fault]()


class Training:
    """A model of five buckets whose optimizer is sharded, with a fault."""

    def __init__(self, way: str, plan: Plan) -> None:
        use(plan.transport)
        model = Layers()
        self.plan, self.step = plan, 0
        middle: Any = model.layers[2]
        middle.register_full_backward_hook(lambda *_: plan.strike("backward", self.step))
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        self.zero = ZeroRedundancyOptimizer(
            self.ddp.parameters(),
            torch.optim.SGD,
            overlap_with_ddp=way in HOOKS,
            zero_options=ZeroOptions(timeout=plan.timeout),
            lr=0.1,
        )
        if way in HOOKS:
            zero_hook = HOOKS[way](allreduce_hook, self.ddp, self.zero)
            self.ddp.register_comm_hook(None, zero_hook)

    def iterate(self) -> None:
        self.zero.zero_grad()
        self.ddp(torch.ones(2, WIDTH)).sum().backward()
        self.plan.strike("step", self.step)
        self.zero.step()
        self.step += 1


class Attempt(NamedTuple):
    """What became of one iteration."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    seconds: float


def attempt(call: Callable[[], object]) -> Attempt:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        ranks = error.ranks if isinstance(error, PeerLost) else ()
        return Attempt(type(error).__name__, ranks, str(error), time.monotonic() - began)
    return Attempt("nothing", (), "", time.monotonic() - began)


def survive(way: str, plan: Plan) -> tuple[Attempt, Attempt]:
    """Train until an iteration fails, and then try one more; return these two."""
    training = Training(way, plan)
    plan.strike("first")
    for _ in range(NUM_STEPS):
        last = attempt(training.iterate)
        if last.kind != "nothing":
            break
    return last, attempt(training.iterate)


def check(pool: RankPool, world: int, way: str, plan: Plan, seconds: float) -> list[Attempt]:
    """Require an error of all survivors in time, and another one from the next iteration."""
    results = pool.run(world, survive, way, plan, allow_dead=[plan.victim], group_timeout=TIMEOUT)
    survivors = [seen for rank, seen in enumerate(results) if rank != plan.victim]
    for failed, following in survivors:
        print(failed, following)
        assert failed.kind != "nothing"
        assert failed.seconds < seconds, failed
        assert following.kind != "nothing"
        assert following.seconds < TIMEOUT + SLACK
    return [failed for failed, _ in survivors]


def check_named(failures: list[Attempt], victim: int, doing: str) -> None:
    for failed in failures:
        assert (failed.kind, failed.ranks) == ("PeerLost", (victim,)), failed
        assert re.search(f"lost rank {victim} while {doing}", failed.text)


IN_BACKWARD = "reducing the gradients of '|gathering parameters"
places = pytest.mark.parametrize(
    ("world", "victim", "transport"), [(4, 0, "memory"), (3, 2, "network")]
)
hooks = pytest.mark.parametrize("way", list(HOOKS))


@pytest.mark.parametrize(
    ("way", "place"), in_pairs(HOOKS, [(4, 0, "memory"), (3, 2, "network")], each=1)
)
def test_a_rank_killed_inside_backward_is_named(
    pool: RankPool, way: str, place: tuple[int, int, str]
) -> None:
    """All survivors name a rank that is killed between two buckets, long before the time-out."""
    world, victim, transport = place
    plan = Plan(victim, "kill", "backward", PATIENCE, transport)
    check_named(check(pool, world, way, plan, PATIENCE / 4), victim, IN_BACKWARD)


@pytest.mark.parametrize(
    ("way", "place"),
    in_pairs(HOOKS, [(3, 2, "network", "sleep"), (4, 0, "memory", "stop")], each=1),
)
def test_a_rank_stuck_inside_backward_is_named(
    pool: RankPool, way: str, place: tuple[int, int, str, str]
) -> None:
    """All survivors name a rank that hangs between two buckets when the time-out is over."""
    world, victim, transport, fault = place
    plan = Plan(victim, fault, "backward", TIMEOUT, transport)
    failures = check(pool, world, way, plan, TIMEOUT + SLACK)
    check_named(failures, victim, IN_BACKWARD)
    assert all(failed.seconds > TIMEOUT / 2 for failed in failures)


@places
@pytest.mark.parametrize(
    ("fault", "timeout", "seconds"),
    [("kill", PATIENCE, PATIENCE / 4), ("sleep", TIMEOUT, TIMEOUT + SLACK)],
)
def test_a_rank_lost_before_step_is_named(
    pool: RankPool,
    world: int,
    victim: int,
    transport: str,
    fault: str,
    timeout: float,
    seconds: float,
) -> None:
    """Where ``step()`` steps, it names the rank that does not come to it."""
    plan = Plan(victim, fault, "step", timeout, transport)
    failures = check(pool, world, "at step", plan, seconds)
    check_named(failures, victim, "agreeing which gradients there are")


@pytest.mark.parametrize("fault", ["kill", "sleep"])
def test_a_rank_lost_in_ddps_own_all_reduce_is_no_hang(pool: RankPool, fault: str) -> None:
    """Where DDP shares gradients itself, its error comes within the group's time-out."""
    check(pool, 3, "at step", Plan(1, fault, "backward", TIMEOUT, "memory"), TIMEOUT + SLACK)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_never_came_is_no_hang(pool: RankPool, way: str) -> None:
    """The first iteration without a rank that is dead ends in time; a hook's error names it."""
    plan = Plan(1, "kill", "first", TIMEOUT, "memory")
    failures = check(pool, 3, way, plan, 2 * TIMEOUT + SLACK)
    if way in HOOKS:
        assert {(failed.kind, failed.ranks) for failed in failures} == {("PeerLost", (1,))}
        assert all("ranks [1] did not come" in failed.text for failed in failures)


def fail_together(way: str, where: str) -> list[Attempt]:
    """Let all ranks have the same bug in the middle of a backward, or of a step inside it."""
    plan = Plan(dist.get_rank(), "bug", where, TIMEOUT, "memory")
    training = Training(way, plan)
    if where == "optimizer":
        training.zero.optim.register_step_pre_hook(lambda *_: plan.strike(where, training.step))
    attempts = [attempt(training.iterate) for _ in range(NUM_STEPS + 2)]
    with torch.no_grad():
        attempts.append(attempt(lambda: training.ddp(torch.ones(2, WIDTH))))
    return attempts


@hooks
@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_an_interrupted_backward_is_not_gone_on_with(pool: RankPool, way: str, where: str) -> None:
    """After a bug in backward, half of the parameters are stepped: training on is refused."""
    for attempts in pool.run(2, fail_together, way, where):
        kinds = [seen.kind for seen in attempts]
        bug = ["nothing"] * (NUM_STEPS - 1) + ["ZeroDivisionError"]
        assert kinds == [*bug, "RuntimeError", "RuntimeError", "nothing"], attempts
        for seen in attempts[NUM_STEPS : NUM_STEPS + 2]:
            assert "the last backward was interrupted by an error" in seen.text
            assert "restart from a checkpoint" in seen.text
