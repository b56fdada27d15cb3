"""What PyTorch itself has, as contenders before there are workers: torch is imported by those.

torch-ddp
torch-post-local:period=8,warmup_steps=0
torch-hierarchical:host=4,world=8
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager


class Plan:
    """The level that shares gradients, and when others average; ``in_tree`` carries it out."""

    gradients = "world"
    warmup_steps = 0

    def due(self, step: int) -> str | None:
        """Return the level that averages after so many steps, counted from 0."""
        return None

    def averager(self, size_of: Callable[[str], int]) -> ModelAverager | None:
        """Return PyTorch's averager, where levels have so many ranks; None: nothing is averaged."""
        return None


class PlainDDP(Plan):
    """DistributedDataParallel as it is."""


class PostLocal(Plan):
    """In-host gradients after a warm-up, and a PeriodicModelAverager."""

    def __init__(self, period: int = 4, warmup_steps: int = 0, gradients: str = "host") -> None:
        self.period, self.warmup_steps, self.gradients = period, warmup_steps, gradients
        if period < 1 or warmup_steps < 0:
            raise ValueError(f"period must be at least 1, warmup 0, got {period}, {warmup_steps}")

    def due(self, step: int) -> str | None:
        """Follow the averager."""
        since = step - self.warmup_steps
        return "world" if since >= 0 and since % self.period == 0 else None

    def averager(self, size_of: Callable[[str], int]) -> ModelAverager:
        """Return the one that averages over the world."""
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        return PeriodicModelAverager(self.period, self.warmup_steps)


class Hierarchical(Plan):
    """In-host gradients, and a HierarchicalModelAverager."""

    def __init__(self, periods: Mapping[str, int], gradients: str = "host") -> None:
        self.periods, self.gradients = dict(periods), gradients
        found = list(self.periods.values())
        if list(self.periods)[-1] != "world" or found != sorted({*found, 1})[-len(found) :]:
            raise ValueError("periods must grow up to that of world, as in host=4,world=8")

    def due(self, step: int) -> str | None:
        """Follow the averager: the widest level that is due."""
        due = [level for level, period in self.periods.items() if step % period == 0]
        return due[-1] if due else None

    def averager(self, size_of: Callable[[str], int]) -> ModelAverager:
        """Return the one that averages over levels."""
        from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
            HierarchicalModelAverager,
        )

        sizes = OrderedDict((period, size_of(level)) for level, period in self.periods.items())
        return HierarchicalModelAverager(sizes)  # type: ignore[no-untyped-call]


CONTENDERS: dict[str, Callable[..., Plan]] = {
    "torch-ddp": PlainDDP,
    "torch-post-local": PostLocal,
    "torch-hierarchical": Hierarchical,
}
