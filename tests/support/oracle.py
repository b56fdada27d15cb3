"""Training by several replicas in one process: what the ranks must equal, written out plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    Strategy,
    Topology,
)
from loosestep.comm.torch_versions import broadcast_buffers
from loosestep.outer import Outer
from loosestep.strategy.policies import StatePeriods

Batches = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]  # (rank, step) -> inputs, labels
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Net(torch.nn.Module):
    """A little of everything: matrices, vectors, a scalar, BatchNorm and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.second = torch.nn.Linear(8, 8)
        self.third = torch.nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.last = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        hidden = torch.tanh(self.third(torch.tanh(self.second(hidden))))
        return self.last(hidden * self.gain)


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def ddp_with_local_buffers(net: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """Return a DDP module whose forward leaves every rank's buffers to that rank."""
    model = DistributedDataParallel(net, **options)
    broadcast_buffers(model, False)
    return model


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same batch for the same rank and step, in any process."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (
        torch.randn(5, 6, generator=generator),
        torch.randint(0, 3, (5,), generator=generator),
    )


def loss_of(net: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, labels = batch(rank, step)
    return torch.nn.functional.cross_entropy(net(inputs), labels)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def exact_mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the definition of the mean of float32 values: float64, rank order, rounded once."""
    total = values[0].double()
    for value in values[1:]:
        total = total + value.double()
    return (total / len(values)).to(values[0].dtype)


def train_replicas(
    strategy: Strategy,
    topology: Topology,
    steps: int,
    make_optimizer: MakeOptimizer = sgd,
) -> dict[int, Net]:
    """Train one replica a rank in this process and return them by rank."""
    nets = {rank: copy.deepcopy(make_net()) for rank in topology.ranks}
    optimizers = {rank: make_optimizer(net) for rank, net in nets.items()}
    outer = OuterSteps(strategy, topology, next(iter(nets.values())))
    num_syncs = 0
    launched: tuple[int, dict[int, list[torch.Tensor]]] | None = None
    for step in range(steps):
        for rank, net in nets.items():
            optimizers[rank].zero_grad()
            loss_of(net, rank, step).backward()
        level = strategy.schedule(step).gradients
        if level is not None:
            for group in topology.levels[level]:
                _share_gradients([nets[rank] for rank in group])
        for optimizer in optimizers.values():
            optimizer.step()
        if launched is not None and step + 1 == launched[0] + strategy.overlap_steps:
            for rank, differences in launched[1].items():
                _add(nets[rank], differences)
            launched = None
        level = strategy.schedule(step + 1).parameters
        if level is not None and strategy.overlap_steps:
            groups = [{rank: nets[rank] for rank in group} for group in topology.levels[level]]
            apart = [pair for group in groups for pair in _differences(group, outer, level)]
            launched = (step + 1, dict(apart))
        elif level is not None:
            num_syncs += 1
            for group in topology.levels[level]:
                average([nets[rank] for rank in group])
                outer.take([nets[rank] for rank in group], level)
                if isinstance(strategy.optimizer_state, StatePeriods):
                    keys = strategy.optimizer_state.due(num_syncs)
                    average_state([(nets[rank], optimizers[rank]) for rank in group], keys)
    return nets


class OuterSteps:
    """The outer optimizer of the widest level, and the anchors that it steps."""

    def __init__(self, strategy: Strategy, topology: Topology, net: torch.nn.Module) -> None:
        assert not isinstance(strategy.outer, Mapping)
        self.level, self.optimizer = topology.widest, None
        self.anchors = [p.detach().clone() for p in net.parameters()]
        # A plain step by all of anchor - mean leads to the mean, which is taken without roundings.
        if strategy.outer not in (None, Outer(torch.optim.SGD, lr=1.0)):
            assert strategy.outer is not None
            self.optimizer = strategy.outer.optimizer(self.anchors, **strategy.outer.options)

    @torch.no_grad()
    def take(self, nets: Sequence[torch.nn.Module], level: str) -> None:
        """Step the anchors by anchor - mean, which all nets hold now, and give it to them."""
        if self.optimizer is None or level != self.level:
            return
        for anchor, mean in zip(self.anchors, nets[0].parameters(), strict=True):
            anchor.grad = anchor - mean
        self.optimizer.step()
        for net in nets:
            for parameter, anchor in zip(net.parameters(), self.anchors, strict=True):
                parameter.copy_(anchor)


@torch.no_grad()
def average_state(
    pairs: Sequence[tuple[torch.nn.Module, torch.optim.Optimizer]], keys: Collection[str]
) -> None:
    """Give all optimizers the exact mean of some of their state."""
    for same in zip(*(net.parameters() for net, _ in pairs), strict=True):
        states = [optimizer.state[p] for p, (_, optimizer) in zip(same, pairs, strict=True)]
        for key in set(keys) & set(states[0]):
            mean = exact_mean([state[key] for state in states])
            for state in states:
                state[key].copy_(mean)


@torch.no_grad()
def _differences(
    nets: dict[int, Net], outer: OuterSteps, level: str
) -> list[tuple[int, list[torch.Tensor]]]:
    """Return, for every rank, how far each of its tensors is from what the mean leads to."""
    means = copy.deepcopy(list(nets.values()))
    average(means)
    outer.take(means, level)
    mean = [*means[0].parameters(), *means[0].buffers()]
    return [
        (rank, [m - own for m, own in zip(mean, [*net.parameters(), *net.buffers()], strict=True)])
        for rank, net in nets.items()
    ]


@torch.no_grad()
def _add(net: Net, differences: list[torch.Tensor]) -> None:
    for tensor, by in zip([*net.parameters(), *net.buffers()], differences, strict=True):
        tensor += by


def _share_gradients(nets: list[Net]) -> None:
    for same in zip(*(net.parameters() for net in nets), strict=True):
        grads = [p.grad / len(nets) for p in same if p.grad is not None]
        for parameter in same:
            parameter.grad = sum(grads[1:], grads[0]).clone()


@torch.no_grad()
def average(nets: list[Net]) -> None:
    """Give all nets the exact mean of parameters and float buffers, and the largest count."""
    for same in zip(*(net.parameters() for net in nets), strict=True):
        mean = exact_mean([p.detach() for p in same])
        for parameter in same:
            parameter.copy_(mean)
    for buffers in zip(*(net.buffers() for net in nets), strict=True):
        floats = buffers[0].is_floating_point()
        value = exact_mean(buffers) if floats else torch.stack(buffers).max()
        for buffer in buffers:
            buffer.copy_(value)


def snapshot(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Say whether two snapshots are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Say whether two snapshots are equal to float tolerance."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[k], other[k], rtol=1e-4, atol=1e-6) for k in one
    )


class Experts(torch.nn.Module):
    """Two experts, of which a rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](inputs)
