"""A sharded optimizer, known without loading its class.

That class is also one of ``torch.distributed.optim``, which takes as long to load as half of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from loosestep.comm.sharded_types import is_loaded_kind

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer


def is_sharded(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Say whether this is an optimizer of ours whose state is divided among ranks."""
    return is_loaded_kind(optimizer, "loosestep.sharding.optimizer", "ZeroRedundancyOptimizer")
