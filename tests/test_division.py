"""Averages that the ranks of a host divide among themselves, where they hold the same values."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from loosestep import (
    ErrorFeedback,
    Hosts,
    Int4,
    Int8,
    Mean,
    NonFinite,
    NotFinite,
    PeerLost,
    PeriodicModelAverager,
    RankMismatch,
    Reducer,
    Strategy,
    Topology,
    TwoLevel,
    attach,
    every,
    post_local_sgd,
)
from loosestep.testing import RankPool
from loosestep.wire.division import shares
from tests.oracle import loss_of, make_net, sgd

STEPS = 9
HOSTS = {"host": 2, "world": 4}


class Mixed(torch.nn.Module):
    """Parameters of several dtypes and layouts, of which some cannot be cut in two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        image = torch.randn(6, 3, 2, 2).to(memory_format=torch.channels_last)
        self.kernel = torch.nn.Parameter(image)
        self.turned = torch.nn.Parameter(torch.randn(5, 7).t())
        self.narrow = torch.nn.Parameter(torch.randn(9).bfloat16())
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.wide = torch.nn.Parameter(torch.randn(1, 50))

    def loss(self, seed: int) -> torch.Tensor:
        total = torch.zeros(())
        for index, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * seed + index)
            target = torch.randn(parameter.shape, generator=generator)
            total = total + (parameter.float() - target).square().sum()
        return total


def strategy(inner: Reducer | None, hosts: Hosts, overlap_steps: int = 0) -> Strategy:
    return post_local_sgd(
        3,
        warmup_steps=0,
        topology=Topology.from_sizes(HOSTS, timeout=60.0),
        reducer=TwoLevel(inner, hosts=hosts, ranks_per_host=2),
        gradient_reducer=Mean(),
        overlap_steps=overlap_steps,
    )


def train_mixed(inner: Reducer | None, hosts: Hosts, overlap_steps: int) -> list[torch.Tensor]:
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)
    with attach(net, optimizer, strategy(inner, hosts, overlap_steps)) as run:
        for step in range(STEPS):
            optimizer.zero_grad()
            net.loss(10 * step + dist.get_rank()).backward()
            optimizer.step()
        run.finalize()
    assert net.kernel.is_contiguous(memory_format=torch.channels_last)
    return [parameter.detach().clone() for parameter in net.parameters()]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=6), st.integers(1, 5))
def test_shares_hold_every_element_once(shapes: list[list[int]], count: int) -> None:
    """All elements are in one part each, and no part is larger than it must be."""
    named = [(str(index), torch.zeros(shape)) for index, shape in enumerate(shapes)]
    parts = shares(named, count)
    assert len(parts) == count
    for part in parts:
        for _, view in part:
            view.add_(1.0)
    assert all(bool((tensor == 1.0).all()) for _, tensor in named)
    rows = [t.numel() // t.shape[0] if t.dim() else 1 for _, t in named if t.numel()]
    total = sum(tensor.numel() for _, tensor in named)
    sizes = [sum(view.numel() for _, view in part) for part in parts]
    assert max(sizes) <= math.ceil(total / count) + max(rows, default=0)
    assert len({name for part in parts for name, _ in part}) == sum(map(len, parts))


@pytest.mark.parametrize("overlap_steps", [0, 1, 3])
def test_a_divided_average_is_the_average(pool: RankPool, overlap_steps: int) -> None:
    """To the bit what every rank would find by itself, for all dtypes and layouts."""
    apart = pool.run(4, train_mixed, None, Hosts.DIFFER, overlap_steps)
    divided = pool.run(4, train_mixed, None, Hosts.AGREE, overlap_steps)
    for one, other in zip(apart, divided, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("inner", [Int4(), ErrorFeedback(Int8())], ids=["int4", "int8+ef"])
def test_a_divided_compressed_average(pool: RankPool, inner: Reducer, overlap_steps: int) -> None:
    """All ranks end bit-equal, and near the exact result."""
    exact = pool.run(4, train_mixed, None, Hosts.AGREE, overlap_steps)
    results = pool.run(4, train_mixed, inner, Hosts.AGREE, overlap_steps)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    for a, b in zip(results[0], exact[0], strict=True):
        assert (a.float() - b.float()).norm() <= 0.1 * b.float().norm()


def train_net(hosts: Hosts) -> dict[str, torch.Tensor]:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, strategy(Int8(), hosts)):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_buffers_are_averaged_over_all_ranks(pool: RankPool) -> None:
    """Ranks of a host see other data, so their BatchNorm statistics differ: nobody's is lost."""
    divided, apart = (pool.run(4, train_net, hosts) for hosts in (Hosts.AGREE, Hosts.DIFFER))
    for rank in range(4):
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.equal(divided[rank][name], divided[0][name])
            assert torch.allclose(divided[rank][name], apart[rank][name], atol=0.01)
        assert divided[rank]["norm.num_batches_tracked"] == 6


def kept_bytes(hosts: Hosts) -> int:
    net = torch.nn.Linear(64, 64)
    with attach(net, sgd(net), strategy(Int4(), hosts)) as run:
        kept = run.state_dict()["references"]["world"]["values"]
        return sum(tensor.nbytes for tensor in kept.values())


def test_a_rank_remembers_its_part_only(pool: RankPool) -> None:
    """What differences are taken from is kept once a host."""
    whole = (64 * 64 + 64) * 4
    assert pool.run(4, kept_bytes, Hosts.DIFFER) == [whole] * 4
    divided = pool.run(4, kept_bytes, Hosts.AGREE)
    assert divided[0] + divided[1] == whole
    assert abs(divided[0] - divided[1]) <= 2 * 64 * 4


def averager_of_torch_users(hosts: Hosts, overlap_steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Linear(9, 5)
    reducer = TwoLevel(ranks_per_host=2, hosts=hosts)
    averager = PeriodicModelAverager(2, 0, reducer=reducer, overlap_steps=overlap_steps, module=net)
    for step in range(7):
        with torch.no_grad():
            torch.manual_seed(step + 50 * (dist.get_rank() // 2))
            net.weight.add_(torch.randn(5, 9))
        averager.average_parameters(net.parameters())
    averager.finalize(net.parameters())
    averager.close()
    return net.weight.detach().clone()


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_averagers_divide_too(pool: RankPool, overlap_steps: int) -> None:
    """The drop-in averagers give the same, divided or not."""
    runs = [pool.run(4, averager_of_torch_users, h, overlap_steps) for h in Hosts]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert all(torch.equal(one, runs[0][0]) for one in runs[0])


# What can go wrong.


def stray(overlap_steps: int) -> str:
    net = torch.nn.Linear(4, 3)
    optimizer = sgd(net)
    with attach(net, optimizer, strategy(Int4(), Hosts.AGREE, overlap_steps)):
        try:
            for step in range(STEPS):
                optimizer.zero_grad()
                net(torch.full((2, 4), step + 1.0)).sum().backward()
                if dist.get_rank() == 3:
                    with torch.no_grad():
                        net.weight.add_(0.5)
                        net.bias.add_(0.5)
                optimizer.step()
        except RankMismatch as error:
            return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_ranks_that_do_not_agree_are_told(pool: RankPool, overlap_steps: int) -> None:
    """All ranks of all hosts hear which ones differ, and what to do."""
    for rank, heard in enumerate(pool.run(4, stray, overlap_steps)):
        assert heard.startswith(f"rank {rank}: hosts='agree' says")
        assert "ranks [2, 3] differ" in heard
        assert "hosts='differ'" in heard


def with_nan(policy: NonFinite) -> list[float] | str:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = sgd(net)
    with attach(net, optimizer, strategy(Int8(on_nonfinite=policy), Hosts.AGREE)):
        try:
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.ones(2, 4)).sum().backward()
                with torch.no_grad():
                    if dist.get_rank() >= 2:  # all ranks of the second host
                        net.bias.fill_(math.nan)
                optimizer.step()
        except NotFinite as error:
            return str(error)
    return net.bias.tolist()


def test_infinities_are_found_by_whoever_has_them(pool: RankPool) -> None:
    """The rank whose part holds them tells all; or the whole host is left out."""
    raised = pool.run(4, with_nan, NonFinite.RAISE)
    assert all("an infinity or NaN on" in str(heard) and "'bias" in str(heard) for heard in raised)
    skipped = pool.run(4, with_nan, NonFinite.SKIP)
    assert all(math.isfinite(float(value)) for biases in skipped for value in biases)
    assert all(biases == skipped[0] for biases in skipped)


def resumed(overlap_steps: int, stop: int) -> bool:
    """Train without a break and with one after ``stop`` steps."""

    def go(net: Mixed, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            net.loss(10 * step + dist.get_rank()).backward()
            optimizer.step()

    def fresh() -> tuple[Mixed, torch.optim.Optimizer, Strategy]:
        net = Mixed()
        chosen = strategy(ErrorFeedback(Int4()), Hosts.AGREE, overlap_steps)
        return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5), chosen

    whole, optimizer, chosen = fresh()
    with attach(whole, optimizer, chosen):
        go(whole, optimizer, 0, STEPS)
    first, optimizer, chosen = fresh()
    with attach(first, optimizer, chosen) as run:
        go(first, optimizer, 0, stop)
        saved: list[dict[str, Any]] = copy.deepcopy(
            [first.state_dict(), optimizer.state_dict(), run.state_dict()]
        )
    second, optimizer, chosen = fresh()
    with attach(second, optimizer, chosen) as run:
        second.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        run.load_state_dict(saved[2])
        go(second, optimizer, stop, STEPS)
    pairs = zip(whole.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("overlap_steps", "stop"), [(0, 5), (2, 4), (2, 5)])
def test_resumed_equals_uninterrupted(pool: RankPool, overlap_steps: int, stop: int) -> None:
    """Also with an average under way, whose parts came from several ranks."""
    assert pool.run(4, resumed, overlap_steps, stop) == [True] * 4


def lose_one(overlap_steps: int) -> tuple[tuple[int, ...], str, float]:
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    topology = Topology.from_sizes(HOSTS, timeout=8.0)
    reducer = TwoLevel(Int4(), hosts=Hosts.AGREE, ranks_per_host=2)
    attach(
        net,
        optimizer,
        Strategy(
            schedule=every(2), topology=topology, reducer=reducer, overlap_steps=overlap_steps
        ),
    )
    for step in range(50):
        if step == 5 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            optimizer.step()
        except PeerLost as error:
            return error.ranks, str(error), time.monotonic() - began
    return (), "", 0.0


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_lost_rank_is_noticed_by_all(pool: RankPool, overlap_steps: int) -> None:
    """Nobody waits for ever, neither for other hosts nor for neighbours."""
    results = pool.run(4, lose_one, overlap_steps, allow_dead=[3])
    for rank in (0, 1, 2):
        ranks, text, seconds = results[rank]
        assert ranks == (3,), text
        assert f"rank {rank}: lost rank 3" in text
        assert seconds < 5
