"""What an average must leave alone, and who takes part; each control shows torch failing."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from loosestep import average_parameters
from loosestep.testing import RankPool
from tests.support.defects import attempt, both, library, torch_fails


def fill(model: torch.nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.data.fill_(value)
        parameter.grad = torch.zeros_like(parameter)


def watch_storage(name: str) -> dict[str, bool]:
    model = torch.nn.Linear(64, 64)
    fill(model, 2.0 * dist.get_rank())
    outside = model.weight.data[3]  # as an average of weights or a bucket would hold it
    pointers = [p.data_ptr() for p in model.parameters()]
    library(name).average_parameters(model.parameters(), None)
    assert model.weight.eq(1.0).all()
    saved = io.BytesIO()
    torch.save(model.bias, saved)
    return {
        "pointers stay": pointers == [p.data_ptr() for p in model.parameters()],
        "views see the mean": bool(outside.eq(1.0).all()),
        "a bias saves small": len(saved.getvalue()) < 4096,
    }


@both
@pytest.mark.parametrize("fact", ["pointers stay", "views see the mean", "a bias saves small"])
def test_average_is_in_place(pool: RankPool, name: str, fact: str):
    """After an average every parameter is where it was, alone in its storage."""
    with torch_fails(name, "assert"):
        assert all(seen[fact] for seen in pool.run(2, watch_storage, name))


def watch_memory_format(name: str) -> bool:
    model = torch.nn.Conv2d(4, 8, 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strides = model.weight.stride()
    library(name).average_parameters(model.parameters(), None)
    return model.weight.stride() == strides


@both
def test_channels_last_survives(pool: RankPool, name: str):
    """Averaging leaves the memory format as it was."""
    with torch_fails(name, "assert"):
        assert pool.run(2, watch_memory_format, name) == [True, True]


def watch_tie(name: str) -> tuple[bool, float]:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight.data = first.weight.data
    fill(first, 2.0 * dist.get_rank())
    library(name).average_parameters(iter([first.weight, second.weight]), None)
    tied = first.weight.data_ptr() == second.weight.data_ptr()
    return tied, second.weight.mean().item()


@both
def test_storage_ties_survive(pool: RankPool, name: str):
    """Two parameters on one storage are averaged once and still share it."""
    with torch_fails(name, "False"):
        assert pool.run(2, watch_tie, name) == [(True, 1.0)] * 2


def watch_payload(name: str) -> tuple[int, list[str]]:
    """Return the bytes that a rank sends, by which a ring and our mean are equal on two ranks."""
    tensors = [torch.zeros(1000, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64)]
    parameters = [torch.nn.Parameter(t) for t in tensors]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    averager = library(name).PeriodicModelAverager(period=4)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        averager.average_parameters(parameters)
    if name == "torch":
        flat = reduced.call_args.args[0]
        payload = flat.numel() * flat.element_size()
    else:
        totals = averager.telemetry.metrics()["parameters/every 4"]
        payload = totals["bytes_sent"] + totals["bytes_copied"]
    return payload, [str(p.dtype) for p in parameters]


@both
def test_every_dtype_travels_as_it_is(pool: RankPool, name: str):
    """1000 elements of 2, 4 and 8 bytes are 14000 bytes, and keep their dtypes."""
    dtypes = ["torch.bfloat16", "torch.float32", "torch.float64"]
    with torch_fails(name, "24000"):
        assert pool.run(2, watch_payload, name) == [(14000, dtypes)] * 2


def watch_equal_replicas(name: str) -> bool:
    parameter = torch.nn.Parameter(torch.randn(1000).bfloat16())  # the same seed on every rank
    before = parameter.detach().clone()
    library(name).average_parameters(iter([parameter]), None)
    return torch.equal(parameter, before)


@both
def test_equal_replicas_do_not_move(pool: RankPool, name: str):
    """The mean of three equal bf16 replicas is the same replica, to the bit."""
    with torch_fails(name, "assert"):
        assert pool.run(3, watch_equal_replicas, name) == [True] * 3


def average_experts(name: str, sizes: tuple[int, int]) -> list[float]:
    """Each rank's last batch used another expert, so only that one has a gradient."""
    values = zip((10.0, 20.0), sizes, strict=True)
    experts = [torch.nn.Parameter(torch.full((size,), value)) for value, size in values]
    mine = experts[dist.get_rank()]
    mine.grad = torch.zeros_like(mine)
    library(name).PeriodicModelAverager(period=4).average_parameters(experts)
    return [expert.mean().item() for expert in experts]


@both
def test_experts_are_averaged_with_themselves(pool: RankPool, name: str):
    """Who takes part does not depend on which gradients this rank happens to have."""
    with torch_fails(name, "15.0"):
        assert pool.run(2, average_experts, name, (1, 1)) == [[10.0, 20.0]] * 2


@both
def test_experts_of_other_sizes_are_averaged_too(pool: RankPool, name: str):
    """Neither do experts of different sizes end up in one collective, which kills a process."""
    with torch_fails(name, "died of SIGABRT"):
        seen = pool.run(2, average_experts, name, (4, 1000), group_timeout=3.0, timeout=20.0)
        assert seen == [[10.0, 20.0]] * 2


def average_after_zero_grad(name: str) -> float:
    model = torch.nn.Linear(1, 1, bias=False)
    fill(model, 2.0 * dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = library(name).PeriodicModelAverager(period=4)
    optimizer.step()
    optimizer.zero_grad()
    averager.average_parameters(model.parameters())
    return model.weight.item()


@both
def test_gradients_may_be_cleared_before_the_average(pool: RankPool, name: str):
    """zero_grad(), which sets gradients to None, may come before the average."""
    with torch_fails(name, "torch.cat"):
        assert pool.run(2, attempt, name, average_after_zero_grad) == [1.0, 1.0]


def average_beside_user_traffic(name: str) -> tuple[list[float], float]:
    """Rank 0 starts its own all_reduce and receive before the average, rank 1 after it."""
    parameter = torch.nn.Parameter(torch.full((4,), 2.0 * dist.get_rank()))
    mine, received = torch.full((4,), 100.0), torch.zeros(1)
    other, pending = 1 - dist.get_rank(), []
    if dist.get_rank() == 0:
        pending += [dist.irecv(received, other), dist.all_reduce(mine, async_op=True)]
    library(name).average_parameters(iter([parameter]), None)
    if dist.get_rank() == 1:
        received += 7.0
        pending += [dist.isend(received, other), dist.all_reduce(mine, async_op=True)]
    for work in pending:
        assert work is not None
        work.wait()
    return [parameter.mean().item(), mine.mean().item()], received.item()


@both
def test_user_traffic_does_not_mix_with_an_average(pool: RankPool, name: str):
    """An average uses a process group of its own, so the order on the world does not matter."""
    with torch_fails(name, "assert|ranks failed"):
        seen = pool.run(2, average_beside_user_traffic, name, group_timeout=3.0, timeout=20.0)
        assert seen == [([1.0, 200.0], 7.0)] * 2


def take_part_or_not(ranks: list[int]) -> float:
    group: Any = dist.new_group(ranks)
    parameter = torch.nn.Parameter(torch.tensor(float(dist.get_rank())))
    average_parameters(iter([parameter]), group)
    return parameter.item()


def test_only_members_of_a_given_group_average(pool: RankPool):
    """A group that does not start at rank 0 averages like any other."""
    assert pool.run(4, take_part_or_not, [1, 3]) == [0.0, 2.0, 2.0, 2.0]
