"""What happens to buffers and to optimizer state when parameters are averaged, and at the start."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from loosestep.errors import check_whole, choose


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

    def averages(self, sync: int, key: str | None = None) -> bool:
        """Say whether a sync averages the state of that key (None: of any)."""
        return self is OptimizerState.AVERAGE


@dataclass(frozen=True)
class StatePeriods:
    """Which of an optimizer's state is averaged, and at every how manyth sync; the rest is kept.

    >>> StatePeriods((("exp_avg", 3), ("exp_avg_sq", 6))).due(3)
    frozenset({'exp_avg'})
    """

    syncs: tuple[tuple[str, int], ...]  # a key of the optimizer's state, and its period in syncs

    def due(self, sync: int) -> frozenset[str]:
        """Return the keys that are averaged at a sync, counted from 1."""
        return frozenset(key for key, period in self.syncs if sync % period == 0)

    def averages(self, sync: int, key: str | None = None) -> bool:
        """Say whether a sync averages the state of that key (None: of any)."""
        due = self.due(sync)
        return bool(due) if key is None else key in due


def choose_state(
    given: OptimizerState | StatePeriods | Mapping[str, int] | str,
) -> OptimizerState | StatePeriods:
    """Return what becomes of an optimizer's state: by one word, or by a period for each kind."""
    if isinstance(given, StatePeriods):
        return given
    if not isinstance(given, Mapping):
        return choose(OptimizerState, given)
    if not given:
        raise ValueError("optimizer_state must not be empty; give 'keep', or {'exp_avg': 3}")
    for key, period in given.items():
        if not isinstance(key, str) or not key:
            raise TypeError(
                f"optimizer_state must map keys of the optimizer's state to periods, got {key!r}; "
                "give for example {'exp_avg': 3, 'exp_avg_sq': 6}"
            )
        check_whole(f"the period of {key!r}, in syncs", period, 1)
    return StatePeriods(tuple(given.items()))


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
