"""One line that makes a training loop share what a strategy says.

backward        the gradient adapter shares over the level that the schedule named last
optimizer.step  the user's line
after it        the clock ticks and the schedule is asked: what it says is due now is averaged, and
                the next backward reads the same answer
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo as untraced
from torch.nn.parallel import DistributedDataParallel

from loosestep.attaching.adapters import check_sharded, make_adapter
from loosestep.attaching.announcing import announce
from loosestep.attaching.fitting import check_fits, check_levels, check_scaler, choose_scaler
from loosestep.comm.group import require_process_group
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import NonFinite
from loosestep.comm.tensors import Tensors, named_tensors
from loosestep.errors import (
    LoosestepWarning,
    NotAttachable,
    check_instance,
    check_seconds,
    choose,
)
from loosestep.gradients.ddp import refuse_outer_ddp
from loosestep.gradients.grad_scaler import ScalerWatch
from loosestep.gradients.sharing import GradientSharing
from loosestep.sharding.prepare import ScalerLink
from loosestep.sharding.recognize import is_sharded, only_creates_state, scaler_of, unwrap_optimizer
from loosestep.strategy.clock import Clock
from loosestep.strategy.policies import Initial
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology
from loosestep.sync.connected import ConnectedTopology
from loosestep.sync.engine import Engine, Settings
from loosestep.sync.observing import Observer
from loosestep.sync.owners import check_whose, owner
from loosestep.sync.parts import unwrap_compiled
from loosestep.sync.replica import Replica, ShardedReplica, replica_of
from loosestep.telemetry import Telemetry

VERSION = 1


_attached: weakref.WeakSet[Attached] = weakref.WeakSet()


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

    ``model`` is a plain module, a DDP module or an FSDP2 module, compiled or not; ``optimizer`` may
    be compiled too, or be in a wrapper of Accelerate or Lightning. A GradScaler that is used in the
    loop must be given, unless that wrapper has it. ``timeout`` bounds every wait, in seconds. This
    is a collective call: all ranks make it, with the same arguments.

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
    scaler = choose_scaler(scaler, scaler_of(optimizer))
    optimizer = unwrap_optimizer(optimizer)
    check_fits(model, optimizer, strategy, list(_attached))
    if scaler is not None:
        check_instance("scaler", scaler, torch.amp.GradScaler, "a torch.amp.GradScaler")
    if telemetry is not None:
        check_instance("telemetry", telemetry, Telemetry, "a Telemetry such as Telemetry()")
    check_scaler(scaler, strategy)
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
        self.model, self.optimizer = unwrap_compiled(model), optimizer
        self.strategy = strategy
        self.clock, self.telemetry = Clock(), telemetry
        self._idle = False  # whether this step only creates optimizer state
        with ExitStack() as undo:
            self._settle(undo, scaler, timeout)
            self._hook(undo, scaler)
            self._undo = undo.pop_all()
        engine = self._engine
        announce(self.strategy, self.topology, self.model, engine.replica, engine.nbytes)

    def _settle(
        self, undo: ExitStack, scaler: torch.amp.GradScaler | None, timeout: float | None
    ) -> None:
        """Compare what the ranks have, start from one point, and connect gradients."""
        strategy = self.strategy
        averaging = _own_topology(strategy.topology, self.model, timeout)
        undo.callback(averaging.close)
        # Gradients travel while an average is under way: then they need groups of their own.
        self.topology = ConnectedTopology(averaging) if strategy.overlap_steps else averaging
        undo.callback(self.topology.close)
        check_levels(strategy, self.topology)
        self._timetable = strategy.schedule.timetable()
        self._observer = Observer(self._timetable.asks, self.optimizer)
        self._sharing = GradientSharing(
            self.clock, strategy.schedule, self.topology.peers, self.telemetry, strategy.schedule(0)
        )
        ranks, members = self.topology.ranks, self.topology.members
        self._levels_of_all = [name for name in self.topology.levels if members(name) == ranks]
        replica = self._make_replica(scaler, averaging)
        self._engine = self._make_engine(replica, averaging)
        undo.callback(self._engine.close)
        # First: ranks whose strategies differ need not make the same groups.
        averages, initial = strategy.schedule.parameter_levels(), choose(Initial, strategy.initial)
        self._engine.begin(self.topology.widest, initial, prepare=bool(averages))
        for level in self.topology.levels:  # now, and not in the middle of a backward
            self.topology.peers(level)
        replica.meet()
        self._adapter = make_adapter(self.model, self._sharing, replica, self.topology, strategy)
        undo.callback(self._adapter.close)

    def _hook(self, undo: ExitStack, scaler: torch.amp.GradScaler | None) -> None:
        """Begin to act on the optimizer's steps."""
        if not isinstance(self.model, DistributedDataParallel):
            # The base class's: TorchScript's modules refuse their own, though such a hook works.
            watch = torch.nn.Module.register_forward_pre_hook(self.model, refuse_outer_ddp)
            undo.callback(watch.remove)
        undo.callback(self.optimizer.register_step_pre_hook(self._before_step).remove)
        undo.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
        self._scaler: ScalerWatch | None = None
        if scaler is not None:
            self._let_unscale_shards(undo, scaler)
            self._scaler = ScalerWatch(
                scaler, self.optimizer, self._gradient_peers, self._step_done
            )
            undo.callback(self._scaler.close)
        _attached.add(self)
        undo.callback(_attached.discard, self)
        self._follow_gradients()

    def _let_unscale_shards(self, undo: ExitStack, scaler: torch.amp.GradScaler) -> None:
        """Let a scaler reach the gradients of a sharded optimizer, unless it can already."""
        zero = self.optimizer
        if not is_sharded(zero) or not scaler.is_enabled():
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

    def finalize(self, *, also: Tensors = ()) -> None:
        """Average the steps since the last sync over the widest level that averages.

        Where no level does, as under ``ddp()``, replicas are averaged if something else has moved
        them: a forward through BatchNorm, an edit, an optimizer that is not attached.

        A rank that runs out of batches before the others calls it too: it keeps answering their
        syncs with its own last parameters until all have come here. (Where gradients are shared
        at every step there is nothing to answer with; give all ranks the same number of batches.)

        ``also`` is what else of this rank's own is to become the mean of all ranks', in place: an
        EMA copy of the model, or tensors. All ranks give the same.
        """
        named = named_tensors("also", also)
        self._engine.finalize(self.clock.step)
        self._engine.average_also(named)

    @property
    def local_steps(self) -> int:
        """How many finished steps of this optimizer are in this rank's replica only.

        0: every such step is in all replicas, so unless something else has moved them (an edit, an
        optimizer that is not attached) one rank's checkpoint stands for all. Otherwise save inside
        ``averaged()``, or one file a rank.
        """
        return self._engine.local_steps

    def arrive(self) -> None:
        """Wait for an average under way, if there is one; it is still applied when it is due.

        For whoever measures: ``averaged`` and ``state_dict`` would wait for it too.
        """
        self._engine.arrive()

    def state_dict(self) -> dict[str, Any]:
        """Return clock, reducer and averages as plain data: no process groups, no pickle.

        An average under way is waited for (the other ranks' are then on their way too) and saved
        as what is still to be applied; training goes on as if nothing had been saved.

        It belongs to this rank's replica, as long as there are ``local_steps``. Taken inside
        ``averaged()`` it belongs to the average, and any rank may load it.
        """
        return {
            "version": VERSION,
            "clock": self.clock.state_dict(),
            **owner(),
            "gradients": self._sharing.state_dict(),
            **self._engine.state_dict(),
            "timetable": self._timetable.state_dict(),
            "observed": self._observer.state_dict(),
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
        self._check_whose(state_dict)
        self.clock.load_state_dict(state_dict["clock"])
        self._engine.load_state_dict(state_dict)
        self._sharing.load_state_dict(state_dict.get("gradients", {}))
        self._timetable.load_state_dict(state_dict.get("timetable", {}))
        self._observer.load_state_dict(state_dict.get("observed", {}))
        self._sharing.due = self._timetable.due(self.clock.step)
        self._follow_gradients()

    def _check_whose(self, state_dict: Mapping[str, Any]) -> None:
        """Raise on all ranks where one of them loads what belongs to another rank's replica."""
        peers = self.topology.peers(self.topology.widest)
        inside = "or model and state inside `with run.averaged():`"
        check_whose(state_dict, state_dict.get("local_steps", 0), peers, inside)

    def observe(self, loss: float | torch.Tensor) -> None:
        """Take the training loss of a step, for a schedule that goes by it (``adacomm``)."""
        self._observer.observe(float(loss))

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return bytes, seconds, syncs and drift since the start, by ``kind/level``."""
        return self.telemetry.metrics()

    def averaged(self) -> AbstractContextManager[None]:
        """Hold the average of all replicas inside the ``with`` block, for evaluation or saving.

        Training is not disturbed: afterwards every rank has its own parameters again. Needs one
        copy of the model, and all ranks must enter together.
        """
        return self._engine.averaged()

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside the block: for all micro-batches but the last."""
        return self._adapter.no_sync()

    def detach(self) -> None:
        """Take every hook away and free the process groups; safe to call twice."""
        self._undo.close()

    def __enter__(self) -> Attached:
        """Return itself."""
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Detach; say so where steps have not been averaged, unless an error ends the block."""
        averages = bool(self.strategy.schedule.parameter_levels())
        local_steps = self.local_steps if error is None and averages else 0
        self.detach()
        if local_steps:
            steps = "1 step" if local_steps == 1 else f"{local_steps} steps"
            warnings.warn(
                f"rank {dist.get_rank()}: {steps} since the last average are in this rank's "
                "replica only; call run.finalize() at the end of the block, so that all ranks "
                "have the same model",
                LoosestepWarning,
                stacklevel=2,
            )

    # What happens around a step. Where that is compiled, it is no part of the graph.

    @untraced
    def _before_step(self, _: object, __: object, kwargs: dict[str, Any]) -> None:
        self._idle = only_creates_state(self.optimizer, kwargs)
        if not self._idle:
            self._adapter.before_step()

    @untraced
    def _after_step(self, *_: object) -> None:
        if not self._idle and (self._scaler is None or not self._scaler.stepping):
            self._step_done()

    def _step_done(self) -> None:
        """Count the step and average if it is due."""
        self._sharing.record(self.clock.step)
        local = self._sharing.due.gradients not in self._levels_of_all
        step = self.clock.tick()
        due = self._sharing.due = self._timetable.due(step)
        self._engine.follow(due.parameters, step, fragment=due.fragment, local=local)
        self._follow_gradients()

    def _follow_gradients(self) -> None:
        """Let DDP broadcast buffers while gradients are shared by all, and not in local phases."""
        self._adapter.broadcast_buffers(self._sharing.due.gradients in self._levels_of_all)

    # What is settled at the start.

    def _make_replica(
        self, scaler: torch.amp.GradScaler | None, averaging: ConnectedTopology
    ) -> Replica:
        if is_sharded(self.optimizer):
            check_sharded(self.model, self.optimizer, self.strategy, scaler)
            return ShardedReplica(
                self.model, self.optimizer, self.strategy, self.topology, averaging
            )
        if self.strategy.sharding is not None:
            raise NotAttachable(
                f"this strategy needs a sharded optimizer, got {type(self.optimizer).__name__}; "
                "wrap it: ZeroRedundancyOptimizer(params, AdamW, process_group=..., lr=...)"
            )
        return replica_of(self.model, self.optimizer, self.strategy)

    def _make_engine(self, replica: Replica, topology: ConnectedTopology) -> Engine:
        strategy = self.strategy
        averaging = strategy.schedule.parameter_levels() or {topology.widest}
        levels = [level for level in topology.levels if level in averaging]
        settings = Settings(
            reducer=strategy.reducer,
            on_nonfinite=choose(NonFinite, strategy.on_nonfinite),
            outer=strategy.outer_by_level(levels),
            gate=strategy.gate,
            gossip=strategy.gossip,
            fragments=strategy.parts,
            overlap_steps=strategy.overlap_steps,
            arrival=strategy.arrival,
            agreements=lambda: (topology.describe(), strategy.describe()),
        )
        return Engine(
            replica,
            levels,
            topology.peers,
            settings,
            self.clock,
            self.telemetry,
            self._timetable,
            self._observer,
        )

    def _gradient_peers(self) -> Peers | None:
        level = self._sharing.due.gradients
        return None if level is None else self.topology.peers(level)


def _own_topology(
    topology: Topology | None, model: torch.nn.Module, timeout: float | None
) -> ConnectedTopology:
    """Return a topology whose process groups belong to this attachment alone."""
    if topology is None:
        ranks = None
        if isinstance(model, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(model.process_group)
        topology = Topology.from_hosts(ranks=ranks)
    return ConnectedTopology.meet(topology, timeout)
