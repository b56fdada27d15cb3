"""What a sync does with the mean: outer optimizers, and rules for a mean that arrives late."""

from loosestep.strategy.arrivals import Arrival, Delta, Eager, Mix
from loosestep.strategy.outer_rules import Outer, nesterov, slowmo

__all__ = ["Arrival", "Delta", "Eager", "Mix", "Outer", "nesterov", "slowmo"]
