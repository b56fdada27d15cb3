"""The optimizer inside a framework's wrapper.

Accelerate's ``AcceleratedOptimizer``, Lightning's ``LightningOptimizer`` and Fabric's optimizer
pass for a torch optimizer and keep nothing of one: groups, state and step hooks are those of the
optimizer that they hold under ``optimizer``. They call its ``step()`` when a step is due, which is
not at every micro-batch, so it is its hooks that tell a step.

The rule needs none of these frameworks: a wrapper has an optimizer under ``optimizer`` and neither
groups nor step hooks of its own. An optimizer that steps another and has its own (such as
``PostLocalSGDOptimizer``) is taken as it is.
"""

from __future__ import annotations

from typing import Any

import torch

HOOKS = "_optimizer_step_pre_hooks"  # every optimizer has it that called Optimizer.__init__


def is_wrapper(optimizer: object) -> bool:
    """Say whether this only passes for the optimizer that it holds."""
    kept = getattr(optimizer, "__dict__", {})
    if HOOKS in kept or "param_groups" in kept:
        return False
    return isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer)


def unwrap_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer whose step hooks tell a step; raise where there is none.

    >>> class Wrapper:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    >>> inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> unwrap_optimizer(Wrapper(inner)) is inner
    True
    """
    inner: Any = optimizer
    while is_wrapper(inner):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    if HOOKS not in vars(inner):
        raise TypeError(
            f"optimizer must have step hooks, which {type(inner).__name__} has not, because it "
            "does not call Optimizer.__init__; give the torch optimizer whose step() it calls"
        )
    return inner


def scaler_of(optimizer: object) -> torch.amp.GradScaler | None:
    """Return the GradScaler by which a wrapper steps its optimizer, if it has one."""
    scaler = getattr(optimizer, "scaler", None) if is_wrapper(optimizer) else None
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None
