"""When to share what: a schedule is a function from a step to a ``Due``.

``schedule(step)`` is asked once after every optimizer step, ``step`` being the number of steps
finished by then, and once before the first: for the level that averages parameters now, and for
the one that shares gradients in the next backward.

>>> plan = after(100, levels({"host": 4, "world": 32}))
>>> plan(99)
Due(gradients='world', parameters=None)
>>> plan(100 + 4), plan(100 + 64)
(Due(gradients=None, parameters='host'), Due(gradients=None, parameters='world'))
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from loosestep.errors import check_instance, check_level, check_whole
from loosestep.strategy.periods import Rule, check_rule
from loosestep.strategy.timetable import AdaptiveTimetable, AfterTimetable, Timetable

STEPS_LOOKED_AT = 4096  # from the first average on, for two that are too close


@dataclass(frozen=True)
class Due:
    """What is due at a step: the level that shares gradients and the one that averages.

    ``fragment`` is the number of the part of the parameters that is averaged; None: all of them.
    """

    gradients: str | None = None
    parameters: str | None = None
    fragment: int | None = None

    def __post_init__(self) -> None:
        """Refuse what names no level, and no part."""
        check_level("gradients", self.gradients)
        check_level("parameters", self.parameters)
        if self.fragment is not None:
            check_whole("fragment", self.fragment)

    def __repr__(self) -> str:
        part = "" if self.fragment is None else f", fragment={self.fragment}"
        return f"Due(gradients={self.gradients!r}, parameters={self.parameters!r}{part})"


class Schedule(ABC):
    """A pure function of the step that can say which levels it may name."""

    @abstractmethod
    def __call__(self, step: int) -> Due:
        """Return what is due once ``step`` optimizer steps are finished."""

    @abstractmethod
    def gradient_levels(self) -> frozenset[str]:
        """Return every level that may share gradients."""

    @abstractmethod
    def parameter_levels(self) -> frozenset[str]:
        """Return every level that may average parameters."""

    def chains(self) -> list[tuple[str, ...]]:
        """Return the lists of levels that must go from narrow to wide."""
        return []

    @property
    def begins(self) -> int:
        """After which step averaging begins: anchors of outer optimizers are taken there."""
        return 0

    @property
    def num_fragments(self) -> int:
        """How many parts the parameters are split into; 1: they are averaged as a whole."""
        return 1

    def timetable(self) -> Timetable:
        """Return what is due in a run; all that changes while training is there."""
        return Timetable(self)

    def seldom(self) -> list[int]:
        """Return when that level averages which does so most seldom, as far as one looks.

        Of parameters in parts, when the part does whose turn comes first.
        """
        first = next_sync(self, 0)
        steps: dict[str, list[int]] = {level: [] for level in self.parameter_levels()}
        if first is not None:
            for step in range(first[0], first[0] + STEPS_LOOKED_AT):
                due = self(step)
                if due.parameters is not None and due.fragment in (None, first[1].fragment):
                    steps.setdefault(due.parameters, []).append(step)
        return min(steps.values(), key=len, default=[])


@dataclass(frozen=True)
class Always(Schedule):
    """The same at every step."""

    due: Due

    def __call__(self, step: int) -> Due:
        """Return the one answer."""
        return self.due

    def gradient_levels(self) -> frozenset[str]:
        """Return the one level that shares gradients, if any."""
        return _named(self.due.gradients)

    def parameter_levels(self) -> frozenset[str]:
        """Return the one level that averages, if any."""
        return _named(self.due.parameters)


@dataclass(frozen=True)
class Levels(Schedule):
    """Several periods, each for its level; at a step only the widest due level averages."""

    periods: tuple[tuple[str, int], ...]  # (level, period), narrow to wide
    gradients: str | None = None

    def __call__(self, step: int) -> Due:
        """Return the widest level whose period divides ``step``; step 0 is never due."""
        due = [name for name, period in self.periods if step > 0 and step % period == 0]
        return self._answers[due[-1] if due else None]

    @cached_property
    def _answers(self) -> dict[str | None, Due]:
        """What may be due, by the level that averages: checked once."""
        return {name: Due(self.gradients, name) for name in (None, *self.parameter_levels())}

    def gradient_levels(self) -> frozenset[str]:
        """Return the level that shares gradients between averages, if any."""
        return _named(self.gradients)

    def parameter_levels(self) -> frozenset[str]:
        """Return all levels of the hierarchy."""
        return _named(*(name for name, _ in self.periods))

    def chains(self) -> list[tuple[str, ...]]:
        """Return the levels in their order."""
        return [tuple(name for name, _ in self.periods)]


@dataclass(frozen=True)
class Streaming(Schedule):
    """Every part of the parameters once a period, each at an offset of its own."""

    period: int
    num: int  # of parts; more: smaller peaks of traffic
    level: str
    gradients: str | None = None

    def __call__(self, step: int) -> Due:
        """Return the part whose turn it is; turns come ``period / num`` steps apart."""
        turn, rest = divmod(step, self.period // self.num)
        if turn == 0 or rest:
            return Due(self.gradients)
        fragment = None if self.num == 1 else (turn - 1) % self.num
        return Due(self.gradients, self.level, fragment)

    def gradient_levels(self) -> frozenset[str]:
        """Return the level that shares gradients between averages, if any."""
        return _named(self.gradients)

    def parameter_levels(self) -> frozenset[str]:
        """Return the one level that averages."""
        return _named(self.level)

    @property
    def num_fragments(self) -> int:
        """How many parts there are."""
        return self.num


@dataclass(frozen=True)
class Adaptive(Schedule):
    """One level, whose next period follows from what was observed at the last sync."""

    rule: Rule
    level: str
    gradients: str | None = None

    def __call__(self, step: int) -> Due:
        """Return what is known before anything is observed: the first sync."""
        return Due(self.gradients, self.level if step == self.rule.first else None)

    def gradient_levels(self) -> frozenset[str]:
        """Return the level that shares gradients between averages, if any."""
        return _named(self.gradients)

    def parameter_levels(self) -> frozenset[str]:
        """Return the one level that averages."""
        return _named(self.level)

    def timetable(self) -> Timetable:
        """Return one that learns the next sync at each."""
        return AdaptiveTimetable(self)

    def seldom(self) -> list[int]:
        """Return two syncs that are as close as they may ever be."""
        return [self.rule.shortest, 2 * self.rule.shortest]


@dataclass(frozen=True)
class After(Schedule):
    """One schedule before ``start``, another, counted from there, afterwards."""

    start: int
    then: Schedule
    before: Schedule

    def __call__(self, step: int) -> Due:
        """Hand the step to the half that it falls into."""
        return self.before(step) if step < self.start else self.then(step - self.start)

    def gradient_levels(self) -> frozenset[str]:
        """Return the levels that either half shares gradients with."""
        return frozenset().union(*(half.gradient_levels() for half in self._halves()))

    def parameter_levels(self) -> frozenset[str]:
        """Return the levels that either half averages over."""
        return frozenset().union(*(half.parameter_levels() for half in self._halves()))

    def chains(self) -> list[tuple[str, ...]]:
        """Return those of both halves."""
        return [chain for half in self._halves() for chain in half.chains()]

    @property
    def begins(self) -> int:
        """Where the other half begins, if the first averages nothing."""
        first = self.before.parameter_levels() if self.start else frozenset()
        return self.before.begins if first else self.start + self.then.begins

    @property
    def num_fragments(self) -> int:
        """That of the half that has parts."""
        return max(half.num_fragments for half in self._halves())

    def timetable(self) -> Timetable:
        """Return that of both halves."""
        return AfterTimetable(self)

    def seldom(self) -> list[int]:
        """Return the same of the half that adapts, or else of both."""
        adaptive = [half for half in self._halves() if half.timetable().adaptive]
        return adaptive[0].seldom() if adaptive else super().seldom()

    def _halves(self) -> list[Schedule]:
        """Return those that ever come."""
        return [self.before, self.then] if self.start else [self.then]


def every(
    period: int | Rule, level: str = "world", *, gradients: str | None = None
) -> Levels | Adaptive:
    """Average parameters over ``level`` after every ``period`` steps.

    A rule such as ``qsr(4, 0.1)`` says at every sync how long the next period is.

    >>> [step for step in range(10) if every(4)(step).parameters]
    [4, 8]
    """
    if not isinstance(period, Rule):
        return levels({level: period}, gradients=gradients)
    check_rule(period)
    check_level("level", level)
    check_level("gradients", gradients)
    if not level:
        raise ValueError("level must name who averages, such as 'world', got None")
    return Adaptive(period, level, gradients)


def levels(periods: Mapping[str, int], *, gradients: str | None = None) -> Levels:
    """Average over several levels, named from narrow to wide, each with its period.

    The update is that of hierarchical SGD (https://arxiv.org/abs/2010.12998): when several
    levels are due at once only the widest averages, since it contains the others.
    """
    if not isinstance(periods, Mapping):
        raise TypeError(
            f"periods must map levels to periods, got {periods!r}; give for example {{'world': 8}}"
        )
    check_level("gradients", gradients)
    pairs = tuple(periods.items())
    if not pairs:
        raise ValueError("levels must not be empty; give for example {'world': 8}")
    for name, period in pairs:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a level must have a name such as 'host' or 'world', got {name!r}")
        check_whole(f"the period of {name!r}", period, 1)
    for (narrow, short), (wide, long) in itertools.pairwise(pairs):
        if long < short:
            raise ValueError(
                f"periods must not fall from narrow to wide levels: {narrow!r} has {short}, "
                f"{wide!r} has {long}, so {narrow!r} would seldom or never average; "
                f"name the narrow level first or give {wide!r} a period >= {short}"
            )
    return Levels(pairs, gradients)


def streaming(
    period: int, num_fragments: int, level: str = "world", *, gradients: str | None = None
) -> Streaming:
    """Average every one of ``num_fragments`` parts of the parameters once in ``period`` steps.

    Their turns are evenly spread; one part is ``every(period)``.

    >>> plan = streaming(4, 2)
    >>> [plan(step).fragment for step in (2, 4, 6)], plan(3).parameters
    ([0, 1, 0], None)
    """
    check_whole("period", period, 1)
    check_whole("num_fragments", num_fragments, 1)
    check_level("level", level)
    check_level("gradients", gradients)
    if level is None:
        raise ValueError("level must name who averages, such as 'world', got None")
    if period % num_fragments:
        below = period - period % num_fragments
        raise ValueError(
            f"num_fragments must divide the period, so that their turns are evenly spread: "
            f"{period} is no multiple of {num_fragments}; give a period of {below + num_fragments}"
            + (f" or {below}" if below else "")
        )
    return Streaming(period, num_fragments, level, gradients)


def always(*, gradients: str | None = None, parameters: str | None = None) -> Always:
    """Do the same at every step.

    >>> always(gradients="world")(7)
    Due(gradients='world', parameters=None)
    """
    return Always(Due(gradients, parameters))


def after(start: int, then: Schedule, before: Schedule | None = None) -> After:
    """Follow ``before`` for ``start`` steps, then ``then``, counted from there.

    ``before`` defaults to sharing gradients with the world, the warm-up of post-local SGD.

    >>> after(2, every(2))(4).parameters
    'world'
    """
    check_whole("start", start)
    check_instance("then", then, Schedule, "a schedule such as every(8)")
    if before is not None:
        check_instance("before", before, Schedule, "a schedule such as always(gradients='world')")
    return After(start, then, always(gradients="world") if before is None else before)


def next_sync(schedule: Schedule, step: int, level: str | None = None) -> tuple[int, Due] | None:
    """Return the first step after ``step`` at which parameters are averaged, and what is due then.

    With ``level`` the first at which that level averages. None: not within a foreseeable time.

    >>> next_sync(every(8), 3)
    (8, Due(gradients=None, parameters='world'))
    """
    return schedule.timetable().upcoming(step, level)


def always_shares_gradients(schedule: Schedule) -> bool:
    """Say whether gradients are shared on some level at every step, as far as one cares to look.

    >>> always_shares_gradients(every(8, gradients="host")), always_shares_gradients(every(8))
    (True, False)
    """
    first = (next_sync(schedule, 0) or (0, ""))[0]
    looked_at = [*range(STEPS_LOOKED_AT), *range(first, first + STEPS_LOOKED_AT)]
    return all(schedule(step).gradients is not None for step in looked_at)


def check_overlap(overlap_steps: int, seldom: Iterable[int]) -> int:
    """Return ``overlap_steps``; raise where that is longer than the longest of the periods.

    ``seldom`` are the steps of the level that averages most seldom. Others may be due earlier: what
    is under way lands then.

    >>> check_overlap(2, [4, 6])
    2
    """
    check_whole("overlap_steps", overlap_steps, hint="0 averages at once")
    for one, other in itertools.pairwise(seldom):
        if other - one < overlap_steps:
            raise ValueError(
                f"an average must land before the next one starts: overlap_steps is "
                f"{overlap_steps}, but parameters are averaged at steps {one} and {other}; give "
                f"overlap_steps <= {other - one}, or average less often"
            )
    return overlap_steps


def _named(*levels: str | None) -> frozenset[str]:
    return frozenset(level for level in levels if level is not None)
