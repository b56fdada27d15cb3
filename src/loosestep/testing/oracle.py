"""What a strategy must come to: all workers in one process, in plain tensor code.

No process group, no windows, no overlap of anything: replicas are trained in turn, and what a
strategy says is due is done to all of them at once. Ranks end with the same bits, on the CPU (where
three or more share gradients but for the order of the backend's own sum).

Exact reducers only: what few bits leave of a value belongs to a codec, not to a strategy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loosestep.strategy.gate import History
from loosestep.strategy.gossip import Gossip, NoLoCo
from loosestep.strategy.outer_rules import Outer
from loosestep.strategy.policies import Buffers, OptimizerState, choose_state
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
LossOf = Callable[[torch.nn.Module, int, int], torch.Tensor]  # (model, rank, step) -> loss
Values = dict[str, torch.Tensor]


def train_replicas(
    strategy: Strategy,
    topology: Topology,
    steps: int,
    make_model: Callable[[], torch.nn.Module],
    make_optimizer: MakeOptimizer,
    loss_of: LossOf,
) -> dict[int, torch.nn.Module]:
    """Train one replica a rank in this process and return them by rank.

    Example::

        nets = train_replicas(diloco(10), Topology({"world": [[0, 1]]}), 50, make, sgd, loss_of)
    """
    replicas = Replicas(strategy, topology, make_model, make_optimizer)
    for step in range(steps):
        replicas.step(step, loss_of)
    return replicas.models


@dataclass
class _Late:
    """A mean on its way to one replica."""

    step: int  # at which it is applied
    rank: int
    values: Values  # what is added, or of parameters in a mix the mean


class Replicas:
    """Models and optimizers by rank, and what averages keep: anchors and outer optimizers."""

    def __init__(
        self,
        strategy: Strategy,
        topology: Topology,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: MakeOptimizer,
    ) -> None:
        if strategy.reducer.lossy:
            raise ValueError(
                f"the oracle averages exactly, and {strategy.reducer} does not; give "
                "dataclasses.replace(strategy, reducer=Mean())"
            )
        self.strategy, self.topology = strategy, topology
        first = make_model()
        self.models = {rank: copy.deepcopy(first) for rank in topology.ranks}
        self.optimizers = {rank: make_optimizer(model) for rank, model in self.models.items()}
        names = {name: p.nbytes for name, p in first.named_parameters() if p.requires_grad}
        whole = [tuple(names)] if strategy.parts is None else strategy.parts.split([*names.items()])
        self.fragments = [frozenset(part) for part in whole]
        self._late: list[_Late] = []
        self._num_syncs: dict[tuple[str, int], int] = {}
        self._histories: dict[tuple[int, int], History] = {}  # of norms, by rank and fragment
        values = {name: dict(first.named_parameters())[name] for name in names}
        slow = {name: (p.detach().clone(), torch.zeros_like(p)) for name, p in values.items()}
        self._slow = {rank: dict(slow) for rank in topology.ranks}  # and momentum, in pairs
        self._outer = {
            (level, group, number): OuterSteps(rule, {name: values[name] for name in part})
            for level, rule in self._rules().items()
            for group in topology.levels[level]
            for number, part in enumerate(self.fragments)
        }

    def _rules(self) -> Mapping[str, Outer]:
        averaging = self.strategy.schedule.parameter_levels() or {self.topology.widest}
        levels = [level for level in self.topology.levels if level in averaging]
        return self.strategy.outer_by_level(levels)

    def step(self, step: int, loss_of: LossOf) -> None:
        """Take step number ``step``, counted from 0, with every replica."""
        for rank, model in self.models.items():
            self.optimizers[rank].zero_grad()
            torch.autograd.backward(loss_of(model, rank, step))
        strategy, schedule = self.strategy, self.strategy.schedule
        if (level := schedule(step).gradients) is not None:
            for group in self.topology.levels[level]:
                _share_gradients([self.models[rank] for rank in group])
        for optimizer in self.optimizers.values():
            optimizer.step()
        due, finished = schedule(step + 1), step + 1
        if finished == schedule.begins:
            self._begin()
        # What is under way lands when it is time, and before another of the same is launched.
        full = due.parameters is not None and len(self.fragments) == 1
        for late in [late for late in self._late if full or late.step <= finished]:
            self._land(late)
        if due.parameters is not None:
            for group in self.topology.levels[due.parameters]:
                if strategy.gossip is not None:
                    self._gossip(due.parameters, group, strategy.gossip)
                else:
                    self._sync(due.parameters, group, due.fragment or 0, finished)

    def _begin(self) -> None:
        """Let outer optimizers begin where a warm-up that was everybody's has led."""
        values: list[Values] = [{**dict(m.named_parameters())} for m in self.models.values()]
        names = [name for part in self.fragments for name in part]
        if not all(torch.equal(values[0][n], other[n]) for other in values for n in names):
            return
        for outer in self._outer.values():
            outer.anchor(values[0])
        for slow in self._slow.values():
            for name, (_, momentum) in slow.items():
                slow[name] = (values[0][name].detach().clone(), momentum)

    @torch.no_grad()
    def _sync(self, level: str, group: tuple[int, ...], fragment: int, step: int) -> None:
        strategy, last = self.strategy, fragment == len(self.fragments) - 1
        named = {rank: self._parts(rank, fragment) for rank in group}
        count = self._num_syncs.get((level, fragment), 0) + (group == self._first_group(level))
        self._num_syncs[level, fragment] = count
        say, values = self._gated(level, group, fragment, named)
        results = {
            name: self._mean([values[rank][name] for rank in group], group, name, say)
            for name in named[group[0]]
        }
        outer = self._outer.get((level, group, fragment))
        tau, arrival = strategy.overlap_steps, strategy.arrival
        if outer is not None and arrival.guesses:
            for rank in group:
                outer.peek(named[rank])
        if outer is not None:
            outer.take(results)
        for rank in group:
            if not tau:
                for name, tensor in named[rank].items():
                    tensor.copy_(results[name])
                continue
            mixed = arrival.keeps is not None
            added = {
                name: results[name] if mixed and name in self.fragments[fragment] else by
                for name, by in (
                    (name, results[name] - tensor) for name, tensor in named[rank].items()
                )
            }
            self._late.append(_Late(step + tau, rank, added))
        if not tau and last:
            self._average_state(group, count, say)
        self._anchor_narrower(level, group, named[group[0]])

    @torch.no_grad()
    def _gossip(self, level: str, group: tuple[int, ...], gossip: Gossip) -> None:
        """Average in the pairs whose turn it is."""
        sync = self._num_syncs.get((level, 0), 0)
        if group == self.topology.levels[level][-1]:
            self._num_syncs[level, 0] = sync + 1
        for indices in gossip.pairs(len(group), sync):
            pair = [group[index] for index in indices]
            say = dict.fromkeys(pair, 1.0)
            named = {rank: self._parts(rank, 0) for rank in pair}
            slow = {rank: self._slow[rank] for rank in pair} if gossip.step else {}
            sent = {rank: {**named[rank], **self._blended(rank, gossip.step)} for rank in pair}
            for name in named[pair[0]]:
                mean = self._mean([sent[rank][name] for rank in pair], pair, name, say)
                for rank in pair:
                    if gossip.step is None or name not in self.fragments[0]:
                        named[rank][name].copy_(mean)
                        continue
                    weights, delta = slow[rank][name]
                    step = gossip.step.alpha * delta + gossip.step.gamma * (mean - weights)
                    slow[rank][name] = (weights + step, step)
                    named[rank][name].copy_(weights + step)
            self._average_state(pair, sync + 1, say)

    def _blended(self, rank: int, step: NoLoCo | None) -> Values:
        """Return what a pair needs the mean of: slow weights, led on by the parameters."""
        if step is None:
            return {}
        parameters = dict(self.models[rank].named_parameters())
        ratio = step.beta / step.gamma
        return {
            name: weights + ratio * (parameters[name].detach() - weights)
            for name, (weights, _) in self._slow[rank].items()
        }

    def _gated(
        self, level: str, group: tuple[int, ...], fragment: int, named: dict[int, Values]
    ) -> tuple[dict[int, float], dict[int, Values]]:
        """Return by which factors ranks count, and what of theirs is averaged."""
        gate, outer = self.strategy.gate, self._outer.get((level, group, fragment))
        if gate is None or outer is None or level != self._widest:
            return dict.fromkeys(group, 1.0), named
        norms, out, values = {}, {}, {}
        for rank in group:
            history = self._histories.get((rank, fragment), History())
            moved = [(a.double() - named[rank][n].double()) for n, a in outer.anchors.items()]
            square = sum(float(by.square().sum()) for by in moved)
            norms[rank] = float(torch.tensor(math.sqrt(square), dtype=torch.float32))
            out[rank] = gate.is_outlier(norms[rank], history)
            self._histories[rank, fragment] = gate.following(norms[rank], history)
            share = gate.share(norms[rank])
            clipped = {n: a + share * (named[rank][n] - a) for n, a in outer.anchors.items()}
            values[rank] = named[rank] if share == 1.0 else {**named[rank], **clipped}
        nobody = all(out.values())
        left_out = [out[rank] and not nobody for rank in group]
        say = dict(zip(group, gate.say([norms[rank] for rank in group], left_out), strict=True))
        heard = {rank: values[rank] if say[rank] else named[rank] for rank in group}
        return say, heard

    @property
    def _widest(self) -> str:
        averaging = self.strategy.schedule.parameter_levels() or {self.topology.widest}
        return next(name for name in reversed([*self.topology.levels]) if name in averaging)

    def _first_group(self, level: str) -> tuple[int, ...]:
        return self.topology.levels[level][0]

    @torch.no_grad()
    def _land(self, late: _Late) -> None:
        self._late.remove(late)
        tensors = dict(self._all(late.rank))
        share = self.strategy.arrival.keeps
        parameters = dict(self.models[late.rank].named_parameters())
        for name, by in late.values.items():
            if share is None or name not in parameters:
                tensors[name].add_(by)
            else:
                tensors[name].mul_(share).add_(by, alpha=1.0 - share)

    def _all(self, rank: int) -> Values:
        model = self.models[rank]
        return {
            **dict(model.named_parameters()),
            **{f"buffer {n}": b for n, b in model.named_buffers()},
        }

    def _parts(self, rank: int, fragment: int) -> Values:
        """Return what a sync changes; buffers go with the last fragment."""
        buffers = self.strategy.buffers is not Buffers.LOCAL and fragment == len(self.fragments) - 1
        return {
            name: tensor
            for name, tensor in self._all(rank).items()
            if name in self.fragments[fragment] or (buffers and name.startswith("buffer "))
        }

    def _mean(
        self,
        tensors: Sequence[torch.Tensor],
        group: Sequence[int],
        name: str,
        say: Mapping[int, float],
    ) -> torch.Tensor:
        if name.startswith("buffer ") and self.strategy.buffers is Buffers.BROADCAST:
            first = next(at for at, rank in enumerate(group) if say[rank])
            return tensors[first].clone()
        if not tensors[0].is_floating_point():
            return torch.stack(list(tensors)).max(0).values  # counters
        weights = self.topology.weights
        factors = [say[rank] * (1.0 if weights is None else weights[rank]) for rank in group]
        told = [(t, factor) for t, factor in zip(tensors, factors, strict=True) if factor]
        return exact_mean([t for t, _ in told], [factor for _, factor in told])

    def _average_state(self, group: Sequence[int], sync: int, say: Mapping[int, float]) -> None:
        policy = choose_state(self.strategy.optimizer_state)
        if policy is OptimizerState.RESET:
            for rank in group:
                self.optimizers[rank].state.clear()
        if not policy.averages(sync):
            return
        models = [dict(self.models[rank].named_parameters()) for rank in group]
        for name in models[0]:
            states = [
                self.optimizers[rank].state.get(model[name], {})
                for rank, model in zip(group, models, strict=True)
            ]
            for key in set.intersection(*map(set, states)):
                kept = [state[key] for state in states]
                if not isinstance(kept[0], torch.Tensor) or not policy.averages(sync, key):
                    continue
                counts = kept[0].ndim == 0 and (key == "step" or models[0][name].ndim > 0)
                value = torch.stack(kept).max() if counts else self._mean(kept, group, name, say)
                for tensor in kept:
                    tensor.copy_(value)

    def _anchor_narrower(self, level: str, group: Sequence[int], named: Values) -> None:
        """Let outer optimizers of narrower levels go on from where a wider average has led."""
        order = list(self.topology.levels)
        for (narrow, members, _), outer in self._outer.items():
            if order.index(narrow) < order.index(level) and set(members) <= set(group):
                outer.anchor(named)


class OuterSteps:
    """An outer optimizer of some parameters in one group, and the anchors that it steps."""

    def __init__(self, rule: Outer, parameters: Values) -> None:
        self.anchors = {name: p.detach().float().clone() for name, p in parameters.items()}
        self.optimizer = rule.make(list(self.anchors.values()))
        self.scheduler = None if rule.scheduler is None else rule.scheduler(self.optimizer)

    def take(self, values: Values) -> None:
        """Step the anchors by anchor - mean, and give the result."""
        if not self._takes_the_mean():
            for name, anchor in self.anchors.items():
                anchor.grad = anchor - values[name]
            self.optimizer.step()
            for name, anchor in self.anchors.items():
                values[name].copy_(anchor)
        self.anchor(values)
        if self.scheduler is not None:
            self.scheduler.step()

    def _takes_the_mean(self) -> bool:
        """Say whether a step is all of anchor - mean: then the mean is the result, unrounded."""
        group = self.optimizer.param_groups[0]
        changes = ("momentum", "weight_decay", "maximize")
        plain = type(self.optimizer) is torch.optim.SGD and not any(group[key] for key in changes)
        return plain and float(group["lr"]) == 1.0

    def peek(self, values: Values) -> None:
        """Give what ``take`` would, and leave everything as it was."""
        kept = {name: anchor.clone() for name, anchor in self.anchors.items()}
        state = copy.deepcopy(self.optimizer.state_dict())
        scheduler, self.scheduler = self.scheduler, None
        self.take(values)
        self.optimizer.load_state_dict(state)
        self.scheduler = scheduler
        self.anchor(kept)

    def anchor(self, values: Values) -> None:
        """Go on from these values."""
        for name, anchor in self.anchors.items():
            anchor.detach().copy_(values[name])


def exact_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Return the mean as it is defined for float32: summed in float64, in rank order, rounded once.

    >>> exact_mean([torch.tensor([1.0]), torch.tensor([4.0])], [1.0, 2.0])
    tensor([3.])
    """
    factors = [1.0] * len(values) if weights is None else list(weights)
    total = values[0].double() * factors[0]
    for value, factor in zip(values[1:], factors[1:], strict=True):
        total = total + value.double() * factor
    return (total / sum(factors)).to(values[0].dtype)


@torch.no_grad()
def _share_gradients(models: Sequence[torch.nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        gradients = [p.grad / len(models) for p in same if p.grad is not None]
        for parameter in same:
            parameter.grad = sum(gradients[1:], gradients[0]).clone()
