"""A strategy: what is shared, between whom, when and how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loosestep.comm.reducers import (
    Mean,
    NonFinite,
    Reducer,
    TwoLevel,
    check_reducer,
    check_suits_gradients,
)
from loosestep.comm.reducers.reducer import check_policy, check_suits_parameters, policy_of
from loosestep.errors import check_instance, check_whole, choose
from loosestep.strategy.arrivals import Arrival, Delta
from loosestep.strategy.fragments import Fragments
from loosestep.strategy.gate import Gate
from loosestep.strategy.gossip import Gossip
from loosestep.strategy.outer_rules import Outer, check_outer
from loosestep.strategy.policies import (
    Buffers,
    Initial,
    OptimizerState,
    Sharding,
    StatePeriods,
    choose_state,
)
from loosestep.strategy.schedules import Schedule, check_overlap
from loosestep.strategy.topology import Topology, check_topology


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
    # And to momentum and the like; or which of it at every how manyth sync: {"exp_avg": 3}.
    optimizer_state: OptimizerState | StatePeriods | Mapping[str, int] | str = OptimizerState.KEEP
    initial: Initial | str = Initial.BROADCAST  # what if replicas differ at the start
    sharding: Sharding | None = None  # given: the optimizer must be sharded, and is kept so
    gradient_reducer: Reducer | None = None  # how gradients are; None: the backend's all-reduce
    outer: Outer | Mapping[str, Outer] | None = None  # on the widest level, or by level
    gate: Gate | None = None  # who has a say on the widest level that averages; None: everybody
    gossip: Gossip | None = None  # given: a sync averages with one peer, who rotates
    fragments: Fragments | None = None  # the parts of a schedule that has some; None: by bytes
    overlap_steps: int = 0  # more: longer hidden behind training, applied later; 0: at once
    arrival: Arrival = field(default_factory=Delta)  # what becomes of parameters then
    on_nonfinite: NonFinite | str = NonFinite.RAISE  # what if parameters hold infinities or NaN

    def __post_init__(self) -> None:
        """Turn names into policies and refuse what is none."""
        if isinstance(self.schedule, type) or not isinstance(self.schedule, Schedule):
            raise TypeError(
                f"schedule must be one such as every(8), got {self.schedule!r}; one of your own "
                "is a subclass of loosestep.schedules.Schedule"
            )
        if self.topology is not None:
            check_topology(self.topology)
        check_reducer("reducer", self.reducer)
        check_suits_parameters(self.reducer)
        if self.gradient_reducer is not None:
            check_reducer("gradient_reducer", self.gradient_reducer, "Int8()")
            check_suits_gradients(self.gradient_reducer)
        if not isinstance(self.sharding, Sharding | None):
            raise TypeError(
                f"sharding must be one such as Sharding(stage=2), got {self.sharding!r}"
            )
        check_outer(self.outer, self.schedule.parameter_levels())
        self._check_gate()
        if self.outer and self.reducer.leaves_apart:
            raise ValueError(
                f"{self.reducer} leaves in a replica what was not sent, and an outer optimizer "
                "gives all replicas the same parameters; use ErrorFeedback(...) beside it"
            )
        for part in (
            self.schedule,
            self.reducer,
            self.gradient_reducer,
            self.outer,
            self.gate,
            self.gossip,
            self.fragments,
        ):
            if re.search(r" at 0x[0-9a-f]+", repr(part)):
                raise TypeError(
                    f"{type(part).__name__} needs a __repr__ that is equal on all ranks, since "
                    "they compare strategies by it; make it a frozen dataclass"
                )
        check_whole("overlap_steps", self.overlap_steps, hint="0 averages at once")
        check_overlap(self.overlap_steps, self.schedule.seldom() if self.overlap_steps else [])
        self._check_period()
        self._check_fragments()
        self._check_arrival()
        object.__setattr__(self, "buffers", choose(Buffers, self.buffers))
        state = choose_state(self.optimizer_state)
        object.__setattr__(self, "optimizer_state", state)
        object.__setattr__(self, "initial", choose(Initial, self.initial))
        policy = choose(NonFinite, self.on_nonfinite)
        object.__setattr__(self, "on_nonfinite", policy)
        check_policy(self.reducer, policy)
        self._check_gossip(policy)
        check_can_overlap(self.overlap_steps, self.reducer, policy, state)
        if self.gate is not None and self.overlap_steps and policy is NonFinite.PASS:
            raise ValueError(
                f"{self.gate} leaves out a rank that holds NaN, to which nothing can be added "
                f"when the others' mean arrives overlap_steps={self.overlap_steps} later; use "
                "on_nonfinite='raise', or overlap_steps=0"
            )

    def _check_period(self) -> None:
        """Raise where the next sync could be due before it is known when that is."""
        if self.overlap_steps and self.schedule.timetable().adaptive:
            shortest = self.schedule.seldom()[0]
            if self.overlap_steps >= shortest:
                raise ValueError(
                    f"an average must arrive before the next one is due, which depends on what it "
                    f"brings: overlap_steps is {self.overlap_steps}, and {self.schedule} may come "
                    f"to a period of {shortest}; give overlap_steps <= {shortest - 1}"
                )

    def _check_gate(self) -> None:
        """Raise where there is nothing from which a gate could measure."""
        if self.gate is None:
            return
        check_instance("gate", self.gate, Gate, "one such as Gate(), or None")
        if not self.outer:
            raise ValueError(
                f"{self.gate} goes by how far workers have moved from the anchor of an outer "
                "optimizer, and there is none; give outer=nesterov(), or Outer(SGD, lr=1.0) for "
                "the plain mean"
            )
        if self.sharding is not None:
            raise ValueError(
                f"{self.gate} judges whole replicas, and a sharded optimizer averages shards, "
                "each with its own ranks; leave gate or sharding away"
            )

    def _check_gossip(self, policy: NonFinite) -> None:
        """Raise where pairs that change from sync to sync cannot do what else is asked for."""
        if self.gossip is None:
            return
        check_instance("gossip", self.gossip, Gossip, "one such as Gossip(), or None")
        schedule = self.schedule
        pairs = f"{self.gossip} averages with one peer at a time, who changes"
        if len(schedule.parameter_levels()) != 1 or schedule.num_fragments > 1:
            raise ValueError(
                f"{pairs}, on one level and all parameters at once; give a schedule such as "
                f"every(8), got {schedule}"
            )
        if schedule.timetable().adaptive:
            raise ValueError(f"{pairs}, at steps known before; give a fixed period, got {schedule}")
        if self.outer is not None:
            raise ValueError(
                f"{pairs}, and {self.outer} steps from anchors that all replicas have in common; "
                "give gossip=Gossip(NoLoCo()), whose step is made for pairs, and no outer"
            )
        if self.reducer not in (Mean(), TwoLevel()):
            raise ValueError(
                f"{pairs}, so there is nothing in common that {self.reducer} could go by; give "
                "reducer=Mean()"
            )
        if self.overlap_steps:
            raise ValueError(f"{pairs}, and is waited for; give overlap_steps=0, or no gossip")
        if policy is NonFinite.SKIP:
            raise ValueError(
                f"{pairs}: a pair of which both are skipped would have no mean; use "
                "on_nonfinite='raise'"
            )
        if self.sharding is not None:
            raise ValueError(f"{pairs}: whole replicas; leave gossip or sharding away")

    def _check_fragments(self) -> None:
        """Raise where parts and the schedule of their turns do not fit each other."""
        num, given = self.schedule.num_fragments, self.fragments
        if given is not None:
            check_instance("fragments", given, Fragments, "one such as Fragments(4), or None")
        if given is not None and given.num != num:
            raise ValueError(
                f"the schedule has {num} fragments and fragments={given} has {given.num}; give "
                f"schedule=streaming(period, {given.num})"
            )
        if num == 1:
            return
        one, other = self.schedule.seldom()[:2]
        if self.overlap_steps >= other - one:
            raise ValueError(
                f"a fragment must arrive before it is launched again: overlap_steps is "
                f"{self.overlap_steps}, and a fragment's period {other - one}; give "
                f"overlap_steps <= {other - one - 1}"
            )
        if isinstance(self.outer, Mapping) or len(self.schedule.parameter_levels()) > 1:
            raise ValueError(
                "fragments have their turns on one level; give a schedule that averages on one, "
                "and outer=nesterov() or another one without naming levels"
            )

    def _check_arrival(self) -> None:
        """Raise where nothing arrives late, or nothing could be guessed."""
        check_instance("arrival", self.arrival, Arrival, "one such as Delta() or Mix(0.5)")
        if self.arrival != Delta() and not self.overlap_steps:
            raise ValueError(
                f"{self.arrival} is about averages that arrive later, and overlap_steps is 0; give "
                "overlap_steps=5, or leave arrival away"
            )
        if self.arrival.guesses and not self.outer:
            raise ValueError(
                f"{self.arrival} takes at once what an outer optimizer makes of the own "
                "difference, and there is none; give outer=nesterov(), or leave arrival away"
            )

    def describe(self) -> str:
        """Return the strategy as one line, to be compared across ranks."""
        policies = (self.buffers, self.optimizer_state, self.initial, self.sharding)
        overlap = ""
        if self.overlap_steps:
            overlap = f" overlap_steps={self.overlap_steps} {self.arrival}"
        parts = f" {self.fragments}" if self.fragments else ""
        named = " ".join(str(policy) for policy in policies)
        gradients = "" if self.gradient_reducer is None else f" by {self.gradient_reducer}"
        outer = "" if not self.outer else f" outer={self.outer}"
        gate = "" if self.gate is None else f" {self.gate}"
        pairs = "" if self.gossip is None else f" {self.gossip}"
        late = f"{parts}{overlap}{outer}{gate}{pairs}"
        return f"{self.schedule}{gradients} {self.reducer} {named}{late}"

    @property
    def parts(self) -> Fragments | None:
        """How parameters are split for the schedule; None: they are averaged as a whole."""
        num = self.schedule.num_fragments
        return None if num == 1 else self.fragments or Fragments(num)

    def outer_by_level(self, levels: Sequence[str]) -> Mapping[str, Outer]:
        """Return the outer optimizers of levels; one that is given alone is that of the widest."""
        if self.outer is None or isinstance(self.outer, Mapping):
            return self.outer or {}
        return {levels[-1]: self.outer}


def check_can_overlap(
    overlap_steps: int,
    reducer: Reducer | None,
    on_nonfinite: NonFinite,
    state: OptimizerState | StatePeriods = OptimizerState.KEEP,
) -> None:
    """Raise where differences to a snapshot, applied later, would not do what was asked for."""
    if not overlap_steps:
        return
    if state is OptimizerState.AVERAGE or isinstance(state, StatePeriods):
        raise ValueError(
            f"overlap_steps={overlap_steps} adds a difference that is some steps old, which can "
            "bring Adam's second moments below zero, so optimizer_state cannot be averaged; "
            "use 'keep' or 'reset', or overlap_steps=0"
        )
    if policy_of(reducer, on_nonfinite) is NonFinite.SKIP:
        raise ValueError(
            f"overlap_steps={overlap_steps} adds a difference, and a rank that was skipped "
            "holds NaN, to which nothing can be added; use on_nonfinite='raise', or "
            "overlap_steps=0"
        )
    if reducer is not None and reducer.resident:
        raise ValueError(
            f"overlap_steps={overlap_steps} averages copies of the parameters and not those that "
            f"{reducer} moves into shared memory; use TwoLevel() or Mean(), or overlap_steps=0"
        )
