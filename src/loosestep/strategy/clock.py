"""The one counter of optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loosestep.errors import check_whole


class Clock:
    """Count finished optimizer steps, from 0.

    One clock is handed to everything that must agree on "now": gradient hook, averager and
    optimizer. A micro-batch of gradient accumulation does not tick; a step that a GradScaler
    skipped does.

    >>> clock = Clock()
    >>> clock.tick()
    1
    >>> clock.state_dict()
    {'step': 1}
    """

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: int = 0) -> None:
        self.step = check_whole("step", step)

    def tick(self) -> int:
        """Count one finished step and return how many there are now."""
        self.step += 1
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the count, as plain data."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved count."""
        self.step = check_whole("a clock's step", state_dict["step"])

    def __repr__(self) -> str:
        return f"Clock(step={self.step})"
