"""An outer optimizer: what a sync does with the mean once it is there.

    pseudo-gradient = anchor - mean          what all replicas have moved by, as a gradient
    anchor          = outer step of anchor   by any ``torch.optim.Optimizer``
    parameters      = anchor

The anchor is where replicas stood after the last sync. Without an outer rule parameters take the
mean: local SGD is the null case. DiLoCo, https://arxiv.org/abs/2311.08105; SlowMo,
https://arxiv.org/abs/1910.00643.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class Outer:
    """An outer optimizer: a ``torch.optim`` class, its arguments, and a schedule of its rate.

    ``scheduler`` is a class of ``torch.optim.lr_scheduler`` in a ``functools.partial`` with its
    arguments; it counts syncs. ``device`` is where the anchor and the optimizer's state live; None:
    where the parameters are. A value: comparable, printable, and used for any number of models.

    >>> Outer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    Outer(SGD, lr=0.7, momentum=0.9, nesterov=True)
    """

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        *,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        self.optimizer, self.options = optimizer, options
        self.scheduler = scheduler
        self.device = _checked_device(device)
        _check(self)

    def __repr__(self) -> str:
        told = [self.optimizer.__name__, *(f"{name}={v!r}" for name, v in self.options.items())]
        if self.scheduler is not None:
            told.append(f"scheduler={self.scheduler!r}")
        if self.device is not None:
            told.append(f"device={str(self.device)!r}")
        return f"Outer({', '.join(told)})"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Outer) and self.optimizer is other.optimizer
        return same and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{self} is a value; make another one with another {name}")
        super().__setattr__(name, value)

    def make(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of some anchors."""
        return self.optimizer(parameters, **self.options)


def nesterov(lr: float = 0.7, momentum: float = 0.9, **more: Any) -> Outer:
    """Return the outer optimizer that DiLoCo found best: SGD with Nesterov momentum.

    >>> nesterov()
    Outer(SGD, lr=0.7, momentum=0.9, nesterov=True)
    """
    return Outer(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0, **more)


def slowmo(lr: float = 1.0, momentum: float = 0.5, **more: Any) -> Outer:
    """Return slow momentum: heavy-ball SGD on the pseudo-gradient.

    The paper divides by the inner learning rate and multiplies by it again, so that momentum
    shrinks with it; while that rate is constant the two are the same.

    >>> slowmo()
    Outer(SGD, lr=1.0, momentum=0.5)
    """
    return Outer(torch.optim.SGD, lr=lr, momentum=momentum, **more)


def check_outer(outer: object, levels: Collection[str]) -> None:
    """Raise for what is no outer optimizer, or is one of levels that do not average."""
    if outer is not None and not levels:
        raise ValueError(
            f"{outer} steps from the mean of replicas, and this schedule averages none; give one "
            "such as every(100)"
        )
    if outer is None or isinstance(outer, Outer):
        return
    if not isinstance(outer, Mapping):
        raise TypeError(
            f"outer must be one such as nesterov(), or one by level, got {outer!r}; for the plain "
            "mean leave it away"
        )
    for level, rule in outer.items():
        if not isinstance(rule, Outer):
            raise TypeError(f"the outer of {level!r} must be one such as nesterov(), got {rule!r}")
        if level not in levels:
            raise ValueError(
                f"outer names the level {level!r}, on which the schedule averages nothing; it "
                f"averages over {sorted(levels)}"
            )


def _check(rule: Outer) -> None:
    """Raise for what is no optimizer, or none that can step a few parameters at a time."""
    if not (isinstance(rule.optimizer, type) and issubclass(rule.optimizer, torch.optim.Optimizer)):
        raise TypeError(
            f"an outer optimizer must be a class such as torch.optim.SGD, got {rule.optimizer!r}; "
            "its arguments go beside it: Outer(torch.optim.SGD, lr=0.7)"
        )
    closure = inspect.signature(rule.optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{rule.optimizer.__name__} needs a closure that evaluates the loss, and a sync has "
            "none; use an optimizer that steps by gradients, such as torch.optim.SGD"
        )
    try:
        together, apart = (_stepped(rule, chunks) for chunks in ([2], [1, 1]))
    except (RuntimeError, OverflowError) as error:  # what else torch says of its own arguments
        raise ValueError(f"{rule} cannot be made or cannot step: {error}") from None
    if not together.isfinite().all():
        raise ValueError(
            f"{rule} makes infinities or NaN of small numbers; give a finite rate such as lr=0.7"
        )
    if not torch.equal(together, apart):
        raise ValueError(
            f"{rule} keeps state that all parameters share, and is stepped a few tensors at a "
            "time; use an optimizer that keeps its state by parameter, as those of torch.optim do"
        )


def _checked_device(device: object) -> torch.device | None:
    if device is None or isinstance(device, torch.device):
        return device
    with contextlib.suppress(RuntimeError):
        if isinstance(device, str):
            return torch.device(device)
    raise ValueError(
        f"device must be one such as 'cpu' or 'cuda:0', or None for the parameters' own, got "
        f"{device!r}"
    )


def _stepped(rule: Outer, chunks: Sequence[int]) -> torch.Tensor:
    """Return what two steps make of two small parameters that are stepped together or in turn."""
    parameters = [torch.full((2, 2), float(i + 1)) for i in range(2)]
    optimizer = rule.make(parameters)
    if rule.scheduler is not None:
        scheduler = rule.scheduler(optimizer)
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"scheduler must make one of torch.optim.lr_scheduler from an optimizer, got "
                f"{type(scheduler).__name__}; give partial(LinearLR, total_iters=100)"
            )
    for _ in range(2):
        first = 0
        for size in chunks:
            for parameter in parameters[first : first + size]:
                parameter.grad = parameter / 4
            optimizer.param_groups[0]["params"] = parameters[first : first + size]
            optimizer.step()
            first += size
    return torch.stack(parameters)
