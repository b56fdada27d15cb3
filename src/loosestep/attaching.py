"""One line that makes a training loop share what a strategy says.

backward        the gradient adapter asks the schedule which level shares gradients
optimizer.step  the user's line
after it        the clock ticks, the schedule says which level averages, it averages
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep.adapting import check_sharded, make_adapter
from loosestep.announcing import announce
from loosestep.checks import check_instance, check_seconds
from loosestep.clock import Clock
from loosestep.errors import NotAttachable
from loosestep.groups import require_process_group
from loosestep.hooks.gradients import GradientSharing
from loosestep.optim.idle import only_creates_state
from loosestep.optim.prepare import ScalerLink
from loosestep.optim.zero import ZeroRedundancyOptimizer
from loosestep.peers import Peers
from loosestep.policies import unwrap_compiled
from loosestep.replica import Replica, ShardedReplica
from loosestep.scaling import ScalerWatch
from loosestep.schedule import chains_of
from loosestep.strategy import Strategy
from loosestep.syncing import Syncs
from loosestep.telemetry import Telemetry
from loosestep.topology import Topology

VERSION = 1


_attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    scaler: torch.amp.GradScaler | None = None,
    telemetry: Telemetry | None = None,
    timeout: float | None = None,
) -> Attached:
    """Make ``optimizer.step()`` share what ``strategy`` says; the loop stays as it is.

    ``model`` is a plain module, a DDP module or an FSDP2 module, compiled or not. A GradScaler
    that is used in the loop must be given. ``timeout`` bounds every wait, in seconds. This is a
    collective call: all ranks make it, with the same arguments.

    Example::

        with attach(model, optimizer, post_local_sgd(period=8)) as run:
            for inputs, labels in data:
                optimizer.zero_grad()
                loss_fn(model(inputs), labels).backward()
                optimizer.step()
            run.finalize()
    """
    require_process_group()
    check_seconds("timeout", timeout)
    _check_arguments(model, optimizer, strategy)
    if scaler is not None:
        check_instance("scaler", scaler, torch.amp.GradScaler, "a torch.amp.GradScaler")
    if telemetry is not None:
        check_instance("telemetry", telemetry, Telemetry, "a Telemetry such as Telemetry()")
    _check_scaler(scaler, strategy)
    return Attached(model, optimizer, strategy, scaler, telemetry or Telemetry(), timeout)


class Attached:
    """A model, an optimizer and a strategy on one clock."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        scaler: torch.amp.GradScaler | None,
        telemetry: Telemetry,
        timeout: float | None,
    ) -> None:
        self.model, self.optimizer, self.strategy = unwrap_compiled(model), optimizer, strategy
        self.clock, self.telemetry = Clock(), telemetry
        self._idle = False  # whether this step only creates optimizer state
        with ExitStack() as undo:
            self._settle(undo, scaler, timeout)
            self._hook(undo, scaler)
            self._undo = undo.pop_all()
        announce(strategy, self.topology, self.model, self._syncs.nbytes)

    def _settle(
        self, undo: ExitStack, scaler: torch.amp.GradScaler | None, timeout: float | None
    ) -> None:
        """Compare what the ranks have, start from one point, and connect gradients."""
        strategy = self.strategy
        self.topology = _own_topology(strategy.topology, self.model, timeout)
        undo.callback(self.topology.close)
        _check_levels(strategy, self.topology)
        self._sharing = GradientSharing(
            self.clock, strategy.schedule, self.topology.peers, self.telemetry
        )
        # Gradients travel while an average is under way: then it needs process groups of its own.
        self._air = _twin(self.topology) if strategy.overlap_steps else self.topology
        undo.callback(self._air.close)
        replica = self._make_replica(scaler)
        undo.callback(replica.close)
        replica.settle()  # first: ranks whose strategies differ need not make the same groups
        for level in self.topology.levels:  # now, and not in the middle of a backward
            self.topology.peers(level)
        self._syncs = Syncs(
            replica, strategy.schedule, self.clock, self.telemetry, strategy.overlap_steps
        )
        undo.callback(self._syncs.close)
        self._adapter = make_adapter(self.model, self._sharing, replica, self.topology, strategy)
        undo.callback(self._adapter.close)

    def _hook(self, undo: ExitStack, scaler: torch.amp.GradScaler | None) -> None:
        """Begin to act on the optimizer's steps."""
        undo.callback(self.optimizer.register_step_pre_hook(self._before_step).remove)
        undo.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
        self._scaler: ScalerWatch | None = None
        if scaler is not None:
            self._let_unscale_shards(undo, scaler)
            self._scaler = ScalerWatch(
                scaler, self.optimizer, self._gradient_peers, self._step_done
            )
            undo.callback(self._scaler.close)
        _attached.add(self.optimizer)
        undo.callback(_attached.discard, self.optimizer)
        self._follow_gradients()

    def _let_unscale_shards(self, undo: ExitStack, scaler: torch.amp.GradScaler) -> None:
        """Let a scaler reach the gradients of a sharded optimizer, unless it can already."""
        zero = self.optimizer
        if not isinstance(zero, ZeroRedundancyOptimizer) or not scaler.is_enabled():
            return
        if zero.options.scaler is None:
            link = ScalerLink(scaler, zero, lambda: zero.wire.parameter_peers)
            undo.callback(link.close)
            link.take_over(lambda: zero.gradients.held())

    def __repr__(self) -> str:
        named = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return (
            f"Attached({named}, step {self.clock.step}, {self.strategy.schedule}, {self.topology})"
        )

    # What users call.

    def finalize(self) -> None:
        """Average the steps since the last sync over the widest level that averages.

        A rank that runs out of batches before the others calls it too: it keeps answering their
        syncs with its own last parameters until all have come here. (Where gradients are shared
        at every step there is nothing to answer with; give all ranks the same number of batches.)
        """
        self._syncs.finalize()

    def arrive(self) -> None:
        """Wait for an average under way, if there is one; it is still applied when it is due.

        For whoever measures: ``averaged`` and ``state_dict`` would wait for it too.
        """
        self._syncs.arrive()

    def state_dict(self) -> dict[str, Any]:
        """Return clock, reducer and averages as plain data: no process groups, no pickle.

        An average under way is waited for (the other ranks' are then on their way too) and saved
        as what is still to be applied; training goes on as if nothing had been saved.
        """
        syncs = self._syncs.state_dict()  # first: what is under way changes the reducer's state
        gradients = self.strategy.gradient_reducer
        return {
            "version": VERSION,
            "clock": self.clock.state_dict(),
            "reducer": self.strategy.reducer.state_dict(),
            "gradient_reducer": gradients.state_dict() if gradients else {},
            **syncs,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, also in the middle of a period.

        All ranks load together; an average that is under way is dropped.
        """
        if state_dict.get("version") != VERSION:
            raise ValueError(
                f"this state has version {state_dict.get('version')!r}, expected {VERSION}; "
                "was it written by attach(...).state_dict()?"
            )
        self._syncs.load_state_dict(state_dict)  # first: what is under way uses the reducer
        self.clock.load_state_dict(state_dict["clock"])
        self.strategy.reducer.load_state_dict(state_dict["reducer"])
        if self.strategy.gradient_reducer is not None:
            self.strategy.gradient_reducer.load_state_dict(state_dict.get("gradient_reducer", {}))
        self._follow_gradients()

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return bytes, seconds, syncs and drift since the start, by ``kind/level``."""
        return self.telemetry.metrics()

    def averaged(self) -> AbstractContextManager[None]:
        """Hold the average of all replicas inside the ``with`` block, for evaluation or saving.

        Training is not disturbed: afterwards every rank has its own parameters again. Needs one
        copy of the model, and all ranks must enter together.
        """
        return self._syncs.averaged()

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside the block: for all micro-batches but the last."""
        return self._adapter.no_sync()

    def detach(self) -> None:
        """Take every hook away and free the process groups; safe to call twice."""
        self._undo.close()

    def __enter__(self) -> Attached:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Detach."""
        self.detach()

    # What happens around a step.

    def _before_step(self, _: object, __: object, kwargs: dict[str, Any]) -> None:
        self._idle = only_creates_state(self.optimizer, kwargs)
        if not self._idle:
            self._adapter.before_step()

    def _after_step(self, *_: object) -> None:
        if not self._idle and (self._scaler is None or not self._scaler.stepping):
            self._step_done()

    def _step_done(self) -> None:
        """Count the step and average if it is due."""
        self._sharing.record(self.clock.step)
        self._syncs.follow(self.clock.tick())
        self._follow_gradients()

    def _follow_gradients(self) -> None:
        """Let DDP broadcast buffers while gradients are shared by all, and not in local phases."""
        level = self.strategy.schedule(self.clock.step).gradients
        self._adapter.broadcast_buffers(
            level is not None and self.topology.members(level) == self.topology.ranks
        )

    # What is settled at the start.

    def _make_replica(self, scaler: torch.amp.GradScaler | None) -> Replica:
        parts = (self.strategy, self._air)
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            check_sharded(self.model, self.optimizer, self.strategy, scaler)
            return ShardedReplica(self.model, self.optimizer, *parts)
        if self.strategy.sharding is not None:
            raise NotAttachable(
                f"this strategy needs a sharded optimizer, got {type(self.optimizer).__name__}; "
                "wrap it: ZeroRedundancyOptimizer(params, AdamW, process_group=..., lr=...)"
            )
        return Replica(self.model, self.optimizer, *parts)

    def _gradient_peers(self) -> Peers | None:
        level = self.strategy.schedule(self.clock.step).gradients
        return None if level is None else self.topology.peers(level)


def _own_topology(
    topology: Topology | None, model: torch.nn.Module, timeout: float | None
) -> Topology:
    """Return a topology whose process groups belong to this attachment alone."""
    if topology is None:
        ranks = None
        if isinstance(model, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(model.process_group)
        return Topology.from_hosts(ranks=ranks, timeout=timeout)
    return _twin(topology, timeout)


def _twin(topology: Topology, timeout: float | None = None) -> Topology:
    """Return the same levels with other process groups."""
    return Topology(
        topology.levels,
        weights=topology.weights,
        timeout=topology.timeout if timeout is None else timeout,
    )


def _check_arguments(model: object, optimizer: object, strategy: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be one such as post_local_sgd(period=8), got {type(strategy).__name__}"
        )
    if optimizer in _attached:
        raise NotAttachable("this optimizer is attached already; detach() it first")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained and not any(id(p) in stepped for p in trained):
        raise NotAttachable(
            f"{type(optimizer).__name__} has none of the parameters of this "
            f"{type(model).__name__}, so its steps say nothing about them; make it from "
            "model.parameters()"
        )


def _check_scaler(scaler: torch.amp.GradScaler | None, strategy: Strategy) -> None:
    reducer = strategy.gradient_reducer
    if scaler is None or not scaler.is_enabled():
        return
    if getattr(reducer, "on_nonfinite", None) is not None:
        raise NotAttachable(
            f"a GradScaler lowers its scale when it finds infinite gradients, but {reducer} "
            "does not let any through; use gradient_reducer=Cast(torch.bfloat16) or none, or no "
            "scaler"
        )


def _check_levels(strategy: Strategy, topology: Topology) -> None:
    schedule, known = strategy.schedule, list(topology.levels)
    for level in sorted(schedule.gradient_levels() | schedule.parameter_levels()):
        if level not in known:
            raise ValueError(
                f"the schedule names the level {level!r}, which the topology does not have; "
                f"it has {known}"
            )
    for chain in chains_of(schedule):
        if list(chain) != sorted(chain, key=known.index):
            raise ValueError(
                f"a schedule must name its levels from narrow to wide: it has {list(chain)}, the "
                f"topology {known}; give them as {sorted(chain, key=known.index)}"
            )
