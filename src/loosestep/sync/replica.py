"""What takes part in averages: everything that a rank holds, or of a sharded optimizer its shard.

A ``Replica`` is averaged as a whole. A ``ShardedReplica`` has an optimizer that is sharded: the
ranks of its group hold the same parameters and own a part of them each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from loosestep.comm.agreement import Progress, in_common
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import Reducer
from loosestep.comm.tensors import Named, unique
from loosestep.errors import NotAttachable, choose
from loosestep.strategy.policies import Buffers, OptimizerState, StatePeriods, choose_state
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology
from loosestep.sync.averager import Agreed, Averager
from loosestep.sync.connected import ConnectedTopology
from loosestep.sync.parts import (
    ACROSS,
    ModuleTensors,
    Parts,
    level_of,
    optimizer_state_of,
    split_floats,
)
from loosestep.sync.pipeline import Averaging
from loosestep.telemetry.traffic import Traffic

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer

State = tuple[list[Named], list[Named]]  # tensors of an optimizer that have a mean, and counters


class Average(Protocol):
    """An average under way."""

    def wait(self) -> Traffic:
        """Let the mean come, and write it back."""

    def commit(self) -> None:
        """Let reducers keep what they have learnt; not called where something went wrong."""


class AveragerOf(Protocol):
    """Returns what averages on a level, of an engine."""

    def __call__(
        self, level: str, peers: Peers | None = None, reducer: Reducer | None = None
    ) -> Averager:
        """Return it; where it is not of the usual kind, with whom and how."""


class Replica:
    """Parameters on one rank, a module's buffers and an optimizer's state.

    ``parameters`` returns all there are now, each once, frozen ones too, and the same list as long
    as they are the same; None: they are the module's.
    """

    def __init__(
        self,
        parameters: Callable[[], list[Named]] | None,
        module: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        buffers: Buffers = Buffers.MEAN,
        optimizer_state: OptimizerState | StatePeriods = OptimizerState.KEEP,
    ) -> None:
        self._given, self._optimizer = parameters, optimizer
        self._of_module = None if module is None else ModuleTensors(module)
        self._buffers, self._optimizer_state = buffers, optimizer_state
        self.sync = 1  # which one on its level comes now: some state is averaged at few of them
        self._listed: list[Named] = []  # the parameters that there were last,
        self._flags: list[bool] = []  # which of them were trained,
        self._trained: list[Named] = []  # and those
        self._buffers_listed: list[Named] = []  # the buffers that there were last,
        self._dtypes: list[torch.dtype] = []  # of which dtypes,
        self._weights: Parts | None = None  # and what a sync makes of both

    @property
    def sharded(self) -> ShardedReplica | None:
        """Itself, if its optimizer is sharded."""
        return None

    def meet(self) -> None:
        """Make the groups that averages need beside those of the levels: none; collective."""

    def weights(self) -> Parts:
        """Return what a sync changes beside the optimizer's state: the same until it changes."""
        before, (parameters, buffers) = self._trained, self._tensors()
        trained, dtypes = self._only_trained(parameters), [b.dtype for _, b in buffers]
        if (
            self._weights is None
            or trained is not before
            or buffers is not self._buffers_listed
            or dtypes != self._dtypes
        ):
            self._buffers_listed, self._dtypes = buffers, dtypes
            self._weights = self._parts_of(trained, buffers)
        return self._weights

    def _parts_of(self, parameters: list[Named], buffers: list[Named]) -> Parts:
        if self._buffers is Buffers.MEAN:
            floats, counters = split_floats(buffers)
            return Parts([*parameters, *floats], counters)
        asked = self._buffers is Buffers.BROADCAST and self._of_module is not None
        return Parts(parameters, firsts=buffers if asked else None)

    def parts(self, peers: Peers) -> Parts:
        """Return what a sync changes now; all of ``peers`` must ask together."""
        parts = self.weights()
        if not self._optimizer_state.averages(self.sync):
            return parts
        shaped, steps = self._state(peers)
        return replace(parts, means=[*parts.means, *shaped], largest=[*parts.largest, *steps])

    def launch(
        self, agreed: Agreed, averager: Averager, averager_of: AveragerOf, *, stateful: bool = True
    ) -> Average:
        """Start to average what was agreed, the optimizer's state too if that takes part."""
        return averager.start(agreed)

    def shares(
        self, parts: Parts, averager: Averager, averager_of: AveragerOf
    ) -> list[tuple[Averager, Parts]]:
        """Return who averages what of the parts, each by itself; all of them ask together."""
        return [(averager, parts)]

    def prepare(
        self, parts: Parts, averager: Averager, averager_of: AveragerOf, *, common: bool
    ) -> None:
        """Make what averages of these parts need; ``common``: all replicas are equal."""
        for by, share in self.shares(parts, averager, averager_of):
            by.prepare(share.means, common=common)

    def landed(self) -> None:
        """Do what is to be done when an average under way was applied: nothing; collective."""

    def everything(self) -> list[Named]:
        """Return all parameters and buffers, also those that no sync changes."""
        parameters, buffers = self._tensors()
        return [*parameters, *buffers]

    def touched(self) -> list[torch.Tensor]:
        """Return every tensor of the model that averaging may change."""
        named = [*self.weights().everything, *self._tensors()[1]]
        return [tensor for _, tensor in unique(named)]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return everything that a sync may ever change, frozen parameters too."""
        if self._optimizer is None:
            return dict(self.everything())
        names = {parameter: name for name, parameter in self._tensors()[0]}
        shaped, steps = optimizer_state_of(self._optimizer, names)
        return dict([*self.everything(), *shaped, *steps])

    def forget_state(self) -> None:
        """Drop the optimizer's state, if a sync is to reset it."""
        if self._optimizer_state is OptimizerState.RESET and self._optimizer is not None:
            for parameter in self._names():
                self._optimizer.state.pop(parameter, None)

    def _parameters(self) -> list[Named]:
        """Return those that are trained; the same list as long as they are the same."""
        return self._only_trained(self._tensors()[0])

    def _only_trained(self, named: list[Named]) -> list[Named]:
        flags = [parameter.requires_grad for _, parameter in named]
        if named is not self._listed or flags != self._flags:
            self._listed, self._flags = named, flags
            self._trained = [pair for pair, trained in zip(named, flags, strict=True) if trained]
        return self._trained

    def _tensors(self) -> tuple[list[Named], list[Named]]:
        """Return all parameters and buffers, each the same list as long as they are the same."""
        parameters, buffers = ([], []) if self._of_module is None else self._of_module.listed()
        return (parameters if self._given is None else self._given()), buffers

    def _names(self) -> dict[torch.Tensor, str]:
        """Return what the optimizer's state is kept by, with names."""
        return {parameter: name for name, parameter in self._parameters()}

    def _state(self, peers: Peers) -> State:
        """Return the optimizer's state that a sync averages; all of ``peers`` must ask together.

        A rank whose batches have not used a parameter (an expert, say) has no state for it yet.
        What it would start from is known to the optimizer only, so such state is left out.
        """
        policy = self._optimizer_state
        if self._optimizer is None or not policy.averages(self.sync):
            return [], []
        shaped, steps = (
            [(name, t) for name, t in kind if policy.averages(self.sync, name.rpartition(".")[2])]
            for kind in optimizer_state_of(self._optimizer, self._names())
        )
        peers = peers.during(Phase("agreeing which optimizer state to average"))
        common = {name for name, _ in in_common(peers, [*shaped, *steps])}
        return [s for s in shaped if s[0] in common], [s for s in steps if s[0] in common]


def replica_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> Replica:
    """Return a model and its optimizer as what takes part, by a strategy's policies."""
    return Replica(
        None,
        model,
        optimizer,
        buffers=choose(Buffers, strategy.buffers),
        optimizer_state=choose_state(strategy.optimizer_state),
    )


class ShardedReplica(Replica):
    """A replica that averages only its shard with other groups, and gathers inside its own.

    The ranks of a group hold the same parameters, so this is the mean over all ranks, and what
    leaves a host is one copy of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        zero: ZeroRedundancyOptimizer,
        strategy: Strategy,
        topology: ConnectedTopology,
        averaging: ConnectedTopology,
    ) -> None:
        buffers = choose(Buffers, strategy.buffers)
        state = choose_state(strategy.optimizer_state)
        super().__init__(None, model, zero, buffers=buffers, optimizer_state=state)
        # Whose groups gradients use, and whose averages: those may be under way meanwhile.
        self._strategy, self._topology, self._averaging = strategy, topology, averaging
        self.zero = zero
        self._group = _level_of(zero, topology)
        _check_owned(model, zero)
        self._check_gradient_levels()
        if topology.timeout is not None:
            zero.limit_waits(topology.timeout)

    @property
    def sharded(self) -> ShardedReplica:
        """Itself."""
        return self

    def meet(self) -> None:
        """Make the groups of those that own the same shard elsewhere; collective."""
        schedule = self._strategy.schedule
        averaged = schedule.parameter_levels() or {self._topology.widest}
        for level in self._topology.levels:
            if level in schedule.gradient_levels() | averaged:
                self.across(level)
                self._crossing(level)
        _ = self.zero.wire  # compares what is sharded, and makes its groups

    def across(self, level: str) -> Peers:
        """Return those at this rank's place in the other groups of a level, for gradients."""
        return self._at_my_place(level, self._topology)

    def _crossing(self, level: str) -> Peers:
        """Return the same ranks, for averages."""
        return self._at_my_place(level, self._averaging)

    def _at_my_place(self, level: str, topology: ConnectedTopology) -> Peers:
        me, group = self.zero.shards.group_rank, topology.members(self._group)
        if set(topology.members(level)) <= set(group):
            return topology.subset(level, (group[me],))
        peers = topology.peers(level, within=self._group)
        weights = topology.weights
        if weights is None:
            return peers
        # A rank there stands for its whole group, which holds the same parameters.
        members = [topology.members(self._group, rank) for rank in peers.global_ranks]
        return replace(peers, weights=tuple(sum(weights[r] for r in group) for group in members))

    def group_weights(self) -> tuple[float, ...] | None:
        """Return the weights of the ranks that share gradients with this one."""
        weights = self._topology.weights
        members = self._topology.members(self._group)
        return None if weights is None else tuple(weights[rank] for rank in members)

    def parts(self, peers: Peers) -> Parts:
        """Return what a sync changes, but for the optimizer's state, which has its shards' shape.

        That is compared with those that own the same shard only.
        """
        return self.weights()

    def launch(
        self, agreed: Agreed, averager: Averager, averager_of: AveragerOf, *, stateful: bool = True
    ) -> Average:
        """Start to average buffers over the level; shards follow, and are gathered at the end."""
        names, wanted = {name for name, _ in self._parameters()}, dict(agreed.bound.parts)
        rest = averager.start(agreed.only(lambda name: name not in names))
        across = self._across(averager, averager_of)

        def shards() -> Averaging | None:
            named = [(name, shard) for name, shard in self._shards() if name in wanted]
            if across is None or not named:  # a rank may own nothing, as its peers then
                return None
            shaped, steps = self._state(across.peers) if stateful else ([], [])
            # A group that holds an infinity somewhere is skipped in all shards, as in the rest.
            me = across.peers.global_ranks[across.peers.group_rank]
            progress = Progress(agreed.step, finite=me not in agreed.left_out)
            return across.start(across.agree(Parts([*named, *shaped], steps), progress))

        return _InShards(rest, shards, None if across is None else self._gather)

    def shares(
        self, parts: Parts, averager: Averager, averager_of: AveragerOf
    ) -> list[tuple[Averager, Parts]]:
        """Return buffers, which the level averages, and shards, which those at my place do."""
        names, wanted = {name for name, _ in self._parameters()}, dict(parts.means)
        rest = parts.only(lambda name: name not in names)
        shares = [(averager, rest)] if rest.everything else []
        across = self._across(averager, averager_of)
        shards = [(name, shard) for name, shard in self._shards() if name in wanted]
        if across is not None and shards:
            shares.append((across, Parts(shards)))
        return shares

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return everything that a sync may ever change: of parameters the own shards."""
        return dict([*self.everything(), *self._shards()])

    def landed(self) -> None:
        """Gather the shards, which have changed."""
        self._gather()

    def _gather(self) -> Traffic:
        stepped = [p for p in self.zero.parameters if p.requires_grad]
        self.zero.wire.start_gather(stepped).wait()
        return self.zero.wire.take_moved()

    def _names(self) -> dict[torch.Tensor, str]:
        self.zero.shards.follow()
        shards = self.zero.shards.of
        return {shards[p]: name for name, p in self._parameters() if p in shards}

    def _across(self, averager: Averager, averager_of: AveragerOf) -> Averager | None:
        """Return what averages shards where ``averager`` does the rest; None: nothing changes them.

        It has a name of its own, so that what is kept of shards is told apart from the rest.
        """
        peers, name = self._crossing(level_of(averager.name)), ACROSS + averager.name
        if peers.size == 1 and not self._strategy.outer:
            return None
        return averager_of(name, replace(peers, level=name), self._between_groups())

    def _between_groups(self) -> Reducer:
        """Return the reducer for one rank of every group: a host has fewer of them."""
        size = len(self._topology.members(self._group))
        return self._strategy.reducer.among_groups(size)

    def _shards(self) -> list[Named]:
        return [(name, shard) for shard, name in self._names().items()]

    def _check_gradient_levels(self) -> None:
        group = set(self._topology.members(self._group))
        for level in sorted(self._strategy.schedule.gradient_levels()):
            if not group <= set(self._topology.members(level)):
                raise NotAttachable(
                    f"gradient level {level!r} (ranks {list(self._topology.members(level))}) is "
                    f"narrower than the optimizer's group (ranks {sorted(group)}), whose ranks all "
                    "need the gradients of what they own; share them on a level that holds it"
                )


class _InShards:
    """An average of buffers over a level, and then of shards, which are gathered at the end."""

    def __init__(
        self,
        rest: Averaging,
        shards: Callable[[], Averaging | None],
        gather: Callable[[], Traffic] | None,
    ) -> None:
        self._averages, self._shards, self._gather = [rest], shards, gather

    def wait(self) -> Traffic:
        """Let all of it come, one after the other."""
        traffic = self._averages[0].wait()
        if (shards := self._shards()) is not None:
            self._averages.append(shards)
            traffic.add(shards.wait())
        if self._gather is not None:
            traffic.add(self._gather())
        return traffic

    def commit(self) -> None:
        """Let reducers keep what they have learnt."""
        for average in self._averages:
            average.commit()


def _level_of(zero: ZeroRedundancyOptimizer, topology: Topology) -> str:
    """Return the level whose groups shard an optimizer each."""
    ranks = tuple(sorted(torch.distributed.get_process_group_ranks(zero.process_group)))
    for level in topology.levels:
        if topology.members(level) == ranks:
            return level
    raise NotAttachable(
        f"the optimizer is sharded over ranks {list(ranks)}, which is none of this rank's groups: "
        f"{ {level: list(topology.members(level)) for level in topology.levels} }; give it "
        "process_group=topology.process_group('host') or another level's"
    )


def _check_owned(model: torch.nn.Module, zero: ZeroRedundancyOptimizer) -> None:
    owned = set(zero.parameters)
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p not in owned]
    if missing:
        raise NotAttachable(
            f"the optimizer does not have {missing[:3]} ({len(missing)} in all), whose gradients "
            "nobody would own; give it all trained parameters, or freeze these"
        )
