"""The training loop of one worker, and everything around it that is decided there."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from loosestep.lab.trainer.by_strategy import OptimizerPlan, Sharing
from loosestep.lab.trainer.journal import Journal
from loosestep.lab.trainer.settings import Settings
from loosestep.lab.trainer.stopping import Stopping
from loosestep.lab.trainer.tasks import Feed, Order, Task


@dataclass
class Worker:
    """What one worker trains with."""

    settings: Settings
    task: Task
    sharing: Sharing
    journal: Journal
    stopping: Stopping
    feed: Feed
    layout: str = ""  # which workers are on which host
    num_steps: int | None = None  # as ``plan`` says
    step: int = 0  # finished
    saved_step: int = -1  # of the last checkpoint
    warm_samples: int = 0  # that were used while the learning rate grew

    @property
    def tokens(self) -> int:
        """What all workers have seen together."""
        return self.feed.position * self.task.units_per_sample

    @property
    def samples_per_step(self) -> int:
        """What all workers use in a step."""
        return self.feed.together * self.settings.accumulate

    def plan(self) -> None:
        """Decide how many steps there are; those before may have been of more or fewer workers."""
        per_step = self.samples_per_step * self.task.units_per_sample
        self.num_steps = self.settings.num_steps(per_step, self.step, self.tokens)

    def train_step(self) -> float:
        """Take one optimizer step; return this worker's loss."""
        settings, sharing = self.settings, self.sharing
        self.journal.step_begins()
        if self.step <= settings.lr_warmup:
            self.warm_samples = self.feed.position
        set_rate(sharing.optimizer, self.rate())
        sharing.optimizer.zero_grad()
        losses = []
        for micro in range(settings.accumulate):
            last = micro == settings.accumulate - 1
            with nullcontext() if last else sharing.no_sync():
                losses.append(self._backward())
        sharing.after_backward()
        if settings.clip:
            sharing.clip(settings.clip)
        sharing.optimizer.step()
        sharing.after_step()
        self.step += 1
        self.journal.step_ends(self.step)
        return float(torch.stack(losses).mean())

    def _backward(self) -> torch.Tensor:
        batch = self.task.batch(self.feed.next())
        with self.precision():
            loss = self.task.loss(self.sharing.model, batch)
        torch.autograd.backward(loss / self.settings.accumulate)
        return loss.detach()

    def precision(self) -> AbstractContextManager[Any]:
        """Return what the forward pass runs in."""
        enabled = self.settings.bf16
        return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()

    def rate(self) -> float:
        """Return the learning rate of this step.

        The cosine of a number of tokens is one of samples: it goes on as it was where a run is
        resumed by other workers, whose steps are larger or smaller.
        """
        settings, at, end = self.settings, self.step, self.num_steps
        warm = settings.lr_warmup
        if settings.tokens is not None and end is not None and at >= warm:
            end = self.feed.position + (end - at) * self.samples_per_step
            at, warm = self.feed.position, self.warm_samples
        return settings.lr * rate_factor(at, end, warm, settings.lr_floor)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of the average of all workers on held-out data; all call it."""
        model = self.sharing.model
        rank, size = dist.get_rank(), dist.get_world_size()
        model.eval()
        with self.sharing.averaged(), self.precision():
            total = torch.zeros(2, dtype=torch.float64)
            for number in range(rank, self.settings.eval_batches, size):
                numbers = held_out_numbers(number, self.settings.batch, self.task.num_held_out)
                total[0] += self.task.loss(inner(model), self.task.held_out(numbers)).double()
                total[1] += 1
        model.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return what DDP wraps: its forward would share buffers."""
    wrapped = getattr(model, "module", model)
    assert isinstance(wrapped, torch.nn.Module)
    return wrapped


def held_out_numbers(number: int, batch: int, num_held_out: int) -> torch.Tensor:
    """Return the samples of one batch of held-out data, spread over all of it.

    >>> held_out_numbers(0, 2, 10).tolist(), held_out_numbers(1, 2, 10).tolist()
    ([0, 7], [4, 1])
    """
    places = torch.arange(number * batch, (number + 1) * batch)
    return places * step_of(num_held_out) % num_held_out


def step_of(size: int) -> int:
    """Return a step that visits all of ``size`` places before it comes back.

    >>> step_of(10)
    7
    """
    return next(s for s in range(max(1, int(size * 0.618)), size + 2) if math.gcd(s, size) == 1)


def rate_factor(step: int, num_steps: int | None, warmup: int, floor: float) -> float:
    """Return the share of the highest rate: a line up, then a cosine down to ``floor``.

    >>> [round(rate_factor(step, 12, 2, 0.0), 2) for step in (0, 1, 2, 7, 12)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    if num_steps is None or num_steps <= warmup:  # the end is not known
        return 1.0
    done = min(1.0, (step - warmup) / (num_steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def plan_optimizer(model: torch.nn.Module, settings: Settings) -> OptimizerPlan:
    """Return AdamW, which decays matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"lr": settings.lr, "betas": (0.9, 0.95), "fused": True}
    return OptimizerPlan(torch.optim.AdamW, [g for g in groups if g["params"]], options)


def make_feed(task: Task, settings: Settings, rank: int, num_workers: int) -> Feed:
    """Return a worker's batches."""
    order = Order(task.num_samples, settings.seed)
    return Feed(order, rank=rank, num_workers=num_workers, batch=settings.batch)
