"""How a buffer becomes its group's mean."""

from loosestep.comm.codecs.rounding import Rounding
from loosestep.comm.reducers.backend import AllReduce
from loosestep.comm.reducers.cast import Cast
from loosestep.comm.reducers.feedback import ErrorFeedback
from loosestep.comm.reducers.mean import Mean, mean_into
from loosestep.comm.reducers.quantize import Int2, Int4, Int8, Ternary
from loosestep.comm.reducers.random_mask import RandomMask
from loosestep.comm.reducers.reducer import (
    NOTHING,
    Handle,
    NonFinite,
    Place,
    Reducer,
    State,
    check_reducer,
    check_suits_gradients,
)
from loosestep.comm.reducers.replica_feedback import ReplicaFeedback
from loosestep.comm.reducers.shared_memory_mean import SharedMemoryMean
from loosestep.comm.reducers.topk import TopK
from loosestep.comm.reducers.two_level import (
    RanksOfHost,
    TwoLevel,
    check_hosts_fit,
)
from loosestep.telemetry.traffic import Traffic

__all__ = [
    "NOTHING",
    "AllReduce",
    "Cast",
    "ErrorFeedback",
    "Handle",
    "Int2",
    "Int4",
    "Int8",
    "Mean",
    "NonFinite",
    "Place",
    "RandomMask",
    "RanksOfHost",
    "Reducer",
    "ReplicaFeedback",
    "Rounding",
    "SharedMemoryMean",
    "State",
    "Ternary",
    "TopK",
    "Traffic",
    "TwoLevel",
    "check_hosts_fit",
    "check_reducer",
    "check_suits_gradients",
    "mean_into",
]
