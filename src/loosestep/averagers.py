"""The model averagers under the names that PyTorch users know.

Names, signatures, attributes and the steps at which they average are those of
``torch.distributed.algorithms.model_averaging``; what is new is keyword-only. Parameters are
averaged in place, all that require a gradient take part whether they have one or not, and all
ranks are bit-equal afterwards (but for ``ReplicaFeedback``, which says so).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch.distributed as dist

from loosestep.binding import Statement, agree
from loosestep.groups import own_group
from loosestep.model_averager import FIRST, Due, ModelAverager, Options
from loosestep.parameters import Parameters
from loosestep.periods import check_hierarchy, check_period, check_warmup, warn_period_one
from loosestep.schedule import check_overlap

__all__ = ["HierarchicalModelAverager", "ModelAverager", "Options", "PeriodicModelAverager"]

logger = logging.getLogger(__name__)


class PeriodicModelAverager(ModelAverager):
    """Average every ``period`` steps after ``warmup_steps`` steps without.

    Averages at calls ``warmup_steps, warmup_steps + period, ...``, counted from 0, as torch's
    does; the algorithm is post-local SGD (https://arxiv.org/abs/1808.07217).

    Example::

        averager = PeriodicModelAverager(period=4, warmup_steps=100, module=model)
        for inputs, labels in data:
            optimizer.zero_grad()
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
        averager.finalize(model.parameters())
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(process_group, **options)
        self.warmup_steps = check_warmup(warmup_steps)
        self.period = check_period(period)
        check_overlap(self.overlap_steps, [warmup_steps, warmup_steps + period])
        if period == 1:
            warn_period_one("period")

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` (parameters or an optimizer's groups) if due, and count the call."""
        step = self.clock.step
        due = step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0
        if not due and self._checked and not self.overlap_steps:  # nearly always: cost nothing
            self.clock.step = step + 1
            return
        self._turn(params, self._widest if due else None)
        if due and not self.overlap_steps:
            self._synced_step = step
        self.clock.step = step + 1

    @property
    def _widest(self) -> Due:
        return self.process_group, f"every {self.period}"

    @property
    def _first_due(self) -> int:
        return self.warmup_steps

    def _describe(self) -> str:
        return f"averaging every {self.period} steps after {self.warmup_steps}"


class HierarchicalModelAverager(ModelAverager):
    """Average small groups often and large groups seldom (https://arxiv.org/abs/2010.12998).

    ``period_group_size_dict`` maps periods to group sizes, both growing. A call is due for every
    period that divides its number, counted from 0, once ``warmup_steps`` calls have passed; only
    the largest due group averages. The last size must be that of ``process_group``.

    Example::

        averager = HierarchicalModelAverager(OrderedDict([(4, 8), (16, 32)]), warmup_steps=100)
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(process_group, **options)
        if not period_group_size_dict:
            raise ValueError(
                f"period_group_size_dict must not be empty, got {period_group_size_dict!r}; "
                "give for example OrderedDict([(4, 2), (16, 8)])"
            )
        ranks = dist.get_process_group_ranks(self.process_group)
        check_hierarchy(period_group_size_dict, len(ranks))
        self.warmup_steps = check_warmup(warmup_steps)
        self._sizes = dict(period_group_size_dict)
        self._periods = list(period_group_size_dict)
        check_overlap(self.overlap_steps, [self._periods[-1], 2 * self._periods[-1]])
        if self._periods[-1] == 1:
            warn_period_one("the largest period of period_group_size_dict")
        self._agree_on_groups()
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict(
            (period, self._group_of(size, ranks)) for period, size in self._sizes.items()
        )
        logger.info("hierarchical averaging, period: group size: %s", self._sizes)

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` over the largest group that is due, if any, and count the call."""
        step = self.clock.step
        period = self._due_period(step)
        if not period and self._checked and not self.overlap_steps:
            self.clock.step = step + 1
            return
        self._turn(params, self._due(period) if period else None)
        whole = bool(period) and self._sizes[period] == self._sizes[self._periods[-1]]
        if whole and not self.overlap_steps:
            self._synced_step = step
        self.clock.step = step + 1

    def _due(self, period: int) -> Due:
        return self.period_process_group_dict[period], f"every {period}"

    @property
    def _widest(self) -> Due:
        return self._due(self._periods[-1])

    def _levels(self) -> list[Due]:
        return [self._due(period) for period in self._periods]

    def _due_period(self, step: int) -> int:
        """Return the largest period that is due, or 0."""
        if step >= self.warmup_steps:
            for period in reversed(self._periods):
                if step % period == 0:
                    return period
        return 0

    def _agree_on_groups(self) -> None:
        """Compare the sizes before groups are made: ranks that differ would wait for each other."""
        if len(set(self._sizes.values())) > 1 and dist.get_rank(self.process_group) >= 0:
            peers = self._averager((self.process_group, FIRST)).peers
            agree(peers, Statement((self._describe(),)))

    def _group_of(self, size: int, ranks: list[int]) -> dist.ProcessGroup:
        if size == len(ranks):
            return self.process_group
        blocks = [ranks[i : i + size] for i in range(0, len(ranks), size)]
        if len(ranks) == dist.get_world_size():
            # Everybody is here, so the groups can be torch's usual ones, with a count and a name.
            return cast(
                dist.ProcessGroup,
                dist.new_subgroups_by_enumeration(blocks)[0],  # type: ignore[no-untyped-call]
            )
        mine = next(block for block in blocks if dist.get_rank() in block)
        return own_group(tuple(mine), self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process groups of the levels too."""
        return super().__getstate__() | {"period_process_group_dict": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the levels' process groups again."""
        super().__setstate__(state)
        ranks = dist.get_process_group_ranks(self.process_group)
        self.period_process_group_dict = OrderedDict(
            (period, self._group_of(size, ranks)) for period, size in self._sizes.items()
        )

    @property
    def _first_due(self) -> int:
        return min(-(-self.warmup_steps // period) * period for period in self._periods)

    def _describe(self) -> str:
        return f"averaging every {{steps: group size}} {self._sizes} after {self.warmup_steps}"
