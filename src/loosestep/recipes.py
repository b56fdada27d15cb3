"""Strategies: what is shared, between whom, when and how; and the named ones.

A recipe is a short function that puts parts together. To make your own, put together other parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loosestep.overlap import check_can_overlap
from loosestep.policies import Buffers, Initial, OptimizerState, Sharding, choose
from loosestep.schedule import (
    Schedule,
    after,
    always,
    check_overlap,
    every,
    levels,
    most_seldom,
)
from loosestep.topology import Topology
from loosestep.wire import Reducer, TwoLevel, check_suits_gradients


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
        if not isinstance(self.schedule, Schedule):
            raise TypeError(
                f"schedule must be one such as every(8), got {self.schedule!r}; see "
                "loosestep.schedule"
            )
        if not isinstance(self.reducer, Reducer):
            raise TypeError(f"reducer must be one such as Mean(), got {self.reducer!r}")
        if not isinstance(self.gradient_reducer, Reducer | None):
            raise TypeError(
                f"gradient_reducer must be one such as Int8(), got {self.gradient_reducer!r}"
            )
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


def ddp(*, topology: Topology | None = None, gradient_reducer: Reducer | None = None) -> Strategy:
    """Share gradients with the world at every step: plain data parallelism.

    >>> ddp().schedule(7)
    Sync(gradients='world', parameters=None)
    """
    return Strategy(
        schedule=always(gradients=_widest(topology)),
        topology=topology,
        gradient_reducer=gradient_reducer,
    )


def post_local_sgd(
    period: int = 4,
    *,
    warmup_steps: int = 100,
    gradients: str | None = "host",
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    overlap_steps: int = 0,
) -> Strategy:
    """Train like DDP for ``warmup_steps``, then average parameters every ``period`` steps.

    In between gradients are shared on the level ``gradients`` only (None: not at all).
    With ``overlap_steps`` an average travels while that many steps are taken, and is applied then.
    Post-local SGD, https://arxiv.org/abs/1808.07217.

    >>> schedule = post_local_sgd(4, warmup_steps=2).schedule
    >>> schedule(1).gradients, schedule(2).gradients, schedule(6).parameters
    ('world', 'host', 'world')
    """
    world = _widest(topology)
    local = every(period, world, gradients=gradients)
    return Strategy(
        schedule=after(warmup_steps, local, always(gradients=world)),
        topology=topology,
        reducer=TwoLevel() if reducer is None else reducer,
        gradient_reducer=gradient_reducer,
        overlap_steps=overlap_steps,
    )


def hierarchical_sgd(
    periods: Mapping[str, int],
    *,
    warmup_steps: int = 0,
    gradients: str | None = None,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    overlap_steps: int = 0,
) -> Strategy:
    """Average narrow levels often and wide ones seldom: ``{"host": 4, "world": 32}``.

    With ``overlap_steps`` an average travels for that many steps, or until the next one is due.
    Hierarchical SGD, https://arxiv.org/abs/2010.12998.

    >>> schedule = hierarchical_sgd({"host": 4, "world": 8}).schedule
    >>> [schedule(step).parameters for step in (3, 4, 8)]
    [None, 'host', 'world']
    """
    world = _widest(topology)
    return Strategy(
        schedule=after(warmup_steps, levels(periods, gradients=gradients), always(gradients=world)),
        topology=topology,
        reducer=TwoLevel() if reducer is None else reducer,
        gradient_reducer=gradient_reducer,
        overlap_steps=overlap_steps,
    )


def zero(
    period: int | None = None,
    *,
    gradients: str | None = None,
    stage: int | None = None,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
) -> Strategy:
    """Shard the optimizer inside a group; with ``period``, average between groups that seldom.

    Needs a ``ZeroRedundancyOptimizer`` whose ranks are one of the topology's levels. Gradients are
    shared on the level ``gradients`` at every step: by default with the world, or where there is
    a period, on the host. ZeRO, https://arxiv.org/abs/1910.02054.

    >>> zero().schedule(7)
    Sync(gradients='world', parameters=None)
    >>> zero(8).schedule(8)
    Sync(gradients='host', parameters='world')
    """
    world = _widest(topology)
    schedule: Schedule = always(gradients=gradients or world)
    if period is not None:
        schedule = every(period, world, gradients=gradients or "host")
    return Strategy(
        schedule=schedule,
        topology=topology,
        reducer=TwoLevel() if reducer is None else reducer,
        sharding=Sharding(stage=stage),
    )


RECIPES: dict[str, Callable[..., Strategy]] = {
    recipe.__name__: recipe for recipe in (ddp, post_local_sgd, hierarchical_sgd, zero)
}


def _widest(topology: Topology | None) -> str:
    return "world" if topology is None else topology.widest
