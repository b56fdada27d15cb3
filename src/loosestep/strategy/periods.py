"""How long the next period is: rules that follow from what was observed at a sync.

A rule is a frozen value; what it remembers is handed to it and handed back, and is saved with the
run. All ranks are told the same, so they come to the same answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from loosestep.errors import check_whole, is_number
from loosestep.strategy.timetable import Observed

State = dict[str, float]


class Rule(ABC):
    """A rule for periods; ``every(rule)`` follows it. Make it a frozen dataclass.

    ``asks`` names what must be observed: "rate", "loss" (by ``run.observe``) or "drift".
    """

    asks: frozenset[str] = frozenset({"rate"})

    @property
    @abstractmethod
    def first(self) -> int:
        """The first period, when nothing has been observed."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """How short a period may become; an average that travels must arrive within it."""

    def begin(self) -> State:
        """Return what is remembered at the start: nothing."""
        return {}

    @abstractmethod
    def following(self, seen: Observed, state: State) -> tuple[int, State]:
        """Return the next period, and what is to be remembered."""


@dataclass(frozen=True)
class QSR(Rule):
    """H = max(h_base, floor((alpha / rate)^2)): longer as the learning rate falls."""

    h_base: int
    alpha: float

    @property
    def first(self) -> int:
        """``h_base``."""
        return self.h_base

    @property
    def shortest(self) -> int:
        """``h_base``."""
        return self.h_base

    def following(self, seen: Observed, state: State) -> tuple[int, State]:
        """Return the period by the rate of this moment; a rate of 0 changes nothing."""
        if seen.rate <= 0.0:
            return max(self.h_base, seen.period), state
        return max(self.h_base, math.floor(min((self.alpha / seen.rate) ** 2, 1e9))), state


@dataclass(frozen=True)
class AdaComm(Rule):
    """Sparse at first and denser as the loss falls: H = ceil(sqrt(loss / first loss) H_0)."""

    period: int
    interval: int = 10
    shrink: float = 0.5

    asks = frozenset({"loss"})

    @property
    def first(self) -> int:
        """``period``."""
        return self.period

    @property
    def shortest(self) -> int:
        """Every step."""
        return 1

    def begin(self) -> State:
        """Return that no loss is known yet."""
        return {"syncs": 0.0, "period": float(self.period)}

    def following(self, seen: Observed, state: State) -> tuple[int, State]:
        """Return the same period but at every ``interval``-th sync; there it falls."""
        first = state.setdefault("first loss", seen.loss)
        state["syncs"] += 1.0
        now = int(state["period"])
        if state["syncs"] % self.interval == 0:
            share = max(seen.loss, 0.0) / first if first > 0.0 else 1.0
            wanted = math.ceil(math.sqrt(share) * self.period)
            # Where the loss has not fallen enough to matter, the period does all the same.
            now = max(1, wanted if wanted < now else math.ceil(self.shrink * now))
            state["period"] = float(now)
        return now, state


@dataclass(frozen=True)
class DriftRule(Rule):
    """The period times target / drift, at most doubled or halved at once."""

    target: float
    start: int = 8
    least: int = 1
    most: int = 1000

    asks = frozenset({"drift"})

    @property
    def first(self) -> int:
        """``start``."""
        return self.start

    @property
    def shortest(self) -> int:
        """``least``."""
        return self.least

    def following(self, seen: Observed, state: State) -> tuple[int, State]:
        """Return a period after which replicas should be as far apart as is wanted."""
        factor = 2.0 if seen.drift <= 0.0 else min(2.0, max(0.5, self.target / seen.drift))
        return min(self.most, max(self.least, round(seen.period * factor))), state


def qsr(h_base: int, alpha: float) -> QSR:
    """Return the quadratic synchronization rule, by the optimizer's learning rate at each sync.

    ``h_base``: the period while the rate is high. ``alpha``: larger makes periods longer; the
    paper tunes it to some hundredths. Gu et al., https://arxiv.org/abs/2310.14423.

    >>> qsr(4, alpha=0.1).following(Observed(period=4, rate=0.01), {})[0]
    100
    """
    check_whole("h_base", h_base, 1)
    _check_positive("alpha", alpha)
    return QSR(h_base, alpha)


def adacomm(period: int, *, interval: int = 10, shrink: float = 0.5) -> AdaComm:
    """Return AdaComm: begin with ``period``, and average more often as the training loss falls.

    Give ``run.observe(loss)`` at every step. The period is looked at after every ``interval``
    syncs, and falls to ``shrink`` times itself where the loss asks for no less. Wang and Joshi,
    https://arxiv.org/abs/1810.08313.

    >>> rule = adacomm(16, interval=1)
    >>> rule.following(Observed(period=16, loss=1.0), {**rule.begin(), "first loss": 4.0})[0]
    8
    """
    check_whole("period", period, 1)
    check_whole("interval", interval, 1)
    if not (is_number(shrink) and 0.0 < shrink < 1.0):
        raise ValueError(f"shrink must lie in (0, 1), got {shrink!r}; the paper has 0.5")
    return AdaComm(period, interval, shrink)


def drift(target: float, *, start: int = 8, least: int = 1, most: int = 1000) -> DriftRule:
    """Return a rule that keeps replicas about ``target`` apart, relative to their size.

    What is measured at a sync is in telemetry too (``last_drift``): look there for what is usual
    for a model. ``start`` is the first period, ``least`` and ``most`` bound all of them.

    >>> drift(0.01).following(Observed(period=8, drift=0.02), {})[0]
    4
    """
    _check_positive("target", target)
    for name, value in {"start": start, "least": least, "most": most}.items():
        check_whole(name, value, 1)
    if not least <= start <= most:
        raise ValueError(
            f"periods must satisfy least <= start <= most, got {least}, {start} and {most}"
        )
    return DriftRule(target, start, least, most)


def check_rule(rule: Rule) -> None:
    """Raise where a rule of a user's own does not say what a rule must."""
    check_whole(f"the first period of {rule!r}", rule.first, 1)
    check_whole(f"the shortest period of {rule!r}", rule.shortest, 1)
    unknown = set(rule.asks) - {"rate", "loss", "drift"}
    if unknown:
        raise ValueError(
            f"{rule!r} asks for {sorted(unknown)}; observed are 'rate', 'loss' and 'drift'"
        )
    state = rule.begin()
    if not isinstance(state, Mapping) or not all(is_number(v) for v in state.values()):
        raise TypeError(f"{rule!r} must begin with numbers by name, got {state!r}")


def _check_positive(what: str, value: float) -> None:
    if not (is_number(value) and 0.0 < value < math.inf):
        raise ValueError(f"{what} must be a number > 0, got {value!r}")
