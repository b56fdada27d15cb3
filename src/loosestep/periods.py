"""Periods and sizes that make sense, and errors for those that do not."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping


def check_warmup(warmup_steps: int) -> int:
    """Return a number of steps; raise for what is none."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be >= 0, got {warmup_steps}; 0 means no warm-up")
    return warmup_steps


def check_period(period: int) -> int:
    """Return a period; raise for what is none."""
    if not isinstance(period, int) or period < 1:
        raise ValueError(
            f"a period must be a whole number >= 1, got {period}; 4 averages at every 4th step"
        )
    return period


def check_hierarchy(sizes: Mapping[int, int], total: int) -> None:
    """Raise unless periods and group sizes grow, sizes nest and the last is ``total``."""
    periods, members = list(sizes), list(sizes.values())
    for period in periods:
        check_period(period)
    if periods != sorted(periods):
        raise ValueError(
            f"periods must grow, got {periods}: a smaller period behind a larger one would never "
            f"be due; give them as {sorted(periods)}"
        )
    if min(members) < 1 or members != sorted(members):
        raise ValueError(f"group sizes must be >= 1 and must not shrink, got {members}")
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
