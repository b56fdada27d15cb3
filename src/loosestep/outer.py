"""What a sync does with the mean: outer optimizers, who has a say, and means that arrive late."""

from loosestep.strategy.arrivals import Arrival, Delta, Eager, Mix
from loosestep.strategy.gate import Gate, InverseNorm
from loosestep.strategy.gossip import Gossip, NoLoCo
from loosestep.strategy.outer_rules import Outer, nesterov, slowmo

__all__ = [
    "Arrival",
    "Delta",
    "Eager",
    "Gate",
    "Gossip",
    "InverseNorm",
    "Mix",
    "NoLoCo",
    "Outer",
    "nesterov",
    "slowmo",
]
