"""What happens to buffers and to optimizer state when parameters are averaged, and at the start."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Buffers(enum.Enum):
    """What a sync does to a module's buffers (BatchNorm statistics and the like)."""

    MEAN = "mean"  # floats are averaged, counters take the largest value
    BROADCAST = "broadcast"  # all take those of the group's first rank
    LOCAL = "local"  # every rank keeps its own


class OptimizerState(enum.Enum):
    """What a sync does to the inner optimizer's state (momentum and the like)."""

    KEEP = "keep"  # every rank keeps its own
    AVERAGE = "average"  # floats are averaged with the parameters, counters take the largest value
    RESET = "reset"  # dropped, so that the optimizer starts afresh


class Initial(enum.Enum):
    """What happens when replicas differ at the start."""

    BROADCAST = "broadcast"  # all take the first rank's parameters and buffers
    REFUSE = "refuse"  # an error that names the first tensor that differs
    IGNORE = "ignore"  # start from different points, on purpose


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a sharded optimizer's gradients are kept until its step."""

    stage: int | None = None  # 1: kept until backward ends; 2: freed on the way; None: what fits

    def __post_init__(self) -> None:
        """Refuse stages that there are not."""
        # The type first: a tensor cannot say whether it is in a tuple, and True is no stage.
        if self.stage is not None and (type(self.stage) is not int or self.stage not in (1, 2)):
            raise ValueError(
                f"stage must be 1 (optimizer state is sharded), 2 (gradients too) or None, got "
                f"{self.stage!r}; to shard parameters as well, use FSDP2"
            )
