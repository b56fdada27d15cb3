"""One thing that was looked at, and whether it is as it should be."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # works, but slower or not as one might think
    PROBLEM = "problem"  # training will fail or crawl


@dataclass(frozen=True)
class Finding:
    """What was found under a name."""

    name: str
    value: str
    level: Level = Level.OK
    advice: str = ""  # what to do about it

    def __post_init__(self) -> None:
        """Insist on a way out."""
        assert self.advice or self.level is not Level.PROBLEM, "a problem comes with what to do"
