"""One training of the benchmark ``family``: a contender, a seed and a learning rate, on real ranks.

A transformer over bytes learns the sources of Python's standard library. Which windows of the text
a worker sees follows from seed, step and rank alone, so all contenders see the same ones; and every
worker is a host of its own, so what it sends is what a network would carry.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from loosestep import (
    Strategy,
    attach,
    ddp,
    diloco,
    muloco,
    post_local_sgd,
    slowmo,
    snoo,
    sparseloco,
    streaming_diloco,
)
from loosestep.errors import NotFinite
from loosestep.lab.trainer.text import Text, read_text
from loosestep.lab.trainer.transformer import Shape
from loosestep.reducers import ErrorFeedback, Int2, Int4, TwoLevel

WORKERS, SHORT, LONG = 4, 30, 100  # steps between syncs
FRAGMENTS = 5  # of a streaming contender: a turn every sixth step
SHAPE = Shape(context=64, width=128, depth=5, heads=4)
BATCH = 8  # windows a worker and step
WARMUP_STEPS, FLOOR = 100, 0.1  # of the inner learning rate: a cosine falls to that share of it
WEIGHT_DECAY, CLIP = 0.1, 1.0
HELD_OUT_WINDOWS, EVAL_BATCH = 2048, 32

Optimizers = Sequence[torch.optim.Optimizer]  # in the order of their steps; the last is attached


def adamw(model: torch.nn.Module, rate: float) -> Optimizers:
    """Step everything by AdamW."""
    return [_adamw(list(model.parameters()), rate)]


def muon(model: torch.nn.Module, rate: float) -> Optimizers:
    """Step the matrices inside layers by Muon, as far as AdamW would, and the rest by AdamW."""
    named = dict(model.named_parameters())
    inside = {name for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")}
    matrices = [named[name] for name in named if name in inside]
    rest = [named[name] for name in named if name not in inside]
    as_far = torch.optim.Muon(
        matrices, lr=rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [_adamw(rest, rate), as_far]


def _adamw(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=WEIGHT_DECAY, fused=True)


@dataclass(frozen=True)
class Contender:
    """A strategy, what steps inside it, and on how many workers."""

    family: str  # whose learning rate it has
    strategy: Strategy
    inside: Callable[[torch.nn.Module, float], Optimizers] = adamw
    workers: int = WORKERS


@functools.cache
def contenders() -> dict[str, Contender]:
    """Return all of them by name. Outer rates are those of the recipes."""
    int4, int2 = TwoLevel(Int4()), TwoLevel(ErrorFeedback(Int2()))
    streaming = streaming_diloco(SHORT, FRAGMENTS)
    found = {
        "DDP": Contender("gradients", ddp()),
        f"local SGD, H={SHORT}": Contender("averaging", post_local_sgd(SHORT, gradients=None)),
        f"local SGD, H={LONG}": Contender("averaging", post_local_sgd(LONG, gradients=None)),
        f"SlowMo, H={SHORT}": Contender("outer", slowmo(SHORT)),
        f"SlowMo, H={LONG}": Contender("outer", slowmo(LONG)),
        f"DiLoCo, H={SHORT}": Contender("outer", diloco(SHORT)),
        f"DiLoCo, H={LONG}": Contender("outer", diloco(LONG)),
        "streaming": Contender("outer", streaming),
        "streaming, 4 bits": Contender("outer", replace(streaming, reducer=int4)),
        "SparseLoCo": Contender("outer", sparseloco(SHORT)),
        "DiLoCo, 2 bits": Contender("outer", diloco(SHORT, reducer=int2)),
        "MuLoCo, 2 bits": Contender("muon", muloco(SHORT), muon),
        "one worker": Contender("one worker", ddp(), workers=1),
        "SNOO, one worker": Contender("one worker", snoo(SHORT), workers=1),
    }
    return {name: replace(one, strategy=apart(one.strategy)) for name, one in found.items()}


def apart(strategy: Strategy) -> Strategy:
    """Let every worker be a host of its own, and send no buffers: the model's never change."""
    reducer = strategy.reducer
    inner = reducer.inner if isinstance(reducer, TwoLevel) else reducer
    return replace(strategy, reducer=inner, buffers="local")


@dataclass(frozen=True)
class Outcome:
    """What one rank says of a training."""

    loss: float  # of its share of the held-out windows, all shares being equal; infinite: diverged
    bytes_sent: int  # for gradients and parameters, without the few that ranks agree by


def text() -> Text:
    """Return the standard library's sources."""
    return read_text([], None, SHAPE)


def settings() -> dict[str, Any]:
    """Return on what all losses depend, beside contender, seed, learning rate and steps."""
    return {
        "model": asdict(SHAPE),
        "text": text().describe(),
        "workers": WORKERS,
        "windows a worker and step": BATCH,
        "warm-up": WARMUP_STEPS,
        "floor": FLOOR,
        "weight decay": WEIGHT_DECAY,
        "clip": CLIP,
        "held-out windows": HELD_OUT_WINDOWS,
        "torch": torch.__version__,
    }


def train(name: str, seed: int, rate: float, steps: int) -> Outcome:
    """Train on this rank, with the others, and judge the model that all end with."""
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"  # what goes through memory is not counted as sent
    contender, data = contenders()[name], text()
    torch.manual_seed(seed)
    model = data.make_model()
    optimizers = contender.inside(model, rate)
    course = [LambdaLR(each, lambda step: share_of_rate(step, steps)) for each in optimizers]
    order = torch.randperm(data.num_samples, generator=torch.Generator().manual_seed(seed))
    with attach(model, optimizers[-1], contender.strategy) as run:
        try:
            for step in range(steps):
                model.zero_grad()
                data.loss(model, data.batch(numbers(order, step))).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                for optimizer in optimizers:
                    optimizer.step()
                for schedule in course:
                    schedule.step()
            run.finalize()
        except NotFinite:
            return Outcome(math.inf, 0)
        sent = sum(level["bytes_sent"] for level in run.metrics().values())
    return Outcome(judged(model, data), sent)


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the learning rate that a step takes.

    >>> share_of_rate(49, 1000), share_of_rate(1000, 1000)
    (0.5, 0.1)
    """
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress))


def numbers(order: torch.Tensor, step: int) -> torch.Tensor:
    """Return the windows of this rank at a step, the same ones however many workers there are."""
    at = (step * WORKERS + dist.get_rank()) * BATCH
    return order[at : at + BATCH]


@torch.no_grad()
def judged(model: torch.nn.Module, data: Text) -> float:
    """Return the loss on this rank's share of windows that are spread over all held-out text."""
    chosen = torch.arange(HELD_OUT_WINDOWS) * data.num_held_out // HELD_OUT_WINDOWS
    mine = chosen[dist.get_rank() :: dist.get_world_size()].reshape(-1, EVAL_BATCH)
    loss = sum(float(data.loss(model, data.held_out(batch))) for batch in mine) / len(mine)
    return loss if math.isfinite(loss) else math.inf
