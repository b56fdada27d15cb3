"""A schedule under way: what is due at a step of one run, and when the next sync is.

Of a pure schedule all steps are known. An adaptive one knows its next sync and no further: what
ranks have observed travels with the agreement before each, and there decides about the one after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loosestep.strategy.periods import Rule
    from loosestep.strategy.schedules import Adaptive, After, Due, Schedule

HORIZON = 200_000  # steps that are looked ahead for the next average
NOTHING_ASKED: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Observed:
    """What the ranks have observed when a sync began: means over them, the same on all."""

    period: int  # steps since the sync before
    rate: float = 0.0  # the optimizer's learning rate
    loss: float = 0.0  # the mean of what ``run.observe`` was given since the sync before
    drift: float = 0.0  # rms distance of the replicas from their mean / rms of the mean


class Timetable:
    """What is due in one run; this one is of a schedule that is a pure function of the step."""

    asks = NOTHING_ASKED  # which fields of ``Observed`` it needs
    adaptive = False  # whether the syncs to come depend on what is observed

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    @property
    def averages(self) -> bool:
        """Whether parameters are ever averaged."""
        return bool(self._schedule.parameter_levels())

    @property
    def begins(self) -> int:
        """After which step averaging begins."""
        return self._schedule.begins

    def due(self, step: int) -> Due:
        """Return what is due now that ``step`` steps are finished."""
        return self._schedule(step)

    def upcoming(self, step: int, level: str | None = None) -> tuple[int, Due] | None:
        """Return the first sync after ``step``, of a level; None: none in a foreseeable time."""
        levels = self._schedule.parameter_levels()
        if not levels or (level is not None and level not in levels):
            return None
        for later in range(step + 1, step + 1 + HORIZON):
            due = self._schedule(later)
            if due.parameters is not None and level in (None, due.parameters):
                return later, due
        return None

    def begun(self, step: int) -> None:
        """Learn that the sync that is due at ``step`` has begun."""

    def hear(self, step: int, seen: Observed) -> None:
        """Learn what all ranks had observed when the sync of ``step`` began."""

    def period(self, step: int) -> int:
        """Return how many steps lie between the last sync and the one at ``step``; 0: not known."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; empty: nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""


class AdaptiveTimetable(Timetable):
    """One whose next sync follows from a rule and what was observed at the last."""

    adaptive = True

    def __init__(self, schedule: Adaptive) -> None:
        super().__init__(schedule)
        self._rule: Rule = schedule.rule
        self.asks = schedule.rule.asks
        self._syncs = schedule(self._rule.first)  # what is due at a sync,
        self._rests = schedule(0)  # and in between
        self._restart()

    def _restart(self) -> None:
        self._last, self._next = 0, self._rule.first
        self._state = self._rule.begin()

    def due(self, step: int) -> Due:
        """Return the one level at the step that is known to be next, and nothing before it."""
        return self._syncs if step >= self._next > self._last else self._rests

    def upcoming(self, step: int, level: str | None = None) -> tuple[int, Due] | None:
        """Return the one that is known; None: an average under way will decide about it."""
        if self._next <= self._last or level not in (None, self._syncs.parameters):
            return None
        return max(self._next, step + 1), self._syncs

    def begun(self, step: int) -> None:
        """Know of no next sync until it was heard what this one has observed."""
        self._last = self._next = step

    def period(self, step: int) -> int:
        """Return the steps since the last sync."""
        return step - self._last

    def hear(self, step: int, seen: Observed) -> None:
        """Let the rule say how long the next period is; it begins at ``step``."""
        period, self._state = self._rule.following(seen, dict(self._state))
        self._last, self._next = step, step + max(self._rule.shortest, int(period))

    def state_dict(self) -> dict[str, Any]:
        """Return the sync that is known, and the rule's state."""
        return {"last": self._last, "next": self._next, "rule": dict(self._state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned; an empty one begins anew."""
        self._restart()
        if state_dict:
            self._last, self._next = int(state_dict["last"]), int(state_dict["next"])
            self._state = dict(state_dict["rule"])


class AfterTimetable(Timetable):
    """One before a step, and another, counted from there, afterwards."""

    def __init__(self, schedule: After) -> None:
        super().__init__(schedule)
        self._start = schedule.start
        self._before, self._then = schedule.before.timetable(), schedule.then.timetable()
        self.asks = self._before.asks | self._then.asks
        self.adaptive = self._before.adaptive or self._then.adaptive

    def due(self, step: int) -> Due:
        """Ask the half that the step falls into."""
        early = step < self._start
        return self._before.due(step) if early else self._then.due(step - self._start)

    def upcoming(self, step: int, level: str | None = None) -> tuple[int, Due] | None:
        """Ask the first half as long as it has one, then the other."""
        if not self.adaptive:
            return super().upcoming(step, level)
        found = self._before.upcoming(step, level) if step < self._start else None
        if found is not None and found[0] < self._start:
            return found
        found = self._then.upcoming(max(step - self._start, 0), level)
        return None if found is None else (found[0] + self._start, found[1])

    def begun(self, step: int) -> None:
        """Tell the half that the step falls into."""
        if step < self._start:
            self._before.begun(step)
        else:
            self._then.begun(step - self._start)

    def hear(self, step: int, seen: Observed) -> None:
        """Tell the half that the step falls into."""
        if step < self._start:
            self._before.hear(step, seen)
        else:
            self._then.hear(step - self._start, seen)

    def period(self, step: int) -> int:
        """Ask the half that the step falls into."""
        if step < self._start:
            return self._before.period(step)
        return self._then.period(step - self._start)

    def state_dict(self) -> dict[str, Any]:
        """Return what both halves keep."""
        kept = {"before": self._before.state_dict(), "then": self._then.state_dict()}
        return {half: state for half, state in kept.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._before.load_state_dict(state_dict.get("before", {}))
        self._then.load_state_dict(state_dict.get("then", {}))
