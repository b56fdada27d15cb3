"""When to share what: the schedules, and what one of your own answers."""

from loosestep.strategy.schedules import Due, Schedule, after, always, every, levels

__all__ = ["Due", "Schedule", "after", "always", "every", "levels"]
