"""Parameters that a model gets after ``attach``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import RankMismatch, attach, ddp
from loosestep.reducers import Mean, Reducer, Resident
from loosestep.testing import RankPool

REDUCERS: list[Reducer | None] = [None, Mean(), Resident()]


class Sum(torch.nn.Module):
    """Adds up all values of all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(3)])

    def forward(self, factor: float) -> torch.Tensor:
        return factor * torch.stack([part.sum() for part in self.parts]).sum()


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(1.0 + dist.get_rank()).backward()  # gradients 1 and 2, with the mean 1.5
    optimizer.step()


def add(net: Sum, optimizer: torch.optim.Optimizer) -> None:
    """Add a part that starts from another value on every rank."""
    net.parts.append(torch.nn.Parameter(torch.full((2,), 10.0 * dist.get_rank())))
    optimizer.add_param_group({"params": [net.parts[-1]]})


def added(reducer: Reducer | None, freeze: bool) -> list[list[float]]:
    net = Sum()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, ddp(gradient_reducer=reducer)):
        step(net, optimizer)
        add(net, optimizer)
        net.parts[0].requires_grad_(not freeze)
        step(net, optimizer)
        step(net, optimizer)
    return [part.tolist() for part in net.parts]


def every_way() -> list[list[list[float]]]:
    return [added(reducer, freeze) for reducer in REDUCERS for freeze in (False, True)]


def test_added_parameters_are_taken_in(pool: RankPool) -> None:
    """They start from the first rank's values, and their first gradient is shared already."""
    steps, frozen = [[-4.5] * 3, [-3.0] * 2], [[-1.5] * 3, [-3.0] * 2]
    for results in pool.run(2, every_way):
        assert results == [steps, frozen] * len(REDUCERS)


def added_on_one() -> str:
    net = Sum()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, ddp(), timeout=5):
        step(net, optimizer)
        if dist.get_rank() == 1:
            add(net, optimizer)
        try:
            step(net, optimizer)
        except RankMismatch as error:
            return str(error)
    return ""


def test_a_parameter_added_on_one_rank_is_an_error_on_all(pool: RankPool) -> None:
    """Nobody waits: the ranks hear of it with the gradients of the others."""
    for said in pool.run(3, added_on_one):
        assert "parts.1" in said


def added_inside_ddp() -> str:
    inner = Sum()
    net = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, ddp()):
        step(net, optimizer)
        add(inner, optimizer)
        try:
            step(net, optimizer)
        except RuntimeError as error:
            return str(error)
    return ""


def test_ddp_cannot_take_them_in(pool: RankPool) -> None:
    """So this is refused, with the way out."""
    for said in pool.run(2, added_inside_ddp):
        assert "'module.parts.1' was added after attach" in said
        assert "wrap the model anew" in said
