"""What an optimizer is: sharded, inside a framework's wrapper, or stepped for its state only.

A sharded one is known without loading its class, which is also one of ``torch.distributed.optim``
and takes as long to load as half of torch.

Accelerate's ``AcceleratedOptimizer``, Lightning's ``LightningOptimizer`` and Fabric's optimizer
pass for a torch optimizer and keep nothing of one: groups, state and step hooks are those of the
optimizer that they hold under ``optimizer``. They call its ``step()`` when a step is due, which is
not at every micro-batch, so it is its hooks that tell a step. The rule needs none of these
frameworks: a wrapper has an optimizer under ``optimizer`` and neither groups nor step hooks of its
own. An optimizer that steps another and has its own (such as ``PostLocalSGDOptimizer``) is taken as
it is.

``torch.distributed.checkpoint`` needs the state to be there when it saves or loads, and makes it
by ``step(closure=None)`` with gradients and learning rates of zero. Nobody trained: such a step
must neither count nor average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from loosestep.comm.sharded_types import is_dtensor, is_loaded_kind
from loosestep.sharding.stand_in import GradientStandIn

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer

HOOKS = "_optimizer_step_pre_hooks"  # every optimizer has it that called Optimizer.__init__


def is_sharded(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Say whether this is an optimizer of ours whose state is divided among ranks."""
    return is_loaded_kind(optimizer, "loosestep.sharding.optimizer", "ZeroRedundancyOptimizer")


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


def only_creates_state(optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Say whether ``step(**kwargs)`` can change nothing but the optimizer's empty state.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.zeros(2)
    >>> only_creates_state(torch.optim.SGD([weight], lr=0.0), {"closure": None})
    True
    >>> only_creates_state(torch.optim.SGD([weight], lr=0.1), {"closure": None})
    False
    """
    # By name, though None is the default: nobody else calls it so, not even with a rate of zero.
    if kwargs != {"closure": None} or optimizer.state:
        return False
    groups = optimizer.param_groups
    if any(group.get("lr", 0.0) != 0.0 for group in groups):
        return False
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    return all(p.grad is not None and _is_zero(p.grad) for p in parameters)


def _is_zero(gradient: torch.Tensor) -> bool:
    if isinstance(gradient, GradientStandIn):  # left by a backward, so somebody trains
        return False
    # A DTensor's own any() would be a collective.
    local = gradient.to_local() if is_dtensor(gradient) else gradient
    return not bool(local.any())
