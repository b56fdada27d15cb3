"""How a buffer becomes its group's mean."""

from loosestep.wire.cast import Cast
from loosestep.wire.feedback import ErrorFeedback
from loosestep.wire.mean import Mean, mean_into
from loosestep.wire.native import Native
from loosestep.wire.nonfinite import NonFinite
from loosestep.wire.quantize import Int2, Int4, Int8, Ternary
from loosestep.wire.reducer import (
    Handle,
    Reducer,
    Traffic,
    check_reducer,
    check_suits_gradients,
    leaves_apart,
)
from loosestep.wire.replica_feedback import ReplicaFeedback
from loosestep.wire.resident import Resident
from loosestep.wire.rounding import Rounding
from loosestep.wire.scaled import Scaled
from loosestep.wire.topk import TopK
from loosestep.wire.two_level import Hosts, TwoLevel, exact_like, lives_in_rooms

__all__ = [
    "Cast",
    "ErrorFeedback",
    "Handle",
    "Hosts",
    "Int2",
    "Int4",
    "Int8",
    "Mean",
    "Native",
    "NonFinite",
    "Reducer",
    "ReplicaFeedback",
    "Resident",
    "Rounding",
    "Scaled",
    "Ternary",
    "TopK",
    "Traffic",
    "TwoLevel",
    "check_reducer",
    "check_suits_gradients",
    "exact_like",
    "leaves_apart",
    "lives_in_rooms",
    "mean_into",
]
