"""DTensors and FSDP2 modules, known without loading the parts of torch that make them.

Those take as long to load as the rest of torch. While nobody has loaded them, nothing is of their
types.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Say whether this is a tensor that is spread over a mesh."""
    # Nearly all tensors are plain: for those a sync cannot afford more than this.
    if type(value) in _PLAIN:
        return False
    return is_loaded_kind(value, "torch.distributed.tensor", "DTensor")


def is_fsdp(value: object) -> TypeGuard[FSDPModule]:
    """Say whether this is a module that ``fully_shard`` was called with."""
    return is_loaded_kind(value, "torch.distributed.fsdp", "FSDPModule")


def is_loaded_kind(value: object, module: str, name: str) -> bool:
    """Say whether ``value`` is of a class of a module; false while nobody has loaded it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
