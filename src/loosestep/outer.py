"""What a sync does with the mean: outer optimizers, and the two that papers found best."""

from loosestep.strategy.outer_rules import Outer, nesterov, slowmo

__all__ = ["Outer", "nesterov", "slowmo"]
