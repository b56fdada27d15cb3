"""A model connected with the contender that the settings name."""

from __future__ import annotations

from dataclasses import replace

import torch

from loosestep.comm.reducers import TwoLevel
from loosestep.lab.trainer.by_strategy import OptimizerPlan, Ours, Sharing
from loosestep.lab.trainer.contenders import plan_of
from loosestep.lab.trainer.in_tree import InTree
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.settings import Settings
from loosestep.strategy.schedules import always_shares_gradients
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology
from loosestep.sync.connected import resolve
from loosestep.telemetry import Telemetry


def make_sharing(
    settings: Settings,
    model: torch.nn.Module,
    optimizer: OptimizerPlan,
    topology: Topology,
    telemetry: Telemetry,
) -> Sharing:
    """Connect a model; all workers call it."""
    spec = settings.spec
    if (plan := plan_of(spec)) is not None:
        return InTree(model, optimizer, plan, topology, telemetry)
    real = resolve(Topology.from_hosts(timeout=topology.timeout))
    strategy = divided(spec.strategy(topology), topology, real)
    return Ours(model, optimizer, strategy, telemetry, settings.timeout)


def divided(strategy: Strategy, topology: Topology, real: Topology) -> Strategy:
    """Let the workers of a host divide averages, where shared gradients keep them equal.

    That is so on hosts whose workers share gradients at every step; those of ``--hosts`` may be
    others than a reducer finds.
    """
    reducer, hosts = strategy.reducer, real.levels["host"]
    equal = hosts == topology.levels["host"] and always_shares_gradients(strategy.schedule)
    several = len(hosts) > 1 and any(len(host) > 1 for host in hosts)
    if reducer.leaves_apart and several and not equal:
        raise BadInput(
            f"{reducer} takes a machine for one replica, so its workers must share gradients at "
            "every step; give gradients=host and no --hosts, or a reducer with +ef in place of +rf"
        )
    if not equal or strategy.sharding or not isinstance(reducer, TwoLevel):
        return strategy
    agreeing = TwoLevel(reducer.inner, ranks_of_host="equal", ranks_per_host=reducer.ranks_per_host)
    return replace(strategy, reducer=agreeing)
