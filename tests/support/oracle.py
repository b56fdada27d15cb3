"""A small model, its batches, and replicas of it trained in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    Strategy,
    Topology,
)
from loosestep.comm.torch_versions import broadcast_buffers
from loosestep.testing import oracle
from loosestep.testing.oracle import exact_mean as exact_mean

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


def train_replicas(
    strategy: Strategy,
    topology: Topology,
    steps: int,
    make_optimizer: MakeOptimizer = sgd,
) -> dict[int, Net]:
    """Train one replica a rank of this module's model in this process."""
    nets = oracle.train_replicas(strategy, topology, steps, make_net, make_optimizer, loss_of)
    return {rank: net for rank, net in nets.items() if isinstance(net, Net)}


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
