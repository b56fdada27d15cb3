"""When to share what, and which part of it: schedules, rules for periods, and your own of both."""

from loosestep.strategy.fragments import Fragments, fragments_of
from loosestep.strategy.periods import Rule, adacomm, drift, qsr
from loosestep.strategy.schedules import Due, Schedule, after, always, every, levels, streaming
from loosestep.strategy.timetable import Observed

__all__ = [
    "Due",
    "Fragments",
    "Observed",
    "Rule",
    "Schedule",
    "adacomm",
    "after",
    "always",
    "drift",
    "every",
    "fragments_of",
    "levels",
    "qsr",
    "streaming",
]
