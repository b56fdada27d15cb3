"""Optimizers in the shape of those of Accelerate and Lightning, and one that is no wrapper.

They have the attributes that count: what is in ``__dict__``, what is forwarded, who steps whom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LikeAccelerate(torch.optim.Optimizer):
    """Forwards groups, state and defaults, has no hooks of its own, and may leave a step out."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.sync_gradients = True

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
        else:
            self.scaler.step(self.optimizer, closure)
            self.scaler.update()


class LikeLightning:
    """Takes on the class of the optimizer, forwards all else, and steps it by a closure."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Lightning{kind.__name__}", (type(self), kind), {})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step(closure=closure or (lambda: None))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Doubled(torch.optim.Optimizer):
    """An optimizer of its own that steps another one twice, which it holds under ``optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.optimizer.step()


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "accelerate": LikeAccelerate,
    "lightning": LikeLightning,
    "both": lambda optimizer: LikeAccelerate(LikeLightning(optimizer)),  # type: ignore[arg-type]
}
