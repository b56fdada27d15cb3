"""A gate at a sync: which workers have a say, and how much of one.

    norm       of a worker's own pseudo-gradient, anchor - parameters
    an outlier lies more than ``z`` standard deviations above the worker's own norms before
    clip       parameters <- anchor + min(1, clip / norm) (parameters - anchor)
    weigh      workers count by a function of all their norms

A worker that has gone astray for once (a bad batch, a broken machine) would move all others by as
much. EDiT, https://arxiv.org/abs/2412.07210, which clips what is averaged; here it is each worker's
own, before that, so that one cannot drown the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loosestep.errors import check_instance, check_whole, is_number

FEWEST = 10  # norms before a worker is judged by them
NARROWEST = 0.01  # standard deviation, as a share of the mean: equal norms make no verdict


@dataclass(frozen=True)
class History:
    """What is kept of a worker's norms: of the last ones more than of those long ago."""

    num: int = 0  # of norms so far
    mean: float = 0.0
    variance: float = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation that norms are measured by."""
        return max(math.sqrt(self.variance), NARROWEST * self.mean)


@dataclass(frozen=True)
class InverseNorm:
    """Workers count by 1 / norm, so that none moves the mean by more than another.

    A norm of 0 counts as the smallest other one.
    """

    def factors(self, norms: Sequence[float]) -> list[float]:
        """Return how much workers with these norms count, 1 at most.

        >>> InverseNorm().factors([2.0, 4.0, 0.0])
        [1.0, 0.5, 1.0]
        """
        least = min((norm for norm in norms if norm > 0.0), default=1.0)
        return [least / max(norm, least) if math.isfinite(norm) else 1.0 for norm in norms]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Leaves workers out of a sync whose pseudo-gradient's norm is an outlier, and clips norms.

    Who is left out has no say in that sync, and takes its result as all others do. An infinite
    norm, or NaN, is an outlier at once; without ``z`` nobody is one. Where all are outliers none is
    left out: then it is not the worker that is bad.

    >>> Gate(z=3.0, clip=10.0)
    Gate(z=3.0, clip=10.0, weigh=None, history=100)
    """

    z: float | None = 3.0  # smaller: more is left out; None: nothing is
    clip: float | None = None  # the largest norm that is averaged; None: any
    weigh: InverseNorm | None = None  # how much workers count; None: as the topology says
    history: int = 100  # norms that the mean and variance are of, about; longer: slower to adapt

    def __post_init__(self) -> None:
        """Refuse what is no bound, and a gate that does nothing."""
        for name, value in (("z", self.z), ("clip", self.clip)):
            if value is not None and not (is_number(value) and 0.0 < value < math.inf):
                raise ValueError(
                    f"{name} must be a finite number > 0, or None for none, got {value!r}"
                )
        if self.weigh is not None:
            check_instance("weigh", self.weigh, InverseNorm, "InverseNorm(), or None")
        check_whole(
            "history", self.history, FEWEST, hint=f"no verdict falls by fewer than {FEWEST}"
        )
        if self.z is None and self.clip is None and self.weigh is None:
            raise ValueError("this gate lets everything pass; give z=3.0, or no gate")

    def is_outlier(self, norm: float, history: History) -> bool:
        """Say whether a worker with such a history has no say with this norm."""
        if self.z is None:
            return False
        if not math.isfinite(norm):
            return True
        return history.num >= FEWEST and norm > history.mean + self.z * history.deviation

    def following(self, norm: float, history: History) -> History:
        """Return the history with this norm.

        An outlier enters as the largest norm that would have passed, so that a lasting change is
        let in after a while. Norms of 0 (nothing was learnt) and infinite ones do not enter.
        """
        if norm == 0.0 or not math.isfinite(norm):
            return history
        if self.is_outlier(norm, history):
            assert self.z is not None, "else there are no outliers"
            norm = history.mean + self.z * history.deviation
        share = max(1.0 / (history.num + 1), 1.0 / self.history)
        away = norm - history.mean
        variance = (1.0 - share) * (history.variance + share * away * away)
        return History(history.num + 1, history.mean + share * away, variance)

    def share(self, norm: float) -> float:
        """Return how much of a pseudo-gradient is averaged; 1: all of it."""
        if self.clip is None or not math.isfinite(norm) or norm <= self.clip:
            return 1.0
        return self.clip / norm

    def say(self, norms: Sequence[float], left_out: Sequence[bool]) -> list[float]:
        """Return the factors of the workers' weights; ``left_out`` are not all of them.

        >>> Gate().say([1.0, 9.0], [False, True])
        [1.0, 0.0]
        """
        passing = [norm for norm, out in zip(norms, left_out, strict=True) if not out]
        # Weights are of what is averaged, which is no longer than ``clip``.
        clipped = [norm * self.share(norm) for norm in passing]
        factors = iter([1.0] * len(passing) if self.weigh is None else self.weigh.factors(clipped))
        return [0.0 if out else next(factors) for out in left_out]
