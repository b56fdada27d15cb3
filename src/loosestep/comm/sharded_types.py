"""DTensors and modules of FSDP, known without loading the parts of torch that make them.

Those take as long to load as the rest of torch. While nobody has loaded them, nothing is of their
types.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

from loosestep.comm.living import living
from loosestep.errors import NotAttachable

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


def is_old_fsdp(value: object) -> bool:
    """Say whether this is a ``FullyShardedDataParallel`` of FSDP1, or a flat parameter of one."""
    names = ("FullyShardedDataParallel", "FlatParameter")
    return any(is_loaded_kind(value, "torch.distributed.fsdp", name) for name in names)


def check_not_old_fsdp(model: torch.nn.Module) -> None:
    """Raise for FSDP1: its shards have one name and shape on all ranks, and are not replicas."""
    parameters = set(model.parameters())
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    around = [] if kind is None else living([kind])  # what is inside may look plain
    if any(map(is_old_fsdp, (*model.modules(), *parameters))) or any(
        not parameters.isdisjoint(module.parameters()) for module in around
    ):
        raise NotAttachable(
            f"this {type(model).__name__} is sharded by FullyShardedDataParallel (FSDP1), whose "
            "flat parameters look alike on all ranks and hold different shards, so that they "
            "would be averaged with each other; shard it with torch.distributed.fsdp.fully_shard "
            "(FSDP2), whose shards are known"
        )


def is_loaded_kind(value: object, module: str, name: str) -> bool:
    """Say whether ``value`` is of a class of a module; false while nobody has loaded it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
