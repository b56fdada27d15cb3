"""A sharded step inside DDP's backward is the plain optimizer's step, after every iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep.hooks.zero import hook_with_zero_step, hook_with_zero_step_interleaved
from loosestep.optim.zero import ZeroRedundancyOptimizer
from loosestep.optim.zero_options import ZeroOptions
from loosestep.testing import RankPool
from tests.zero_models import BUCKET_MB, MODELS, WIDTH

HOOKS: dict[str, Callable[..., Any]] = {
    "last": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}
both = pytest.mark.parametrize("hook", list(HOOKS))
NUM_STEPS = 5


class Normalised(optim.Optimizer):
    """A user's own: every parameter moves by a step of the same length."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = parameter.grad.norm() + 1e-12
                    parameter.add_(parameter.grad / norm, alpha=-group["lr"])


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "fused AdamW": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2}),
    "Muon": (optim.Muon, {"lr": 1e-2}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "own": (Normalised, {"lr": 1e-2}),
}


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    model: str = "layers"
    optimizer: str = "fused AdamW"
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: dict[str, Any] = field(default_factory=dict)  # its further arguments
    group_lrs: tuple[float, ...] = ()  # one parameter group for each
    zero_grad: str = "None"  # or "zeros" or "never": what comes before every iteration
    calls_step: bool = True
    micro_batches: int = 1  # all but the last one in no_sync()
    clip_norm: float | None = None
    scaled: bool = False  # by a GradScaler; rank 1's loss is infinite at step 2
    one_cycle: bool = False  # learning rate and momentum follow OneCycleLR
    user_hook: str = "allreduce"
    min_buckets: int = 3


class Side:
    """One of two trainings that must not differ."""

    def __init__(self, setup: Setup, group: Any) -> None:
        torch.manual_seed(1)
        self.setup = setup
        self.model = MODELS[setup.model]()
        options = {"bucket_cap_mb": BUCKET_MB, **setup.ddp}
        self.ddp = DistributedDataParallel(self.model, process_group=group, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=setup.scaled)
        self.optimizer: optim.Optimizer = self.make_optimizer(group)
        if setup.one_cycle:
            self.scheduler = optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, NUM_STEPS + 1)

    def make_optimizer(self, group: Any) -> optim.Optimizer:
        cls, arguments = OPTIMIZERS[self.setup.optimizer]
        state, user_hook = hook_of(self.setup.user_hook, group)
        if self.setup.user_hook != "allreduce":
            self.ddp.register_comm_hook(state, user_hook)
        return cls(self.groups(), **arguments)

    def groups(self) -> Any:
        parameters = list(self.ddp.parameters())
        lrs = self.setup.group_lrs
        if not lrs:
            return parameters
        return [{"params": parameters[i :: len(lrs)], "lr": lr} for i, lr in enumerate(lrs)]

    def iterate(self, batches: list[torch.Tensor], step: int) -> None:
        self.model.step = step  # type: ignore[assignment]
        self.clear()
        for batch in batches[:-1]:
            with self.ddp.no_sync():
                self.backward(batch)
        self.backward(batches[-1])
        self.after_backward()
        if self.setup.one_cycle:
            self.scheduler.step()

    def backward(self, batch: torch.Tensor) -> None:
        self.scaler.scale(self.ddp(batch).pow(2).sum()).backward()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def after_backward(self) -> None:
        if self.setup.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), self.setup.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Overlapped(Side):
    """The one that steps inside backward."""

    def __init__(self, setup: Setup, group: Any, hook: str) -> None:
        self.kind = hook
        super().__init__(setup, group)

    def make_optimizer(self, group: Any) -> optim.Optimizer:
        cls, arguments = OPTIMIZERS[self.setup.optimizer]
        options = ZeroOptions(clip_norm=self.setup.clip_norm, scaler=self.scaler)
        zero = ZeroRedundancyOptimizer(
            self.groups(),
            cls,
            process_group=group,
            overlap_with_ddp=True,
            zero_options=options,
            **arguments,
        )
        state, user_hook = hook_of(self.setup.user_hook, group)
        zero_hook = HOOKS[self.kind](user_hook, self.ddp, zero, **self.setup.hook)
        self.ddp.register_comm_hook(state, zero_hook)
        return zero

    def clear(self) -> None:
        if self.setup.zero_grad != "never":
            self.optimizer.zero_grad(set_to_none=self.setup.zero_grad == "None")

    def after_backward(self) -> None:
        if self.setup.calls_step:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def hook_of(name: str, group: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the function of a user's hook."""
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook
    functions = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": narrow,
        "own": halve,
    }
    return group, functions[name]


def narrow(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Share gradients in 16 bits; under its own name DDP refuses this hook with Gloo."""
    return default_hooks.bf16_compress_hook(state, bucket)


def halve(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Share gradients that count half, in a tensor of their own."""
    work = dist.all_reduce(bucket.buffer() / 2, group=state, async_op=True)
    assert work is not None
    future: Any = work.get_future()
    return future.then(lambda done: done.value()[0])


for function in (narrow, halve):  # DDP wants the classes, and finds strings here
    function.__annotations__["bucket"] = GradBucket
    function.__annotations__["return"] = torch.futures.Future[torch.Tensor]


def compare(hook: str, setup: Setup, group: Any = None) -> list[tuple[bool, bool]]:
    """Train both ways; return after every iteration whether they are equal, and close."""
    plain, overlapped = Side(setup, group), Overlapped(setup, group, hook)
    noise = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(NUM_STEPS):
        shape = (setup.micro_batches, 3, WIDTH)
        batches = list(torch.randn(shape, generator=noise))
        if setup.scaled and step == 2 and dist.get_rank() == 1:
            batches[-1] *= torch.inf
        plain.iterate(batches, step)
        overlapped.iterate(batches, step)
        pairs = list(zip(plain.ddp.parameters(), overlapped.ddp.parameters(), strict=True))
        close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs]
        seen.append((all(torch.equal(a, b) for a, b in pairs), all(close)))
    scale = 2.0**15 if setup.scaled else 1.0  # half of what it was: one step was skipped
    assert plain.scaler.get_scale() == overlapped.scaler.get_scale() == scale
    facts: Any = overlapped.ddp._get_ddp_logging_data()
    sizes = facts.get("rebuilt_bucket_sizes", facts["bucket_sizes"])  # no rebuilding: no such key
    assert len(sizes.split(",")) >= setup.min_buckets, sizes
    return seen


def check(pool: RankPool, world: int, hook: str, setup: Setup) -> None:
    """Require equal parameters on two ranks; on more, sums are rounded in another order."""
    for seen in pool.run(world, compare, hook, setup):
        print(seen)
        exact = world <= 2 and setup.clip_norm is None  # a norm is a sum too
        assert all(equal if exact else close for equal, close in seen), seen
        assert len(seen) == NUM_STEPS


UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
VARIANTS = {
    "default": Setup(),
    "gradient_as_bucket_view": Setup(ddp=VIEWS),
    "static_graph": Setup(ddp={"static_graph": True}),
    "static_graph, one idle": Setup("idle", ddp={"static_graph": True}),
    "find_unused_parameters": Setup("experts", ddp=UNUSED),
    "find_unused_parameters, views": Setup("experts", ddp=UNUSED | VIEWS),
    "find_unused_parameters, one idle": Setup("idle", ddp=UNUSED),
    "no_sync": Setup(micro_batches=3),
    "no_sync, views": Setup(ddp=VIEWS, micro_batches=3),
    "no_sync, unused": Setup("experts", ddp=UNUSED, micro_batches=3),
    "shard_buckets": Setup(hook={"shard_buckets": True}),
    "step() left out": Setup(calls_step=False),
    "zeroed gradients": Setup(zero_grad="zeros"),
    "no zero_grad": Setup(zero_grad="never", calls_step=False),
    "two groups": Setup(group_lrs=(1e-2, 3e-3)),
    "two dtypes": Setup("two dtypes"),
    "recomputed": Setup("recomputed"),
    "recomputed, reentrant": Setup("reentrant", ddp={"static_graph": True}),
    "tied": Setup("tied"),
    "compiled": Setup("compiled", ddp={"bucket_cap_mb": 25}, min_buckets=1),
    "images": Setup("images", ddp={"bucket_cap_mb": 0.0005}),
    "150 buckets": Setup("many", ddp={"bucket_cap_mb": 1e-4}),
    "OneCycleLR": Setup(one_cycle=True),
    "scaler": Setup(scaled=True),
    "scaler, SGD": Setup(scaled=True, optimizer="SGD"),
    "clipping": Setup(clip_norm=0.05),
    "clipping, unused": Setup("experts", ddp=UNUSED, clip_norm=0.05),
    "clipping, scaler": Setup(scaled=True, clip_norm=0.05),
}


@both
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_equals_the_plain_optimizer(pool: RankPool, hook: str, variant: str) -> None:
    """Parameters are those of DDP and a plain optimizer to the bit, from the first step on."""
    check(pool, 2, hook, VARIANTS[variant])


@both
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize(
    "variant",
    ["default", "find_unused_parameters", "static_graph", "no_sync, unused", "two dtypes"],
)
def test_any_number_of_ranks(pool: RankPool, hook: str, world: int, variant: str) -> None:
    """One rank, three and four train as with the plain optimizer."""
    check(pool, world, hook, VARIANTS[variant])


@both
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_any_optimizer(pool: RankPool, hook: str, optimizer: str) -> None:
    """Any optimizer class can be stepped inside backward, a user's own included."""
    check(pool, 2, hook, Setup("matrices", optimizer))


@both
@pytest.mark.parametrize("user_hook", ["fp16", "bf16", "own"])
@pytest.mark.parametrize("variant", ["default", "find_unused_parameters", "no_sync"])
def test_a_hook_of_the_users(pool: RankPool, hook: str, user_hook: str, variant: str) -> None:
    """Gradients are those of the hook that was given, whatever it does to them."""
    check(pool, 2, hook, replace(VARIANTS[variant], user_hook=user_hook))


@both
@pytest.mark.parametrize("variant", ["default", "no_sync"])
def test_power_sgd(pool: RankPool, hook: str, variant: str) -> None:
    """So are those of PowerSGD, which with Gloo can have one bucket only: by itself it hangs."""
    one_bucket = replace(VARIANTS[variant], ddp={"bucket_cap_mb": 25}, min_buckets=1)
    check(pool, 2, hook, replace(one_bucket, user_hook="powerSGD"))


def compare_in_subgroup(hook: str) -> list[tuple[bool, bool]]:
    group = dist.new_group([2, 3])
    return compare(hook, Setup(), group) if dist.get_rank() >= 2 else []


@both
def test_a_subgroup_trains_alone(pool: RankPool, hook: str) -> None:
    """Two of four ranks, which are not the first ones, train as with the plain optimizer."""
    seen = pool.run(4, compare_in_subgroup, hook)
    assert seen == [[], [], [(True, True)] * NUM_STEPS, [(True, True)] * NUM_STEPS]
