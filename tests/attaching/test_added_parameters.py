"""Parameters that a model gets after ``attach``."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    PeerLost,
    RankMismatch,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    post_local_sgd,
    zero,
)
from loosestep.reducers import Mean, Reducer, SharedMemoryMean
from loosestep.testing import RankPool, run_ranks

REDUCERS: list[Reducer | None] = [None, Mean(), SharedMemoryMean()]


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


def added_under_zero(stage: int, adders: tuple[int, ...], wrapped: bool) -> list[list[float]] | str:
    inner = Sum()
    net = DistributedDataParallel(inner) if wrapped else inner
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1.0)
    with attach(net, optimizer, zero(stage=stage), timeout=4):
        step(net, optimizer)
        try:
            if dist.get_rank() in adders:
                add(inner, optimizer)
            step(net, optimizer)
            step(net, optimizer)
        except (RuntimeError, RankMismatch) as error:
            time.sleep(6)  # it lives on, so its connections stay
            return f"{type(error).__name__}: {error}"
    return [part.tolist() for part in inner.parts]


@pytest.mark.parametrize("stage", [1, 2])
def test_added_under_zero_they_are_taken_in_or_refused_on_all(stage: int) -> None:
    """On all ranks they start from the first one's values; on one rank alone all get an error."""
    assert run_ranks(2, added_under_zero, stage, (0, 1), False) == [[[-4.5] * 3, [-3.0] * 2]] * 2
    for said in run_ranks(2, added_under_zero, stage, (1,), False):
        assert isinstance(said, str)
        assert said.startswith(("RankMismatch", "PeerLost")), said


def test_added_under_zero_ddp_refuses_them() -> None:
    """As it does without."""
    for said in run_ranks(2, added_under_zero, 1, (0, 1), True):
        assert "'module.parts.1' was added after attach" in said


class Two(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, factor: float) -> torch.Tensor:
        return self.second(self.first(torch.full((2, 4), factor))).pow(2).sum()


def sharded_later(sharded_first: bool, gradients: str | None) -> tuple[str, bool]:
    """Return what is said when a part is sharded after attach, and if ranks are equal at the end.

    The mesh of shards is half of the ranks, with which gradients are shared.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, said = Two(), ""
    if sharded_first:
        fully_shard(net.first, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    strategy = post_local_sgd(3, gradients=gradients, topology=Topology.from_mesh(mesh))
    with attach(net, optimizer, strategy, timeout=20):
        step(net, optimizer)
        fully_shard(net.second, mesh=mesh["shard"])
        optimizer.param_groups[0]["params"] = list(net.parameters())
        try:
            step(net, optimizer)
            step(net, optimizer)
        except RuntimeError as error:
            said = str(error)
    second = net.second.weight.full_tensor() if not said else torch.zeros(1)  # type: ignore[attr-defined]
    both = [torch.empty_like(second) for _ in range(4)]
    dist.all_gather(both, second.detach())
    return said, all(torch.equal(both[0], other) for other in both)


def all_sharded_later() -> list[tuple[str, bool]]:
    return [sharded_later(first, gradients) for first, gradients in SHARDED_LATER]


SHARDED_LATER = [(True, "replicate"), (False, "replicate"), (True, "shard")]


def test_a_part_that_is_sharded_later_is_refused_where_its_gradients_would_stay_apart() -> None:
    """FSDP shares them in its mesh alone; where that is all that is due, averages do the rest."""
    for beside, alone, enough in run_ranks(4, all_sharded_later):
        for said, _ in (beside, alone):
            assert "given to fully_shard after attach" in said
            assert "attach again" in said
        assert "'second'" in beside[0]
        assert "'second.weight'" in alone[0]
        assert enough == ("", True)
