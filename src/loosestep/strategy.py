"""A strategy: what is shared, between whom, when and how."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from loosestep.checks import check_whole
from loosestep.overlap import check_can_overlap
from loosestep.policies import Buffers, Initial, OptimizerState, Sharding, choose
from loosestep.schedule import Schedule, check_overlap, most_seldom
from loosestep.topology import Topology, check_topology
from loosestep.wire import Reducer, TwoLevel, check_reducer, check_suits_gradients


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Everything that ``attach`` needs to know.

    Example::

        Strategy(schedule=after(100, levels({"host": 4, "world": 32})), buffers="broadcast")
    """

    schedule: Schedule  # when, and on which level
    topology: Topology | None = None  # between whom; None: the levels host and world
    reducer: Reducer = field(default_factory=TwoLevel)  # how parameters are averaged
    buffers: Buffers | str = Buffers.MEAN  # what a sync does to BatchNorm statistics and the like
    optimizer_state: OptimizerState | str = OptimizerState.KEEP  # and to momentum and the like
    initial: Initial | str = Initial.BROADCAST  # what if replicas differ at the start
    sharding: Sharding | None = None  # given: the optimizer must be sharded, and is kept so
    gradient_reducer: Reducer | None = None  # how gradients are; None: the backend's all-reduce
    overlap_steps: int = 0  # more: longer hidden behind training, applied later; 0: at once

    def __post_init__(self) -> None:
        """Turn names into policies and refuse what is none."""
        if isinstance(self.schedule, type) or not isinstance(self.schedule, Schedule):
            raise TypeError(
                f"schedule must be one such as every(8), got {self.schedule!r}; see "
                "loosestep.schedule"
            )
        if self.topology is not None:
            check_topology(self.topology)
        check_reducer("reducer", self.reducer)
        if self.gradient_reducer is not None:
            check_reducer("gradient_reducer", self.gradient_reducer, "Int8()")
        check_suits_gradients(self.gradient_reducer)
        if not isinstance(self.sharding, Sharding | None):
            raise TypeError(
                f"sharding must be one such as Sharding(stage=2), got {self.sharding!r}"
            )
        for part in (self.schedule, self.reducer, self.gradient_reducer):
            if re.search(r" at 0x[0-9a-f]+", repr(part)):
                raise TypeError(
                    f"{type(part).__name__} needs a __repr__ that is equal on all ranks, since "
                    "they compare strategies by it; make it a frozen dataclass"
                )
        check_whole("overlap_steps", self.overlap_steps, hint="0 averages at once")
        check_overlap(self.overlap_steps, most_seldom(self.schedule) if self.overlap_steps else [])
        object.__setattr__(self, "buffers", choose(Buffers, self.buffers))
        object.__setattr__(self, "optimizer_state", choose(OptimizerState, self.optimizer_state))
        object.__setattr__(self, "initial", choose(Initial, self.initial))
        check_can_overlap(
            self.overlap_steps, self.reducer, choose(OptimizerState, self.optimizer_state)
        )

    def describe(self) -> str:
        """Return the strategy as one line, to be compared across ranks."""
        policies = (self.buffers, self.optimizer_state, self.initial, self.sharding)
        overlap = f" overlap_steps={self.overlap_steps}" if self.overlap_steps else ""
        named = " ".join(str(policy) for policy in policies)
        gradients = "" if self.gradient_reducer is None else f" by {self.gradient_reducer}"
        return f"{self.schedule}{gradients} {self.reducer} {named}{overlap}"
