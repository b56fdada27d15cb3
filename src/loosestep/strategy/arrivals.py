"""What becomes of parameters when an average arrives that was launched some steps ago.

Launched at step t from what this rank held then, it arrives at t + tau as g, what the mean (and an
outer optimizer, if there is one) leads to. Local steps have been taken meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from loosestep.errors import is_number


@dataclass(frozen=True)
class Arrival:
    """The base of all rules; it is ``Delta``. Buffers always go by that."""

    @property
    def keeps(self) -> float | None:
        """The share of the own parameters in a mix; None: a difference is added."""
        return None

    @property
    def guesses(self) -> bool:
        """Whether parameters take at once what this rank's own difference would lead to."""
        return False


@dataclass(frozen=True)
class Delta(Arrival):
    """p <- g + (p - p at launch): no local step is lost."""


@dataclass(frozen=True)
class Eager(Delta):
    """The own difference at once, the others' when they arrive.

    At launch p becomes what the outer optimizer would make of this rank's own difference, were it
    everybody's. At arrival p <- p + (g - that). The outer optimizer itself steps once, by the mean.
    Eager updates, https://arxiv.org/abs/2502.12996.
    """

    @property
    def guesses(self) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True)
class Mix(Arrival):
    """p <- alpha p + (1 - alpha) g, as in streaming DiLoCo; https://arxiv.org/abs/2501.18512.

    At 0 the local steps taken meanwhile are thrown away, at 1 the others are.
    """

    alpha: float

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        if not (is_number(self.alpha) and 0.0 <= self.alpha < 1.0):
            raise ValueError(
                f"alpha must lie in [0, 1), got {self.alpha!r}; 0.5 takes half of either"
            )

    @property
    def keeps(self) -> float:
        """``alpha``."""
        return self.alpha
