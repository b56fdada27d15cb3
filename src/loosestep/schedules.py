"""When to share what, and which part of it: schedules, and what one of your own answers."""

from loosestep.strategy.fragments import Fragments, fragments_of
from loosestep.strategy.schedules import Due, Schedule, after, always, every, levels, streaming

__all__ = [
    "Due",
    "Fragments",
    "Schedule",
    "after",
    "always",
    "every",
    "fragments_of",
    "levels",
    "streaming",
]
