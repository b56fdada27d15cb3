"""Buffers in the local phase, the steps at which averages fall, and levels of ranks."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist

import loosestep
from loosestep import LoosestepWarning, Topology, attach, hierarchical_sgd
from loosestep.errors import forget_warnings
from loosestep.testing import RankPool, run_ranks
from tests.support.defects import Loop, all_three, attempt, both, library, scalar, torch_fails

PLANS = [(4, 2), (4, 0), (3, 5), (2, 7)]


class Statistics(torch.nn.Module):
    """BatchNorm, and the mean that its buffer must have if nobody else writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(inputs)
        return output

    @property
    def mean(self) -> float:
        assert self.norm.running_mean is not None
        return self.norm.running_mean.item()


def watch_buffers(name: str) -> tuple[float, float, float, int]:
    """Return the running mean after a local phase, its oracle, and what a sync makes of it."""
    model, rank = Statistics(), dist.get_rank()
    loop = Loop(name, model, period=4, warmup_steps=0)
    expected = 0.0
    inputs = torch.full((8, 1), float(rank))
    for step in range(8):
        loop.optimizer.zero_grad()
        loop.backward(inputs)
        expected = 0.9 * expected + 0.1 * rank
        if step == 7:
            local = model.mean
            model.norm.num_batches_tracked.fill_(10 * rank)  # type: ignore[union-attr]
        loop.optimizer.step()
        if step == 3:
            expected = model.mean  # the first sync; what comes now is a local phase
    return local, expected, model.mean, int(model.norm.num_batches_tracked)  # type: ignore[arg-type]


@all_three
def test_ddp_broadcasts_no_buffers_in_a_local_phase(pool: RankPool, name: str):
    """Between averages every rank's BatchNorm statistics follow its own batches."""
    with torch_fails(name, "assert"):
        for local, expected, _, _ in pool.run(2, watch_buffers, name):
            assert local == pytest.approx(expected)


@all_three
def test_buffers_are_averaged(pool: RankPool, name: str):
    """A sync averages running statistics and takes the largest of the counters."""
    with torch_fails(name, "assert"):
        seen = pool.run(2, watch_buffers, name)
        mean = sum(local for local, _, _, _ in seen) / 2
        assert [after for _, _, after, _ in seen] == pytest.approx([mean, mean])
        assert [count for _, _, _, count in seen] == [10, 10]


def count_warnings(name: str, norm: torch.nn.Module | None) -> list[str]:
    forget_warnings()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), norm or torch.nn.Identity())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # torch averages no others
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            averager = library(name).PeriodicModelAverager(period=4)
            averager.average_parameters(net.parameters())
    return [str(w.message) for w in caught if issubclass(w.category, LoosestepWarning)]


@both
def test_an_averager_that_sees_no_buffers_says_so_once(pool: RankPool, name: str):
    """Without module= buffers stay out of it, and the averager says that, once."""
    with torch_fails(name, "assert"):
        for said in pool.run(2, count_warnings, name, torch.nn.BatchNorm1d(2)):
            assert len(said) == 1
            assert "module=model" in said[0]


def test_buffers_may_be_in_a_part_without_parameters(pool: RankPool):
    """What is averaged is looked for in whole models."""
    norm = torch.nn.BatchNorm1d(2, affine=False)
    assert [len(said) for said in pool.run(2, count_warnings, "loosestep", norm)] == [1, 1]


@pytest.mark.parametrize("norm", [None, torch.nn.LayerNorm(2)])
def test_nothing_is_said_of_buffers_that_a_model_does_not_have(
    pool: RankPool, norm: torch.nn.Module | None
):
    """A model of parameters only needs no module=."""
    assert pool.run(2, count_warnings, "loosestep", norm) == [[], []]


def watch_steps(name: str, kind: str, period: int, warmup_steps: int) -> list[tuple[int, float]]:
    """Return the steps that average, and the mean that came of it: it tells the group."""
    if kind == "periodic":
        averager = library(name).PeriodicModelAverager(period, warmup_steps)
    else:
        sizes = OrderedDict([(period, 2), (2 * period, 4)])
        averager = library(name).HierarchicalModelAverager(sizes, warmup_steps)
    parameter = scalar()
    steps = []
    for step in range(20):
        parameter.data.fill_(dist.get_rank())
        averager.average_parameters([parameter])
        if parameter.item() != dist.get_rank():
            steps.append((step, parameter.item()))
    return steps


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
@pytest.mark.parametrize(("period", "warmup_steps"), PLANS)
def test_averages_fall_on_the_same_steps(pool: RankPool, kind: str, period: int, warmup_steps: int):
    """A name from torch averages when torch's does, over the same ranks."""
    torchs, ours = (
        pool.run(4, watch_steps, name, kind, period, warmup_steps)
        for name in ("torch", "loosestep")
    )
    assert ours == torchs
    assert all(ours)


@both
def test_each_name_keeps_its_phase(pool: RankPool, name: str):
    """With period 4 and warm-up 2 one counts from the warm-up and the other from 0."""
    periodic = pool.run(4, watch_steps, name, "periodic", 4, 2)[0]
    assert [step for step, _ in periodic] == [2, 6, 10, 14, 18]
    hierarchical = pool.run(4, watch_steps, name, "hierarchical", 4, 2)[0]
    # Rank 0 averages with rank 1 (mean 0.5) every 4 steps, with all (mean 1.5) every 8.
    assert hierarchical == [(4, 0.5), (8, 1.5), (12, 0.5), (16, 1.5)]


def train_to_the_end(name: str, num_steps: int) -> float:
    averager, parameter = library(name).PeriodicModelAverager(4, 1), scalar()
    for _ in range(num_steps):
        parameter.data.fill_(dist.get_rank())
        averager.average_parameters([parameter])
    if name != "torch":  # which has nothing of the kind
        averager.finalize([parameter])
    return parameter.item()


@both
def test_the_tail_is_averaged(pool: RankPool, name: str):
    """Steps after the last due average are averaged by finalize()."""
    with torch_fails(name, "assert"):
        assert pool.run(2, train_to_the_end, name, 8) == [0.5, 0.5]


def finalize_after_loading() -> float:
    averager, parameter = loosestep.PeriodicModelAverager(4), scalar()
    averager.average_parameters([parameter])  # at step 0, so that nothing is left to finalize
    parameter.data.fill_(dist.get_rank())
    averager.step = 1  # as loading a checkpoint does
    averager.finalize([parameter])
    return parameter.item()


def test_finalize_believes_no_average_from_before_a_load(pool: RankPool):
    """Parameters that were loaded may differ, whatever was averaged before them."""
    assert pool.run(2, finalize_after_loading) == [0.5, 0.5]


def try_levels(name: str, sizes: list[tuple[int, int]]) -> str:
    try:
        library(name).HierarchicalModelAverager(OrderedDict(sizes))
    except ValueError as error:
        return str(error)
    return "accepted"


@both
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([(8, 2), (2, 4)], "periods must grow"),  # the pairs would never average
        ([(2, 2), (0, 4)], "whole number >= 1"),  # a division by zero, later
    ],
)
def test_periods_that_cannot_work_are_refused(
    pool: RankPool, name: str, sizes: list[tuple[int, int]], reason: str
):
    """A hierarchy that would do nothing or fail later is refused at construction."""
    with torch_fails(name, "accepted"):
        for said in pool.run(4, try_levels, name, sizes):
            assert re.search(reason, said)


@both
def test_levels_that_do_not_nest_are_refused(name: str):
    """Groups of 3 do not contain groups of 2."""
    with torch_fails(name, "accepted"):
        for said in run_ranks(6, try_levels, name, [(1, 2), (2, 3), (4, 6)]):
            assert re.search("must nest", said)


def average_uneven_hosts(name: str) -> list[float]:
    """Return the parameter after every step, on hosts of ranks 0, 1, 3 and of rank 2."""
    parameter = scalar()
    values = []
    if name == "torch":
        averager: Any = library(name).HierarchicalModelAverager(OrderedDict([(2, 3), (4, 4)]), 1)
        for _ in range(5):
            averager.average_parameters([parameter])
            values.append(parameter.item())
        return values[1:]
    hosts = Topology({"host": [[0, 3, 1], [2]], "world": [[0, 1, 2, 3]]})
    model, optimizer = torch.nn.ParameterList([parameter]), torch.optim.SGD([parameter], lr=0.0)
    strategy = hierarchical_sgd({"host": 2, "world": 4}, topology=hosts)
    with attach(model, optimizer, strategy):
        parameter.data.fill_(dist.get_rank())
        for _ in range(4):
            optimizer.step()
            values.append(parameter.item())
    return values


@both
def test_groups_may_be_uneven_and_scattered(pool: RankPool, name: str):
    """Ranks 0, 1 and 3 have the mean 4/3; with rank 2 that is (3 * 4/3 + 2) / 4 = 3/2."""
    host = pytest.approx(4 / 3)
    with torch_fails(name, "divisible"):
        seen = pool.run(4, attempt, name, average_uneven_hosts)
        assert seen[0] == [0.0, host, host, 1.5]
        assert seen[1] == [1.0, host, host, 1.5]
        assert seen[2] == [2.0, 2.0, 2.0, 1.5]
        assert seen[3] == [3.0, host, host, 1.5]
