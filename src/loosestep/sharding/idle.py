"""Telling a step that trains from one that only creates an optimizer's state.

``torch.distributed.checkpoint`` needs the state to be there when it saves or loads, and makes it
by ``step(closure=None)`` with gradients and learning rates of zero. Nobody trained: such a step
must neither count nor average.
"""

from collections.abc import Mapping
from typing import Any

import torch

from loosestep.comm.sharded_types import is_dtensor
from loosestep.sharding.stand_in import GradientStandIn


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
