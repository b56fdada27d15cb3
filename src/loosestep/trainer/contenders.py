"""Whatever can be trained with, by name: loosestep's recipes and what PyTorch itself has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from loosestep.recipes import Strategy
from loosestep.schedule import always_shares_gradients
from loosestep.telemetry import Telemetry
from loosestep.topology import Topology
from loosestep.trainer.in_tree import CONTENDERS, InTree, Plan
from loosestep.trainer.mistakes import BadInput, nearest
from loosestep.trainer.settings import Settings
from loosestep.trainer.sharing import OptimizerPlan, Ours, Sharing
from loosestep.trainer.specs import OURS, Spec, arguments_of, needs
from loosestep.wire import TwoLevel, leaves_apart


def names() -> list[str]:
    """Return the names of all contenders."""
    return [*OURS, *CONTENDERS]


def defaults() -> list[Spec]:
    """Return every contender that can do without options, or with periods by level."""
    makers: dict[str, Callable[..., Any]] = {**OURS, **CONTENDERS}
    needed = {name: needs(make) for name, make in makers.items()}
    return [Spec(name, options) for name, options in needed.items() if options is not None]


def check_spec(spec: Spec) -> None:
    """Raise ``BadInput`` for what is no contender; needs no workers."""
    if spec.name in CONTENDERS:
        _plan(spec)
    elif spec.name in OURS:
        spec.strategy()
    else:
        raise BadInput(
            f"there is no strategy {spec.name!r}{nearest(spec.name, names())}; there are "
            f"{', '.join(names())}"
        )


def make_sharing(
    settings: Settings,
    model: torch.nn.Module,
    optimizer: OptimizerPlan,
    topology: Topology,
    telemetry: Telemetry,
) -> Sharing:
    """Connect a model; all workers call it."""
    spec = settings.spec
    if spec.name in CONTENDERS:
        return InTree(model, optimizer, _plan(spec), topology, telemetry)
    strategy = divided(
        spec.strategy(topology), topology, Topology.from_hosts(timeout=topology.timeout)
    )
    return Ours(model, optimizer, strategy, telemetry, settings.timeout)


def divided(strategy: Strategy, topology: Topology, real: Topology) -> Strategy:
    """Let the workers of a host divide averages, where shared gradients keep them equal.

    That is so on hosts whose workers share gradients at every step; those of ``--hosts`` may be
    others than a reducer finds.
    """
    reducer, hosts = strategy.reducer, real.levels["host"]
    equal = hosts == topology.levels["host"] and always_shares_gradients(strategy.schedule)
    several = len(hosts) > 1 and any(len(host) > 1 for host in hosts)
    if leaves_apart(reducer) and several and not equal:
        raise BadInput(
            f"{reducer} takes a machine for one replica, so its workers must share gradients at "
            "every step; give gradients=host and no --hosts, or a wire with +ef in place of +rf"
        )
    if not equal or strategy.sharding or not isinstance(reducer, TwoLevel):
        return strategy
    agreeing = TwoLevel(reducer.inner, hosts="agree", ranks_per_host=reducer.ranks_per_host)
    return replace(strategy, reducer=agreeing)


def _plan(spec: Spec) -> Plan:
    make = CONTENDERS[spec.name]
    try:
        return make(**arguments_of(spec.name, make, spec.options))
    except ValueError as error:
        raise BadInput(f"strategy {spec}: {error}") from error
