"""How a buffer becomes its group's mean."""

from loosestep.wire.cast import Cast
from loosestep.wire.mean import Mean, mean_into
from loosestep.wire.native import Native
from loosestep.wire.reducer import Handle, Reducer, Traffic

__all__ = ["Cast", "Handle", "Mean", "Native", "Reducer", "Traffic", "mean_into"]
