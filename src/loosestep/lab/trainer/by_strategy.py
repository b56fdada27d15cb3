"""How a contender shares: a strategy of loosestep, or what PyTorch itself has (``in_tree``)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from loosestep.attaching.attached import Attached, attach
from loosestep.comm.group import Group
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.sharding.recognize import is_sharded
from loosestep.strategy.schedules import next_sync
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology
from loosestep.sync.connected import resolve
from loosestep.telemetry import Telemetry


@dataclass(frozen=True)
class OptimizerPlan:
    """How the optimizer is made, sharded or not."""

    kind: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    options: dict[str, Any]

    def make(self) -> torch.optim.Optimizer:
        """Return a plain one."""
        return self.kind(self.groups, **self.options)

    def make_sharded(self, group: dist.ProcessGroup) -> torch.optim.Optimizer:
        """Return one of which every member of a group keeps a part."""
        # Not above: it loads parts of torch that nobody needs who does not shard.
        from loosestep.sharding.optimizer import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.groups, self.kind, group, **self.options)


class Sharing(Protocol):
    """One worker's part in sharing, around a loop of its own."""

    model: torch.nn.Module  # to call
    optimizer: torch.optim.Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside, for all micro-batches but the last."""

    def after_backward(self) -> None:
        """Note that gradients are there."""

    def after_step(self) -> None:
        """Do what is due after ``optimizer.step()`` and is not done yet."""

    def clip(self, norm: float) -> None:
        """Clip the gradients' norm."""

    def arrive(self) -> None:
        """Wait for an average under way, which is applied when it is due."""

    def averaged(self) -> AbstractContextManager[None]:
        """Hold the average of all replicas inside."""

    def finalize(self) -> None:
        """Average what was not averaged yet."""

    def next_sync(self, step: int) -> int | None:
        """Return after how many steps parameters are averaged next."""

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the optimizer's state; None: another worker keeps it for this one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the strategy must remember."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take that back."""

    def start_at(self, step: int) -> None:
        """Go on at a step with equal replicas and nothing to remember."""

    def close(self) -> None:
        """Leave process groups and hooks."""


class Ours:
    """A strategy of loosestep on a plain module."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerPlan,
        strategy: Strategy,
        telemetry: Telemetry,
        timeout: float,
    ) -> None:
        self.model, self.strategy = model, strategy
        self._shards: Group | None = None  # of a sharded optimizer
        if strategy.sharding is None:
            self.optimizer = optimizer.make()
        else:
            topology = resolve(strategy.topology or Topology.from_hosts(timeout=timeout))
            self._shards = Group.make(topology.members(self._level(topology)), topology.timeout)
            self.optimizer = optimizer.make_sharded(self._shards.process_group)
        self.run: Attached = attach(
            model, self.optimizer, strategy, telemetry=telemetry, timeout=timeout
        )

    def _level(self, topology: Topology) -> str:
        """Return the narrowest level that shares gradients."""
        levels = self.strategy.schedule.gradient_levels()
        return next(level for level in topology.levels if level in levels)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside."""
        return self.run.no_sync()

    def after_backward(self) -> None:
        """Do nothing: telemetry knows."""

    def after_step(self) -> None:
        """Do nothing: the optimizer's step has done it."""

    def clip(self, norm: float) -> None:
        """Clip whole gradients, or the shards of them together."""
        if is_sharded(self.optimizer):
            self.optimizer.clip_grad_norm_(norm)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def arrive(self) -> None:
        """Wait for what travels."""
        self.run.arrive()

    def averaged(self) -> AbstractContextManager[None]:
        """Hold the average of all replicas inside."""
        return self.run.averaged()

    def finalize(self) -> None:
        """Average what was not averaged yet."""
        self.run.finalize()

    def next_sync(self, step: int) -> int | None:
        """Ask the schedule."""
        upcoming = next_sync(self.strategy.schedule, step)
        return None if upcoming is None else upcoming[0]

    def optimizer_state(self) -> dict[str, Any] | None:
        """Return the state; of a sharded optimizer all of it, on its group's first worker."""
        if not is_sharded(self.optimizer):
            return self.optimizer.state_dict()
        group = self.optimizer.process_group
        self.optimizer.consolidate_state_dict(to=0)
        return self.optimizer.state_dict() if dist.get_rank(group) == 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the clock, and what averages remember."""
        return self.run.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue there."""
        self.run.load_state_dict(state_dict)

    def start_at(self, step: int) -> None:
        """Set the clock; what lossy averages remember of other values is dropped."""
        fresh = self.run.state_dict()
        self.run.load_state_dict({**fresh, "clock": {"step": step}, "kept": {}})

    def close(self) -> None:
        """Detach."""
        self.run.detach()
        if self._shards is not None:
            self._shards.close()


def levels_of(num_workers: int, hosts: int | None) -> Topology | None:
    """Return the levels host and world for workers that play so many hosts; None: ask them."""
    if hosts is None:
        return None
    if num_workers % hosts:
        raise BadInput(f"{num_workers} workers cannot be {hosts} equal hosts")
    return Topology.from_sizes({"host": num_workers // hosts, "world": num_workers})
