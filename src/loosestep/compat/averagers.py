"""The model averagers under the names that PyTorch users know.

Names, signatures, attributes and the steps at which they average are those of
``torch.distributed.algorithms.model_averaging``; what is new is keyword-only. Parameters are
averaged in place, all that require a gradient take part whether they have one or not, and all
ranks are bit-equal afterwards (but for ``ReplicaFeedback``, which says so).
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers as in_torch
from torch.distributed.algorithms.model_averaging import (
    hierarchical_model_averager as levels_in_torch,
)

from loosestep.comm.agreement import Statement, agree
from loosestep.comm.group import Group
from loosestep.comm.reducers import check_hosts_fit
from loosestep.compat.model_averager import FIRST, ModelAverager, Options
from loosestep.compat.parameters import Parameters
from loosestep.errors import check_whole
from loosestep.strategy.schedules import check_overlap

__all__ = ["HierarchicalModelAverager", "ModelAverager", "Options", "PeriodicModelAverager"]

logger = logging.getLogger(__name__)


class PeriodicModelAverager(ModelAverager, in_torch.PeriodicModelAverager):
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

    period: int
    warmup_steps: int

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(process_group, **options)
        self.warmup_steps = _check_warmup(warmup_steps)
        self.period = _check_period(period)
        check_overlap(self.overlap_steps, [warmup_steps, warmup_steps + period])
        ranks = dist.get_process_group_ranks(self.process_group)
        check_hosts_fit(self.reducer, f"every {period}", [ranks])
        if period == 1:
            _warn_period_one("period")

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` (parameters or an optimizer's groups) if due, and count the call."""
        step = self.clock.step
        due = step >= self.warmup_steps and (step - self.warmup_steps) % self.period == 0
        if due or not self._begun or self.overlap_steps:  # nearly never: else it costs nothing
            self._follow(params, f"every {self.period}" if due else None)
        self.clock.step = step + 1

    def _levels(self) -> dict[str, dist.ProcessGroup]:
        return {f"every {self.period}": self.process_group}

    @property
    def _first_due(self) -> int:
        return self.warmup_steps

    def _describe(self) -> str:
        return f"averaging every {self.period} steps after {self.warmup_steps}"


class HierarchicalModelAverager(ModelAverager, levels_in_torch.HierarchicalModelAverager):
    """Average small groups often and large groups seldom (https://arxiv.org/abs/2010.12998).

    ``period_group_size_dict`` maps periods to group sizes, both growing. A call is due for every
    period that divides its number, counted from 0, once ``warmup_steps`` calls have passed; only
    the largest due group averages. The last size must be that of ``process_group``.

    Example::

        averager = HierarchicalModelAverager(OrderedDict([(4, 8), (16, 32)]), warmup_steps=100)
    """

    warmup_steps: int
    _periods: list[int]

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
        _check_hierarchy(period_group_size_dict, len(ranks))
        self.warmup_steps = _check_warmup(warmup_steps)
        self._sizes = dict(period_group_size_dict)
        self._periods = list(period_group_size_dict)
        check_overlap(self.overlap_steps, [self._periods[-1], 2 * self._periods[-1]])
        for period, size in self._sizes.items():
            check_hosts_fit(self.reducer, f"every {period}", [ranks[:size]])
        if self._periods[-1] == 1:
            _warn_period_one("the largest period of period_group_size_dict")
        # Before groups are made: ranks whose sizes differ would wait for each other.
        if len(set(self._sizes.values())) > 1 and self._is_member:
            agree(self._peers(FIRST), Statement((self._describe(),)))
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict(
            (period, self._group_of(size, ranks)) for period, size in self._sizes.items()
        )
        logger.info("hierarchical averaging, period: group size: %s", self._sizes)

    def average_parameters(self, params: Parameters) -> None:
        """Average ``params`` over the largest group that is due, if any, and count the call."""
        step = self.clock.step
        period = self._due_period(step)
        if period or not self._begun or self.overlap_steps:
            self._follow(params, f"every {period}" if period else None)
        self.clock.step = step + 1

    def _levels(self) -> dict[str, dist.ProcessGroup]:
        return {f"every {p}": group for p, group in self.period_process_group_dict.items()}

    def _due_period(self, step: int) -> int:
        """Return the largest period that is due, or 0."""
        if step >= self.warmup_steps:
            for period in reversed(self._periods):
                if step % period == 0:
                    return period
        return 0

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
        return Group.make(tuple(mine), self.timeout).hand_over()

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


def _check_warmup(warmup_steps: int) -> int:
    """Return a number of steps; raise for what is none."""
    return check_whole("warmup_steps", warmup_steps, hint="0 means no warm-up")


def _check_period(period: int) -> int:
    """Return a period; raise for what is none."""
    return check_whole("a period", period, 1, hint="4 averages at every 4th step")


def _check_hierarchy(sizes: Mapping[int, int], total: int) -> None:
    """Raise unless periods and group sizes grow, sizes nest and the last is ``total``."""
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"period_group_size_dict must map periods to group sizes, got {sizes!r}; give for "
            "example {4: 2, 16: 8}"
        )
    periods, members = list(sizes), list(sizes.values())
    for period in periods:
        _check_period(period)
    for size in members:
        check_whole("a group size", size, 1)
    if periods != sorted(periods):
        raise ValueError(
            f"periods must grow, got {periods}: a smaller period behind a larger one would never "
            f"be due; give them as {sorted(periods)}"
        )
    if members != sorted(members):
        raise ValueError(f"group sizes must not shrink, got {members}")
    for small, large in itertools.pairwise(members):
        if large % small:
            raise ValueError(f"group sizes must nest: {large} is no multiple of {small}")
    if members[-1] != total:
        raise ValueError(
            f"the last group size, {members[-1]}, must be the size of the process group, {total}"
        )


def _warn_period_one(what: str) -> None:
    """Say that averaging at every step is seldom meant."""
    warnings.warn(
        f"{what} is 1: parameters then travel as often as gradients would in plain "
        "DistributedDataParallel, which does the same with less",
        stacklevel=3,
    )
