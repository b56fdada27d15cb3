"""What of a model is averaged on a level, and how: all of it, or every rank its shard.

``Replica`` is a rank that holds everything; ``ShardedReplica`` one whose optimizer is sharded, so
that the ranks of its group hold the same parameters and own a part of them each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from loosestep.averaging import Agreed, Averager, is_lossy
from loosestep.binding import Progress
from loosestep.errors import NotAttachable
from loosestep.optim.zero import ZeroRedundancyOptimizer
from loosestep.peers import Peers
from loosestep.policies import (
    Buffers,
    Initial,
    OptimizerState,
    Parts,
    buffers_of,
    choose,
    optimizer_state_of,
    parts_of,
)
from loosestep.references import References
from loosestep.strategy import Strategy
from loosestep.tensors import Named, unique
from loosestep.topology import Topology
from loosestep.wire import Reducer, Traffic, TwoLevel, exact_like, leaves_apart

State = tuple[list[Named], list[Named]]  # tensors of an optimizer that have a mean, and counters


class Replica:
    """A model and its optimizer on one rank, seen by the averagers of all levels."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        topology: Topology,
    ) -> None:
        self.model, self._optimizer = model, optimizer
        self._strategy, self._topology = strategy, topology
        self._averagers: dict[str, Averager] = {}
        self._references: dict[str, References] = {}

    @property
    def widest(self) -> str:
        """The widest level that averages parameters."""
        levels = self._strategy.schedule.parameter_levels() or {self._topology.widest}
        return [name for name in self._topology.levels if name in levels][-1]

    @property
    def nbytes(self) -> int:
        """How much memory averages of all levels keep."""
        return sum(held.nbytes for held in self._references.values())

    def settle(self) -> None:
        """Compare what the ranks have, make all process groups, and start from one point."""
        averager, weights = self.averager(self._topology.widest), self._weights()
        averager.agree(weights.means, weights.largest)
        for level in self._topology.levels:  # now, and not in the middle of a backward
            self._topology.peers(level)
        everything = [*unique(self.model.named_parameters()), *buffers_of(self.model)]
        if self._strategy.initial is Initial.BROADCAST:
            averager.broadcast(everything)
        elif self._strategy.initial is Initial.REFUSE:
            averager.compare(everything)
        if is_lossy(self._strategy.reducer) or self._strategy.overlap_steps:
            self._prepare(weights)

    def parts(self) -> Parts:
        """Return what a sync changes now."""
        parts, (shaped, steps) = self._weights(), self._state()
        return replace(parts, means=[*parts.means, *shaped], largest=[*parts.largest, *steps])

    def agree(self, level: str, progress: Progress) -> Agreed:
        """Compare what the level's ranks are about to average."""
        parts = self.parts()
        return self.averager(level).agree(parts.means, parts.largest, progress)

    def average(self, level: str, agreed: Agreed) -> Traffic:
        """Average it, and do to buffers what their policy says."""
        traffic = self._mean(level, agreed, self._state())
        return self.averager(level).follow_first(self._weights(), traffic)

    @property
    def stays_apart(self) -> bool:
        """Whether replicas still differ after a sync, by what could not be sent."""
        return leaves_apart(self._strategy.reducer)

    def average_exactly(self, progress: Progress) -> Traffic:
        """Average over the widest level without the strategy's reducer."""
        return self._exact(self.widest).average_parts(self.parts(), progress)

    def average_weights(self, step: int) -> None:
        """Average the model over the widest level, without the optimizer's state.

        A lossy reducer is left out of it: what it remembers belongs to training.
        """
        weights, progress = self._weights(), Progress(step)
        if is_lossy(self._strategy.reducer):
            self._exact(self.widest).average_parts(weights, progress)
            return
        averager = self.averager(self.widest)
        agreed = averager.agree(weights.means, weights.largest, progress)
        averager.follow_first(weights, self._mean(self.widest, agreed, ([], [])))

    def touched(self) -> list[torch.Tensor]:
        """Return every tensor of the model that averaging may change."""
        named = [*self._weights().everything, *buffers_of(self.model)]
        return [tensor for _, tensor in unique(named)]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return everything that a sync may ever change, frozen parameters too."""
        parameters = unique(self.model.named_parameters())
        shaped, steps = optimizer_state_of(self._optimizer, {p: name for name, p in parameters})
        return dict([*parameters, *buffers_of(self.model), *shaped, *steps])

    def forget_state(self) -> None:
        """Drop the optimizer's state, if a sync is to reset it."""
        if self._strategy.optimizer_state is OptimizerState.RESET:
            for parameter in self._names():
                self._optimizer.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what the averages of each level remember."""
        return {level: held.state_dict() for level, held in self._references.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        for level, held in self._references.items():
            if level in state_dict:
                held.load_state_dict(state_dict[level])
            else:
                held.clear()

    def close(self) -> None:
        """Let go of the process groups."""
        self._averagers.clear()

    def _prepare(self, weights: Parts) -> None:
        """Make what averages of every level need, on this thread and before the first of them."""
        for level in self._used_levels():
            self.averager(level).prepare(weights.means, common=self._common)

    @property
    def _common(self) -> bool:
        """Whether all replicas are equal at the start."""
        return self._strategy.initial is not Initial.IGNORE

    def _mean(self, level: str, agreed: Agreed, state: State) -> Traffic:
        return self.averager(level).start(agreed).finish()  # the state is part of what was agreed

    def _parameters(self) -> list[Named]:
        return unique((n, p) for n, p in self.model.named_parameters() if p.requires_grad)

    def _names(self) -> dict[torch.Tensor, str]:
        """Return what the optimizer's state is kept by, with names."""
        return {parameter: name for name, parameter in self._parameters()}

    def _weights(self) -> Parts:
        """Return what of the model is changed."""
        return parts_of(self._parameters(), self.model, choose(Buffers, self._strategy.buffers))

    def _state(self) -> State:
        if self._strategy.optimizer_state is not OptimizerState.AVERAGE:
            return [], []
        return optimizer_state_of(self._optimizer, self._names())

    def _used_levels(self) -> list[str]:
        used = self._strategy.schedule.parameter_levels()
        return [level for level in self._topology.levels if level in used]

    def averager(self, level: str) -> Averager:
        """Return what averages on a level."""
        return self._make(
            level, lambda: self._topology.peers(level), lambda r: self._topology.subset(level, r)
        )

    def _exact(self, level: str) -> Averager:
        """Return the same, with an exact mean in place of the strategy's reducer."""
        return Averager(
            self._topology.peers(level),
            reducer=exact_like(self._strategy.reducer),
            agreements=[self._topology.describe(), self._strategy.describe()],
            subset=lambda ranks: self._topology.subset(level, ranks),
        )

    def _make(
        self,
        key: str,
        peers: Callable[[], Peers],
        subset: Callable[[tuple[int, ...]], Peers] | None = None,
        reducer: Reducer | None = None,
    ) -> Averager:
        if key not in self._averagers:
            self._averagers[key] = Averager(
                peers(),
                reducer=reducer or self._strategy.reducer,
                agreements=[self._topology.describe(), self._strategy.describe()],
                subset=subset,
                references=self._references.setdefault(key, References()),
            )
        return self._averagers[key]


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
        topology: Topology,
    ) -> None:
        super().__init__(model, zero, strategy, topology)
        if strategy.overlap_steps:
            raise NotAttachable(
                f"overlap_steps={strategy.overlap_steps} needs an optimizer that is not sharded: "
                "its ranks step parts of the parameters that an average under way would change on "
                "all of them at once; give overlap_steps=0"
            )
        self.zero = zero
        self._group = _level_of(zero, topology)
        _check_owned(model, zero)
        self._check_gradient_levels()
        if topology.timeout is not None:
            zero.limit_waits(topology.timeout)

    def settle(self) -> None:
        """Settle as any replica, and meet those that own the same shard elsewhere."""
        super().settle()
        for level in self._used_levels():
            self.across(level)
        _ = self.zero.wire  # compares what is sharded, and makes its groups

    def across(self, level: str) -> Peers:
        """Return those at this rank's place in the other groups of a level."""
        me, group = self.zero.shards.group_rank, self._topology.members(self._group)
        if set(self._topology.members(level)) <= set(group):
            return self._topology.subset(level, (group[me],))
        peers = self._topology.peers(level, within=self._group)
        weights = self._topology.weights
        if weights is None:
            return peers
        # A rank there stands for its whole group, which holds the same parameters.
        members = [self._topology.members(self._group, rank) for rank in peers.global_ranks]
        return replace(peers, weights=tuple(sum(weights[r] for r in group) for group in members))

    def group_weights(self) -> tuple[float, ...] | None:
        """Return the weights of the ranks that share gradients with this one."""
        weights = self._topology.weights
        members = self._topology.members(self._group)
        return None if weights is None else tuple(weights[rank] for rank in members)

    def _mean(self, level: str, agreed: Agreed, state: State) -> Traffic:
        names = {name for name, _ in self._parameters()}
        rest = [(name, tensor) for name, tensor in agreed.parts if name not in names]
        traffic = super()._mean(level, replace(agreed, parts=rest), state)
        peers = self.across(level)
        if peers.size == 1:
            return traffic
        shaped, steps = state
        if shards := self._shards():  # a rank may own nothing, and then so do its peers
            across = self._across(level, peers)
            traffic.add(across.average([*shards, *shaped], steps, step=agreed.step))
        stepped = [p for p in self.zero.parameters if p.requires_grad]
        self.zero.wire.start_gather(stepped).wait()
        traffic.add(self.zero.wire.take_moved())
        return traffic

    def _names(self) -> dict[torch.Tensor, str]:
        self.zero.shards.follow()
        shards = self.zero.shards.of
        return {shards[p]: name for name, p in self._parameters() if p in shards}

    def parts(self) -> Parts:
        """Return what a sync changes, but for the optimizer's state, which has its shards' shape.

        It is compared with those that own the same shard only.
        """
        return self._weights()

    def _prepare(self, weights: Parts) -> None:
        names, shards = {name for name, _ in self._parameters()}, self._shards()
        rest = [(name, tensor) for name, tensor in weights.means if name not in names]
        for level in self._used_levels():
            self.averager(level).prepare(rest, common=self._common)
            peers = self.across(level)
            if peers.size > 1 and shards:
                self._across(level, peers).prepare(shards, common=self._common)

    def _across(self, level: str, peers: Peers) -> Averager:
        name = f"across {level}"  # so that what is kept of shards is told apart from the rest
        return self._make(name, lambda: replace(peers, level=name), reducer=self._between_groups())

    def _between_groups(self) -> Reducer:
        """Return the reducer for one rank of every group: a host has fewer of them."""
        reducer = self._strategy.reducer
        if not isinstance(reducer, TwoLevel) or reducer.ranks_per_host is None:
            return reducer
        size = reducer.ranks_per_host // len(self._topology.members(self._group))
        if size <= 1:
            return reducer.inner
        return TwoLevel(reducer.inner, hosts=reducer.hosts, ranks_per_host=size)

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

    def _used_levels(self) -> list[str]:
        schedule = self._strategy.schedule
        used = schedule.gradient_levels() | schedule.parameter_levels() | {self.widest}
        return [level for level in self._topology.levels if level in used]


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
