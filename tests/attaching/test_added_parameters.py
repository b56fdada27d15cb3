"""Parameters that a model gets after ``attach``."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loosestep import PeerLost, RankMismatch, attach, ddp, post_local_sgd
from loosestep.reducers import Mean, Reducer, Resident
from loosestep.testing import RankPool, run_ranks

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


def added_inside_ddp_on_one() -> str:
    inner = Sum()
    net = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, ddp(), timeout=4):
        step(net, optimizer)
        if dist.get_rank() == 1:
            add(inner, optimizer)
        try:
            step(net, optimizer)
            step(net, optimizer)
        except PeerLost as error:
            return f"{error.ranks}"
        except RuntimeError as error:
            time.sleep(8)  # it lives on, so its connections stay
            return str(error)
    return "nothing"


def test_ddp_with_one_on_one_rank_ends_for_all(pool: RankPool) -> None:
    """The rank that has it says so; the others wait for it no longer than they may, and name it."""
    first, second, third = pool.run(3, added_inside_ddp_on_one)
    assert (first, third) == ("(1,)", "(1,)")
    assert "'module.parts.1' was added after attach" in second


def added_in_a_local_phase() -> list[list[float]]:
    inner = Sum()
    net = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, post_local_sgd(2, gradients=None)):
        step(net, optimizer)
        step(net, optimizer)
        add(inner, optimizer)
        step(net, optimizer)
        step(net, optimizer)
    return [part.tolist() for part in inner.parts]


def test_ddp_takes_them_in_while_gradients_are_local(pool: RankPool) -> None:
    """Nothing is shared then, and averages take them like all others."""
    for parts in pool.run(2, added_in_a_local_phase):
        assert parts == [[-6.0] * 3, [2.0] * 2]  # 0 less four mean steps, 5 less two


class BesideFSDP(Sum):
    """The same beside a sharded layer, and without any part at first."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, factor: float) -> torch.Tensor:
        sums = [self.layer(torch.ones(1, 2)).sum(), *(part.sum() for part in self.parts)]
        return factor * torch.stack(sums).sum()


def added_beside_fsdp(adders: tuple[int, ...]) -> list[list[float]] | str:
    net = BesideFSDP()
    fully_shard(net.layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with attach(net, optimizer, ddp(), timeout=5):
        step(net, optimizer)
        if dist.get_rank() in adders:
            add(net, optimizer)
        try:
            step(net, optimizer)
            step(net, optimizer)
        except RankMismatch as error:
            return str(error)
    return [part.tolist() for part in net.parts]


def test_added_beside_fsdp_they_are_taken_in_too() -> None:
    """Also where nothing was plain at attach: all ranks are asked then, before each step."""
    assert run_ranks(2, added_beside_fsdp, (0, 1)) == [[[-3.0] * 2]] * 2
    assert all("parts.0" in said for said in run_ranks(2, added_beside_fsdp, (1,)))
