"""A training by ZeRO's hooks and the plain one beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep.sharding.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from loosestep.sharding.optimizer import ZeroRedundancyOptimizer
from loosestep.sharding.options import ZeroOptions
from tests.support.zero_models import BUCKET_MB, MODELS

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
        "fp16 wrapper": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
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
