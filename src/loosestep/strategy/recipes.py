"""The named strategies.

A recipe is a short function that puts parts together. To make your own, put together other parts.

Parts that need torch are imported when a recipe is called: the command line reads the names and the
arguments of recipes here, and has to answer a mistake at once.

``on_nonfinite`` is what a sync does about parameters that are infinite or NaN on some ranks:
``"raise"`` on all ranks before anything is changed, ``"skip"`` such ranks, or let them ``"pass"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from loosestep.strategy.schedules import Schedule, after, always, every, levels, streaming

if TYPE_CHECKING:
    from loosestep.comm.reducers import Reducer
    from loosestep.strategy.arrivals import Arrival
    from loosestep.strategy.fragments import Fragments
    from loosestep.strategy.gate import Gate
    from loosestep.strategy.gossip import Gossip
    from loosestep.strategy.outer_rules import Outer
    from loosestep.strategy.periods import Rule
    from loosestep.strategy.policies import Sharding
    from loosestep.strategy.strategy import Strategy
    from loosestep.strategy.topology import Topology


def ddp(*, topology: Topology | None = None, gradient_reducer: Reducer | None = None) -> Strategy:
    """Share gradients with the world at every step: plain data parallelism.

    >>> ddp().schedule(7)
    Due(gradients='world', parameters=None)
    """
    schedule = always(gradients=_widest(topology))
    return _strategy(schedule, topology, gradient_reducer=gradient_reducer)


def post_local_sgd(
    period: int | Rule = 4,
    *,
    warmup_steps: int = 0,
    gradients: str | None = "host",
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    overlap_steps: int = 0,
    on_nonfinite: str = "raise",
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
    return _strategy(
        after(warmup_steps, local, always(gradients=world)),
        topology,
        reducer=reducer,
        gradient_reducer=gradient_reducer,
        overlap_steps=overlap_steps,
        on_nonfinite=on_nonfinite,
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
    on_nonfinite: str = "raise",
) -> Strategy:
    """Average narrow levels often and wide ones seldom: ``{"host": 4, "world": 32}``.

    With ``overlap_steps`` an average travels for that many steps, or until the next one is due.
    Hierarchical SGD, https://arxiv.org/abs/2010.12998.

    >>> schedule = hierarchical_sgd({"host": 4, "world": 8}).schedule
    >>> [schedule(step).parameters for step in (3, 4, 8)]
    [None, 'host', 'world']
    """
    world = _widest(topology)
    return _strategy(
        after(warmup_steps, levels(periods, gradients=gradients), always(gradients=world)),
        topology,
        reducer=reducer,
        gradient_reducer=gradient_reducer,
        overlap_steps=overlap_steps,
        on_nonfinite=on_nonfinite,
    )


def zero(
    period: int | None = None,
    *,
    gradients: str | None = None,
    stage: int | None = None,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Shard the optimizer inside a group; with ``period``, average between groups that seldom.

    Needs a ``ZeroRedundancyOptimizer`` whose ranks are one of the topology's levels. Gradients are
    shared on the level ``gradients`` at every step: by default with the world, or where there is
    a period, on the host. ZeRO, https://arxiv.org/abs/1910.02054.

    >>> zero().schedule(7)
    Due(gradients='world', parameters=None)
    >>> zero(8).schedule(8)
    Due(gradients='host', parameters='world')
    """
    world = _widest(topology)
    schedule: Schedule = always(gradients=world if gradients is None else gradients)
    if period is not None:
        schedule = every(period, world, gradients="host" if gradients is None else gradients)
    from loosestep.strategy.policies import Sharding

    sharding = Sharding(stage=stage)
    return _strategy(
        schedule, topology, reducer=reducer, sharding=sharding, on_nonfinite=on_nonfinite
    )


def diloco(
    period: int | Rule = 100,
    *,
    outer: Outer | None = None,
    gate: Gate | None = None,
    warmup_steps: int = 0,
    gradients: str | None = None,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    optimizer_state: str | Mapping[str, int] = "keep",
    overlap_steps: int = 0,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Train locally for ``period`` steps, then let an outer optimizer step from all replicas' mean.

    ``outer`` is Nesterov (rate 0.7, momentum 0.9) unless given. DiLoCo,
    https://arxiv.org/abs/2311.08105. With a ``gate`` for bad workers: EDiT,
    https://arxiv.org/abs/2412.07210.

    >>> diloco(100).outer
    Outer(SGD, lr=0.7, momentum=0.9, nesterov=True)
    """
    from loosestep.strategy.outer_rules import nesterov

    world = _widest(topology)
    return _strategy(
        after(warmup_steps, every(period, world, gradients=gradients), always(gradients=world)),
        topology,
        reducer=reducer,
        gradient_reducer=gradient_reducer,
        outer=nesterov() if outer is None else outer,
        gate=gate,
        optimizer_state=optimizer_state,
        overlap_steps=overlap_steps,
        on_nonfinite=on_nonfinite,
    )


def streaming_diloco(
    period: int = 100,
    num_fragments: int = 4,
    *,
    outer: Outer | None = None,
    fragments: Fragments | None = None,
    warmup_steps: int = 0,
    gradients: str | None = None,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    overlap_steps: int = 1,
    arrival: Arrival | None = None,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Do the same in parts: each is averaged at its own offset, and arrives some steps later.

    So no step sends more than a part, and none waits for it. One part and ``overlap_steps=0`` are
    ``diloco``. Streaming DiLoCo, https://arxiv.org/abs/2501.18512 (which mixes what arrives with
    local parameters: ``arrival=Mix(0.5)``, and sends 4 bits: ``reducer=TwoLevel(Int4())``).

    >>> schedule = streaming_diloco(8, 2).schedule
    >>> [schedule(step).fragment for step in (4, 8, 12)]
    [0, 1, 0]
    """
    from loosestep.strategy.outer_rules import nesterov

    world = _widest(topology)
    turns = streaming(period, num_fragments, world, gradients=gradients)
    return _strategy(
        after(warmup_steps, turns, always(gradients=world)),
        topology,
        reducer=reducer,
        gradient_reducer=gradient_reducer,
        outer=nesterov() if outer is None else outer,
        fragments=fragments,
        overlap_steps=overlap_steps,
        arrival=arrival,
        on_nonfinite=on_nonfinite,
    )


def slowmo(
    period: int | Rule = 12,
    *,
    outer: Outer | None = None,
    warmup_steps: int = 0,
    gradients: str | None = None,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    overlap_steps: int = 0,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Do the same with slow (heavy-ball) momentum, rate 1.0 and momentum 0.5 unless given.

    SlowMo, https://arxiv.org/abs/1910.00643.

    >>> slowmo().outer
    Outer(SGD, lr=1.0, momentum=0.5)
    """
    from loosestep.strategy.outer_rules import slowmo as slow_momentum

    return diloco(
        period,
        outer=slow_momentum() if outer is None else outer,
        warmup_steps=warmup_steps,
        gradients=gradients,
        topology=topology,
        reducer=reducer,
        gradient_reducer=gradient_reducer,
        overlap_steps=overlap_steps,
        on_nonfinite=on_nonfinite,
    )


def snoo(
    period: int | Rule = 30,
    *,
    outer: Outer | None = None,
    topology: Topology | None = None,
    gradient_reducer: Reducer | None = None,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Share gradients at every step, or be one worker; every ``period`` steps, step from the end.

    Nesterov (0.7, 0.5) on how far ``period`` steps have led. One worker is enough, and several are
    one large one. SNOO, https://arxiv.org/abs/2510.15830.

    >>> snoo().schedule(30)
    Due(gradients='world', parameters='world')
    """
    from loosestep.strategy.outer_rules import nesterov

    return diloco(
        period,
        outer=nesterov(0.7, 0.5) if outer is None else outer,
        gradients=_widest(topology),
        topology=topology,
        gradient_reducer=gradient_reducer,
        on_nonfinite=on_nonfinite,
    )


def muloco(
    period: int | Rule = 30,
    *,
    outer: Outer | None = None,
    warmup_steps: int = 0,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    overlap_steps: int = 0,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Send differences in 2 bits with error feedback to Nesterov; meant for Muon inside.

    Give ``attach`` a ``torch.optim.Muon`` of the matrices. The optimizer of the rest is not
    attached, and is stepped before it: a sync takes all trained parameters of the model, whoever
    stepped them. MuLoCo, https://arxiv.org/abs/2505.23725.

    >>> muloco(30).outer
    Outer(SGD, lr=0.7, momentum=0.9, nesterov=True)
    """
    from loosestep.comm.reducers import ErrorFeedback, Int2, TwoLevel

    return diloco(
        period,
        outer=outer,
        warmup_steps=warmup_steps,
        topology=topology,
        reducer=TwoLevel(ErrorFeedback(Int2())) if reducer is None else reducer,
        overlap_steps=overlap_steps,
        on_nonfinite=on_nonfinite,
    )


def sparseloco(
    period: int | Rule = 30,
    *,
    outer: Outer | None = None,
    warmup_steps: int = 0,
    topology: Topology | None = None,
    reducer: Reducer | None = None,
    overlap_steps: int = 0,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Send the 64 largest of every 4096 differences in 2 bits, and step by their mean.

    What is not sent is kept and fades by 0.95; that takes the place of outer momentum, so the outer
    step is SGD's with a rate of 1.0. SparseLoCo, https://arxiv.org/abs/2508.15706.

    >>> sparseloco().outer
    Outer(SGD, lr=1.0)
    """
    import torch

    from loosestep.comm.reducers import ErrorFeedback, TopK, TwoLevel
    from loosestep.strategy.outer_rules import Outer

    sparse = TwoLevel(ErrorFeedback(TopK(64 / 4096, bits=2), decay=0.95))
    return diloco(
        period,
        outer=Outer(torch.optim.SGD, lr=1.0) if outer is None else outer,
        warmup_steps=warmup_steps,
        topology=topology,
        reducer=sparse if reducer is None else reducer,
        overlap_steps=overlap_steps,
        on_nonfinite=on_nonfinite,
    )


def desloc(
    period: int | Rule = 32,
    *,
    optimizer_state: Mapping[str, int] | None = None,
    warmup_steps: int = 0,
    gradients: str | None = None,
    topology: Topology | None = None,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Average parameters every ``period`` steps, and an optimizer's state at fewer of these syncs.

    Adam's first moment at every third and the second at every sixth unless told otherwise.
    DES-LOC, https://arxiv.org/abs/2505.22549.

    >>> desloc().optimizer_state.due(6) == {"exp_avg", "exp_avg_sq"}
    True
    """
    world = _widest(topology)
    periods = {"exp_avg": 3, "exp_avg_sq": 6} if optimizer_state is None else optimizer_state
    return _strategy(
        after(warmup_steps, every(period, world, gradients=gradients), always(gradients=world)),
        topology,
        optimizer_state=periods,
        on_nonfinite=on_nonfinite,
    )


def noloco(
    period: int = 50,
    *,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.9,
    warmup_steps: int = 0,
    topology: Topology | None = None,
    on_nonfinite: str = "raise",
) -> Strategy:
    """Train locally for ``period`` steps, then average with one peer, another one every time.

    Slow weights take a step with momentum ``alpha`` and rate ``beta``, and move to the partner's by
    ``gamma``. Replicas differ until ``finalize``. NoLoCo, https://arxiv.org/abs/2506.10911.

    >>> noloco(50).gossip
    Gossip(step=NoLoCo(alpha=0.5, beta=0.7, gamma=0.9))
    """
    from loosestep.strategy.gossip import Gossip, NoLoCo

    world = _widest(topology)
    return _strategy(
        after(warmup_steps, every(period, world), always(gradients=world)),
        topology,
        gossip=Gossip(NoLoCo(alpha, beta, gamma)),
        on_nonfinite=on_nonfinite,
    )


RECIPES: dict[str, Callable[..., Strategy]] = {
    recipe.__name__: recipe
    for recipe in (
        ddp,
        post_local_sgd,
        hierarchical_sgd,
        zero,
        diloco,
        streaming_diloco,
        slowmo,
        snoo,
        muloco,
        sparseloco,
        desloc,
        noloco,
    )
}


def _widest(topology: Topology | None) -> str:
    if topology is None:
        return "world"
    from loosestep.strategy.topology import check_topology

    check_topology(topology)
    return topology.widest


def _strategy(
    schedule: Schedule,
    topology: Topology | None,
    *,
    reducer: Reducer | None = None,
    gradient_reducer: Reducer | None = None,
    outer: Outer | None = None,
    gate: Gate | None = None,
    gossip: Gossip | None = None,
    optimizer_state: str | Mapping[str, int] = "keep",
    fragments: Fragments | None = None,
    overlap_steps: int = 0,
    arrival: Arrival | None = None,
    sharding: Sharding | None = None,
    on_nonfinite: str = "raise",
) -> Strategy:
    from loosestep.comm.reducers import TwoLevel
    from loosestep.strategy.arrivals import Delta
    from loosestep.strategy.strategy import Strategy

    return Strategy(
        schedule=schedule,
        topology=topology,
        reducer=TwoLevel() if reducer is None else reducer,
        gradient_reducer=gradient_reducer,
        outer=outer,
        gate=gate,
        gossip=gossip,
        optimizer_state=optimizer_state,
        fragments=fragments,
        overlap_steps=overlap_steps,
        arrival=Delta() if arrival is None else arrival,
        sharding=sharding,
        on_nonfinite=on_nonfinite,
    )
