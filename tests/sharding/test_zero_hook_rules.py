"""Steps inside backward: what is left of gradients, what is refused and when, uneven inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from loosestep.sharding.optimizer import ZeroRedundancyOptimizer
from loosestep.sharding.stand_in import SpentGradient
from loosestep.testing import RankPool
from tests.support.zero_hooks import HOOKS, Overlapped, Setup, Side, both
from tests.support.zero_models import WIDTH

pytestmark = pytest.mark.fast

Raised = tuple[str, str]  # the error's class and its text


def raised(call: Callable[[], object]) -> Raised:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def stepped(hook: str, setup: Setup | None = None) -> Any:
    """Return a training whose first backward is over."""
    side = Overlapped(setup or Setup(), None, hook)
    side.ddp(torch.randn(3, WIDTH)).sum().backward()
    return side


# What is left when backward has stepped.


def scale_unseen(side: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(side.optimizer)


def step_twice(side: Any) -> None:
    side.optimizer.step()
    side.optimizer.step()


TOO_LATE: dict[str, tuple[Callable[[Any], object], str]] = {
    "scaler": (scale_unseen, r"ZeroOptions\(scaler=scaler\)"),
    "clip_grad_norm_": (
        lambda side: torch.nn.utils.clip_grad_norm_(side.ddp.parameters(), 1.0),
        r"ZeroOptions\(clip_norm=1.0\)",
    ),
    "clip_grad_value_": (
        lambda side: torch.nn.utils.clip_grad_value_(side.ddp.parameters(), 1.0),
        "overlap_with_ddp=False",
    ),
    "zero.clip_grad_norm_": (
        lambda side: side.optimizer.clip_grad_norm_(1.0),
        r"ZeroOptions\(clip_norm=...\)",
    ),
    "closure": (lambda side: side.optimizer.step(lambda: 0.0), r"call backward, then step\(\)"),
    "another optimizer": (
        lambda side: torch.optim.SGD(side.ddp.parameters()).step(),
        "overlap_with_ddp=False",
    ),
    "two steps": (step_twice, r"no backward has stepped since the last step\(\)"),
    "half": (lambda side: side.ddp.half(), r"zero_grad\(\)"),
    "share_memory": (lambda side: side.ddp.share_memory(), r"zero_grad\(\)"),
}


def come_too_late(hook: str, name: str) -> Raised:
    side = stepped(hook)
    return raised(lambda: TOO_LATE[name][0](side))


@both
@pytest.mark.parametrize("name", list(TOO_LATE))
def test_what_comes_too_late_says_so(pool: RankPool, hook: str, name: str) -> None:
    """What wants gradients after backward raises, and says what to do instead."""
    for kind, text in pool.run(2, come_too_late, hook, name):
        assert kind == "RuntimeError"
        assert re.search(TOO_LATE[name][1], text), text


READS: list[Callable[[Any], object]] = [
    lambda gradient: gradient + 1,
    lambda gradient: gradient.add_(1.0),
    lambda gradient: gradient.norm(),
    lambda gradient: gradient.tolist(),
    lambda gradient: torch.zeros(gradient.shape).copy_(gradient),
]


def read_gradients(hook: str, setup: Setup) -> tuple[int, set[str]]:
    """Return how many gradients there are after backward, and what reading them comes to."""
    gradients = [p.grad for p in stepped(hook, setup).ddp.parameters() if p.grad is not None]
    assert all(isinstance(gradient, SpentGradient) for gradient in gradients)
    results = {raised(lambda g=g, r=r: r(g))[0] for g in gradients for r in READS}  # type: ignore[misc]
    return len(gradients), results


@both
@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(ddp={"gradient_as_bucket_view": True}),
        Setup(ddp={"static_graph": True}),
        Setup("idle", ddp={"find_unused_parameters": True}),
        Setup(user_hook="own"),
    ],
    ids=["default", "views", "static_graph", "unused", "own hook"],
)
def test_no_gradient_is_left(pool: RankPool, hook: str, setup: Setup) -> None:
    """After backward nobody can take a local gradient for the mean: reading one raises."""
    assert pool.run(2, read_gradients, hook, setup) == [(10, {"RuntimeError"})] * 2


def clear_by_the_model(hook: str, set_to_none: bool) -> bool:
    """Train without zero_grad of the optimizer; return whether that is the plain training."""
    plain, side = Side(Setup(), None), Overlapped(Setup(zero_grad="never"), None, hook)
    for step in range(3):
        batch = torch.randn(3, WIDTH) + dist.get_rank()
        side.ddp.zero_grad(set_to_none)
        side.iterate([batch], step)
        plain.iterate([batch], step)
    pairs = zip(plain.ddp.parameters(), side.ddp.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_model_may_clear_gradients(pool: RankPool, hook: str, set_to_none: bool) -> None:
    """``model.zero_grad()`` is as good as the optimizer's."""
    assert pool.run(2, clear_by_the_model, hook, set_to_none) == [True, True]


def count_step_hooks(hook: str) -> list[str]:
    side, calls = Overlapped(Setup(), None, hook), []
    side.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    side.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(2):
        side.iterate([torch.randn(3, WIDTH)], step)
    return calls


@both
def test_step_hooks_are_called_once_a_step(pool: RankPool, hook: str) -> None:
    """Hooks on the optimizer see every ``step()`` once, however many buckets there are."""
    assert pool.run(2, count_step_hooks, hook) == [["before", "after"] * 2] * 2


# What is refused when the hook is made.


class Parts:
    """A DDP model and its optimizer, some of it wrong."""

    def __init__(self, model: torch.nn.Module | None = None, **zero: Any) -> None:
        self.ddp: Any = DistributedDataParallel(model or torch.nn.Linear(4, 4))
        self.hook: Any = allreduce_hook
        self.arguments = {"overlap_with_ddp": True, "lr": 0.1, **zero}
        self.zero: Any = self.make_zero(self.ddp.parameters())

    def make_zero(self, parameters: Any) -> Any:
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **self.arguments)

    def join(self, hook: str) -> None:
        zero_hook = HOOKS[hook](self.hook, self.ddp, self.zero)
        self.ddp.register_comm_hook(None, zero_hook)


def not_for_overlap(hook: str) -> None:
    Parts(overlap_with_ddp=False).join(hook)


def no_ddp(hook: str) -> None:
    parts = Parts()
    parts.ddp = parts.ddp.module
    parts.join(hook)


def no_hook(hook: str) -> None:
    parts = Parts()
    parts.hook = None
    parts.join(hook)


def torchs_optimizer(hook: str) -> None:
    parts = Parts()
    parts.zero = torch.optim.SGD(parts.ddp.parameters())
    parts.join(hook)


def missing_parameter(hook: str) -> None:
    parts = Parts()
    parts.zero = parts.make_zero([parts.ddp.module.weight])
    parts.join(hook)


def foreign_parameter(hook: str) -> None:
    parts = Parts()
    parts.zero = parts.make_zero([*parts.ddp.parameters(), torch.nn.Parameter(torch.ones(3))])
    parts.join(hook)


def ignored_parameter(hook: str) -> None:
    model = torch.nn.Linear(4, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    Parts(model).join(hook)


def other_ranks(hook: str) -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    Parts(process_group=alone[dist.get_rank()]).join(hook)


def same_model_twice(hook: str) -> None:
    parts = Parts()
    parts.join(hook)
    parts.zero = parts.make_zero(parts.ddp.parameters())
    parts.join(hook)


def same_optimizer_twice(hook: str) -> None:
    parts = Parts()
    parts.join(hook)
    parts.ddp = DistributedDataParallel(parts.ddp.module)
    parts.join(hook)


def sparse_gradients(hook: str) -> None:
    Parts(torch.nn.Embedding(4, 4, sparse=True)).join(hook)


def more_parameters(hook: str) -> None:
    parts = Parts()
    parts.join(hook)
    parts.zero.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


REFUSED: dict[Callable[[str], None], Raised] = {
    not_for_overlap: ("ValueError", "overlap_with_ddp=True"),
    no_ddp: ("TypeError", "ddp must be a DistributedDataParallel module, got Linear"),
    no_hook: ("TypeError", "got None; give allreduce_hook"),
    torchs_optimizer: ("TypeError", "ZeroRedundancyOptimizer, got SGD"),
    missing_parameter: ("ValueError", r"\['bias'\] of 1 are missing.*give it ddp.parameters\(\)"),
    foreign_parameter: ("ValueError", "1 are not DDP's"),
    ignored_parameter: ("ValueError", "1 are not DDP's"),
    other_ranks: ("ValueError", "give both the same process_group"),
    same_model_twice: ("ValueError", "this DDP module has a ZeRO hook already"),
    same_optimizer_twice: ("ValueError", "this optimizer has a ZeRO hook already"),
    sparse_gradients: ("NotAttachable", "sparse=False"),
    more_parameters: ("ValueError", "make the DDP module and this optimizer anew"),
}


def refuse(case: Callable[[str], None], hook: str) -> Raised:
    return raised(lambda: case(hook))


@both
@pytest.mark.parametrize("case", list(REFUSED), ids=lambda case: case.__name__)
def test_what_cannot_work_is_refused(
    pool: RankPool, hook: str, case: Callable[[str], None]
) -> None:
    """What would fail or go wrong silently in backward is refused before it."""
    kind, pattern = REFUSED[case]
    for seen, text in pool.run(2, refuse, case, hook):
        assert seen == kind, text
        assert re.search(pattern, text), text


def step_without_hook() -> Raised:
    parts = Parts()
    parts.ddp(torch.ones(2, 4)).sum().backward()
    return raised(parts.zero.step)


def test_a_hook_that_was_forgotten_is_missed(pool: RankPool) -> None:
    """``step()`` says so where no hook has stepped in backward."""
    for kind, text in pool.run(2, step_without_hook):
        assert kind == "RuntimeError"
        assert "hook_with_zero_step(allreduce_hook, ddp, zero)" in text


# Ranks that have more batches than others.


def train_unevenly(hook: str, setup: Setup) -> bool:
    """Train plain and overlapped with a batch more on every rank; return whether they agree."""
    sides = [Side(setup, None), Overlapped(setup, None, hook)]
    for side in sides:
        noise = torch.Generator().manual_seed(dist.get_rank())
        joined: list[Any] = [side.ddp]
        if isinstance(side.optimizer, ZeroRedundancyOptimizer):
            joined.append(side.optimizer)
        with Join(joined):
            for step in range(3 + dist.get_rank()):
                side.iterate([torch.randn(3, WIDTH, generator=noise)], step)
    pairs = zip(sides[0].ddp.parameters(), sides[1].ddp.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


@both
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_have_more_batches(pool: RankPool, hook: str, world: int) -> None:
    """In a join context a rank without batches goes on to step and to share what it owns."""
    assert pool.run(world, train_unevenly, hook, Setup()) == [True] * world
