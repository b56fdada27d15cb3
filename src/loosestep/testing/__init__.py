"""What tests need, the library's and yours: real ranks, and what a strategy must come to.

`run_ranks` runs a function on real ranks, a `RankPool` on ranks that stay. `check` trains your
model by a strategy on real ranks and compares it with `train_replicas`, the same in one process and
in plain tensor code. `RecordingReducer` says what was averaged.
"""

from loosestep.testing.checking import check
from loosestep.testing.oracle import train_replicas
from loosestep.testing.pool import RankPool, RanksFailed, run_ranks
from loosestep.testing.recording import RecordingReducer

__all__ = [
    "RankPool",
    "RanksFailed",
    "RecordingReducer",
    "check",
    "run_ranks",
    "train_replicas",
]
