"""Periods and sizes that make sense, and errors for those that do not."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping

from loosestep.checks import check_whole


def check_warmup(warmup_steps: int) -> int:
    """Return a number of steps; raise for what is none."""
    return check_whole("warmup_steps", warmup_steps, hint="0 means no warm-up")


def check_period(period: int) -> int:
    """Return a period; raise for what is none."""
    return check_whole("a period", period, 1, hint="4 averages at every 4th step")


def check_hierarchy(sizes: Mapping[int, int], total: int) -> None:
    """Raise unless periods and group sizes grow, sizes nest and the last is ``total``."""
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"period_group_size_dict must map periods to group sizes, got {sizes!r}; give for "
            "example {4: 2, 16: 8}"
        )
    periods, members = list(sizes), list(sizes.values())
    for period in periods:
        check_period(period)
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


def warn_period_one(what: str) -> None:
    """Say that averaging at every step is seldom meant."""
    warnings.warn(
        f"{what} is 1: parameters then travel as often as gradients would in plain "
        "DistributedDataParallel, which does the same with less",
        stacklevel=3,
    )
