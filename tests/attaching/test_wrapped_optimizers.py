"""Optimizers as Accelerate and Lightning hand them out: the one inside is stepped and watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    ZeroOptions,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    post_local_sgd,
    zero,
)
from loosestep.sharding.recognize import unwrap_optimizer
from loosestep.testing import RankPool, run_ranks
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot
from tests.support.wrappers import WRAPPERS, Doubled, LikeAccelerate, LikeLightning

STRATEGIES = {"local": post_local_sgd(2, gradients=None), "gradients": ddp()}


def train(strategy: str, wrapper: str | None) -> tuple[dict[str, torch.Tensor], int]:
    net = make_net()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer = inner if wrapper is None else WRAPPERS[wrapper](inner)
    with attach(net, optimizer, STRATEGIES[strategy]) as run:
        assert run.optimizer is inner
        with pytest.raises(NotAttachable, match="attached already"):
            attach(net, inner, STRATEGIES[strategy])
        for step in range(5):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
        return snapshot(net), run.clock.step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_wrapped_optimizer_is_as_good_as_the_one_inside(pool: RankPool, strategy: str) -> None:
    """The same parameters to the bit, and the same count of steps."""
    expected = pool.run(2, train, strategy, None)
    for wrapper in WRAPPERS:
        for (values, steps), (others, count) in zip(
            pool.run(2, train, strategy, wrapper), expected, strict=True
        ):
            assert equal(values, others), wrapper
            assert steps == count == 5


def by_accelerate(optimizer: torch.optim.Optimizer) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(optimizer)


def by_lightning(optimizer: torch.optim.Optimizer) -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer

    wrapped, module = LightningOptimizer(optimizer), LightningModule()
    # As its trainer does in ``fit``.
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module.trainer = Trainer(accelerator="cpu", devices=1, **quiet)
    module.trainer.strategy._lightning_module = module
    wrapped._strategy = module.trainer.strategy
    return wrapped


REAL: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}


def train_really(framework: str) -> tuple[bool, bool, int]:
    """Return whether it is a wrapper, whether the plain optimizer gives the same, and the steps."""
    WRAPPERS["real"] = REAL[framework]
    wrapped = WRAPPERS["real"](sgd(make_net()))
    (values, steps), (expected, _) = train("local", "real"), train("local", None)
    return unwrap_optimizer(wrapped) is not wrapped, equal(values, expected), steps


@pytest.mark.parametrize("framework", REAL)
def test_what_the_frameworks_hand_out_themselves_is_taken(framework: str) -> None:
    """Where they are installed; those that are only like them stand for them elsewhere."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    assert run_ranks(2, train_really, framework) == [(True, True, 5)] * 2


def accumulate() -> tuple[int, bool]:
    """Call step at all micro-batches, of which Accelerate takes every second one."""
    net = make_net()
    optimizer = LikeAccelerate(sgd(net))
    with attach(net, optimizer, ddp()) as run:
        for number in range(6):
            optimizer.sync_gradients = number % 2 == 1
            loss_of(net, dist.get_rank(), number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.clock.step, all(p.grad is None for p in net.parameters())


def test_micro_batches_do_not_count(pool: RankPool) -> None:
    """What the wrapper does not step is no step."""
    assert pool.run(2, accumulate) == [(3, True)] * 2


def overflow(given: bool) -> list[tuple[int, float, bool]]:
    """Train with a scaler in the wrapper where rank 1 has an infinite gradient at step 1."""
    net = make_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = LikeAccelerate(sgd(net), scaler)
    seen = []
    with attach(net, optimizer, ddp(), scaler=scaler if given else None) as run:
        for step in range(3):
            before = snapshot(net)
            loss = loss_of(net, dist.get_rank(), step)
            if step == 1 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = any(not torch.equal(before[n], p) for n, p in net.named_parameters())
            seen.append((run.clock.step, scaler.get_scale(), moved))
    return seen


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_the_wrappers_scaler_is_used(pool: RankPool, given: bool) -> None:
    """All ranks skip where one has an infinite gradient, and the step counts on all of them."""
    expected = [(1, 4.0, True), (2, 2.0, False), (3, 2.0, True)]
    assert pool.run(2, overflow, given) == [expected] * 2


def refuse_another_scaler() -> str:
    net = make_net()
    optimizer = LikeAccelerate(sgd(net), torch.amp.GradScaler("cpu"))
    with pytest.raises(NotAttachable) as error:
        attach(net, optimizer, ddp(), scaler=torch.amp.GradScaler("cpu"))
    return str(error.value)


def test_another_scaler_than_the_wrappers_is_refused(pool: RankPool) -> None:
    assert "leave scaler away" in pool.run(1, refuse_another_scaler)[0]


# Sharded optimizers


def shard(wrapper: str | None) -> dict[str, torch.Tensor]:
    net = make_net()
    inner = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    optimizer = inner if wrapper is None else WRAPPERS[wrapper](inner)
    with attach(net, optimizer, zero()):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
    return snapshot(net)


def test_a_wrapped_sharded_optimizer_trains_under_attach(pool: RankPool) -> None:
    expected = pool.run(2, shard, None)
    for wrapper in WRAPPERS:
        for values, others in zip(pool.run(2, shard, wrapper), expected, strict=True):
            assert equal(values, others), wrapper


def hook(interleaved: bool, wrapper: str | None) -> dict[str, torch.Tensor]:
    net = DistributedDataParallel(make_net())
    inner = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01
    )
    optimizer = inner if wrapper is None else WRAPPERS[wrapper](inner)
    make: Any = hook_with_zero_step_interleaved if interleaved else hook_with_zero_step
    net.register_comm_hook(None, make(allreduce_hook, net, optimizer))
    for step in range(3):
        loss_of(net, dist.get_rank(), step).backward()
    with pytest.raises(ValueError, match="has a ZeRO hook already"):
        make(allreduce_hook, net, inner)
    return snapshot(net)


@pytest.mark.parametrize("interleaved", [False, True])
def test_zero_hooks_take_a_wrapped_optimizer(pool: RankPool, interleaved: bool) -> None:
    expected = pool.run(2, hook, interleaved, None)
    for wrapper in WRAPPERS:
        for values, others in zip(pool.run(2, hook, interleaved, wrapper), expected, strict=True):
            assert equal(values, others), wrapper


def hook_with_scaler(declared: bool) -> str:
    net, scaler = DistributedDataParallel(make_net()), torch.amp.GradScaler("cpu")
    options = ZeroOptions(scaler=scaler) if declared else ZeroOptions()
    inner = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, overlap_with_ddp=True, zero_options=options, lr=0.1
    )
    try:
        hook_with_zero_step(allreduce_hook, net, LikeAccelerate(inner, scaler))  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "taken"


def test_a_zero_hook_must_know_the_wrappers_scaler(pool: RankPool) -> None:
    """Else it would step gradients that are still scaled."""
    assert pool.run(1, hook_with_scaler, True) == ["taken"]
    assert "ZeroOptions(scaler=scaler)" in pool.run(1, hook_with_scaler, False)[0]


# PostLocalSGDOptimizer


def wrap_twice(wrapper: str) -> tuple[str, int]:
    net = make_net()
    averager = PeriodicModelAverager(2, module=net)
    with pytest.raises(TypeError) as error:
        PostLocalSGDOptimizer(WRAPPERS[wrapper](sgd(net)), averager)
    optimizer = WRAPPERS[wrapper](PostLocalSGDOptimizer(sgd(net), averager))
    for number in range(4):
        if wrapper == "accelerate":
            optimizer.sync_gradients = number % 2 == 1
        loss_of(net, dist.get_rank(), number).backward()
        optimizer.step()
    return str(error.value), averager.step


def test_post_local_sgd_belongs_inside_the_wrapper(pool: RankPool) -> None:
    """Around it, it would count and average at micro-batches that the wrapper does not step."""
    for wrapper, steps in (("accelerate", 2), ("lightning", 4)):
        for said, count in pool.run(2, wrap_twice, wrapper):
            assert "hand that to the framework" in said
            assert count == steps


# The rule


def test_an_optimizer_of_its_own_is_taken_as_it_is() -> None:
    """It has groups and hooks, and its step is not that of the one which it holds."""
    optimizer = Doubled(sgd(make_net()))
    assert unwrap_optimizer(optimizer) is optimizer
    assert unwrap_optimizer(LikeLightning(optimizer)) is optimizer


def without_hooks() -> str:
    net = make_net()
    optimizer: Any = TorchPostLocalSGDOptimizer(sgd(net), torch_averagers.PeriodicModelAverager(2))
    with pytest.raises(TypeError) as error:
        attach(net, optimizer, ddp())
    return str(error.value)


def test_an_optimizer_without_hooks_is_refused(pool: RankPool) -> None:
    """It would never be noticed that it steps."""
    said = pool.run(1, without_hooks)[0]
    assert said == (
        "optimizer must have step hooks, which PostLocalSGDOptimizer has not, because it does not "
        "call Optimizer.__init__; give the torch optimizer whose step() it calls"
    )


@pytest.mark.parametrize("given", ["adam", None, torch.optim.SGD, LikeAccelerate(None)])  # type: ignore[arg-type]
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="optimizer must "):
        unwrap_optimizer(given)
