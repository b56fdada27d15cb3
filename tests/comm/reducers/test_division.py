"""Averages that the ranks of a host divide among themselves, where they hold the same values."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from loosestep import (
    NonFinite,
    NotFinite,
    PeerLost,
    PeriodicModelAverager,
    RankMismatch,
    Strategy,
    Topology,
    attach,
    post_local_sgd,
)
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place
from loosestep.reducers import ErrorFeedback, Int4, Int8, Mean, RanksOfHost, Reducer, TwoLevel
from loosestep.schedules import every
from loosestep.testing import RankPool, run_ranks
from tests.support.oracle import loss_of, make_net, sgd
from tests.support.pairs import in_pairs

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


def strategy(inner: Reducer | None, ranks_of_host: RanksOfHost, overlap_steps: int = 0) -> Strategy:
    return post_local_sgd(
        3,
        warmup_steps=0,
        topology=Topology.from_sizes(HOSTS, timeout=60.0),
        reducer=TwoLevel(inner, ranks_of_host=ranks_of_host, ranks_per_host=2),
        gradient_reducer=Mean(),
        overlap_steps=overlap_steps,
    )


def train_mixed(
    inner: Reducer | None, ranks_of_host: RanksOfHost, overlap_steps: int
) -> list[torch.Tensor]:
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.5)
    with attach(net, optimizer, strategy(inner, ranks_of_host, overlap_steps)) as run:
        for step in range(STEPS):
            optimizer.zero_grad()
            net.loss(10 * step + dist.get_rank()).backward()
            optimizer.step()
        run.finalize()
    assert net.kernel.is_contiguous(memory_format=torch.channels_last)
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("overlap_steps", [0, 1, 3])
def test_a_divided_average_is_the_average(pool: RankPool, overlap_steps: int) -> None:
    """To the bit what every rank would find by itself, for all dtypes and layouts."""
    apart = pool.run(4, train_mixed, None, RanksOfHost.DIFFER, overlap_steps)
    divided = pool.run(4, train_mixed, None, RanksOfHost.EQUAL, overlap_steps)
    for one, other in zip(apart, divided, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("overlap_steps", [0, 2])
@pytest.mark.parametrize("inner", [Int4(), ErrorFeedback(Int8())], ids=["int4", "int8+ef"])
def test_a_divided_compressed_average(pool: RankPool, inner: Reducer, overlap_steps: int) -> None:
    """All ranks end bit-equal, and near the exact result."""
    exact = pool.run(4, train_mixed, None, RanksOfHost.EQUAL, overlap_steps)
    results = pool.run(4, train_mixed, inner, RanksOfHost.EQUAL, overlap_steps)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    for a, b in zip(results[0], exact[0], strict=True):
        assert (a.float() - b.float()).norm() <= 0.1 * b.float().norm()


def train_net(ranks_of_host: RanksOfHost) -> dict[str, torch.Tensor]:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, strategy(Int8(), ranks_of_host)):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_buffers_are_averaged_over_all_ranks(pool: RankPool) -> None:
    """Ranks of a host see other data, so their BatchNorm statistics differ: nobody's is lost."""
    divided, apart = (
        pool.run(4, train_net, hosts) for hosts in (RanksOfHost.EQUAL, RanksOfHost.DIFFER)
    )
    for rank in range(4):
        for name in ("norm.running_mean", "norm.running_var"):
            assert torch.equal(divided[rank][name], divided[0][name])
            assert torch.allclose(divided[rank][name], apart[rank][name], atol=0.01)
        assert divided[rank]["norm.num_batches_tracked"] == 6


def kept_bytes(ranks_of_host: RanksOfHost) -> int:
    net = torch.nn.Linear(64, 64)
    with attach(net, sgd(net), strategy(Int4(), ranks_of_host)) as run:
        kept = run.state_dict()["kept"]["world"]["references"]["values"]
        return sum(tensor.nbytes for tensor in kept.values())


def test_a_rank_remembers_its_part_only(pool: RankPool) -> None:
    """What differences are taken from is kept once a host."""
    whole = (64 * 64 + 64) * 4
    assert pool.run(4, kept_bytes, RanksOfHost.DIFFER) == [whole] * 4
    divided = pool.run(4, kept_bytes, RanksOfHost.EQUAL)
    assert divided[0] + divided[1] == whole
    assert abs(divided[0] - divided[1]) <= 2 * 64 * 4


def averager_of_torch_users(ranks_of_host: RanksOfHost, overlap_steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Linear(9, 5)
    reducer = TwoLevel(ranks_per_host=2, ranks_of_host=ranks_of_host)
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
    runs = [pool.run(4, averager_of_torch_users, h, overlap_steps) for h in RanksOfHost]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert all(torch.equal(one, runs[0][0]) for one in runs[0])


# What can go wrong.


def stray(overlap_steps: int) -> str:
    net = torch.nn.Linear(4, 3)
    optimizer = sgd(net)
    with attach(net, optimizer, strategy(Int4(), RanksOfHost.EQUAL, overlap_steps)):
        try:
            for step in range(STEPS):
                optimizer.zero_grad()
                net(torch.full((2, 4), step + 1.0)).sum().backward()
                if dist.get_rank() == 3:
                    with torch.no_grad():
                        net.bias.add_(0.5)
                optimizer.step()
        except RankMismatch as error:
            return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_ranks_that_do_not_agree_are_told(pool: RankPool, overlap_steps: int) -> None:
    """All ranks of all hosts hear which ones differ, and what to do."""
    for rank, heard in enumerate(pool.run(4, stray, overlap_steps)):
        assert heard.startswith(f"rank {rank}: ranks_of_host='equal' says")
        assert "ranks [2, 3] differ" in heard
        assert "ranks_of_host='differ'" in heard


def with_nan(policy: NonFinite) -> list[float] | str:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = sgd(net)
    with attach(net, optimizer, strategy(Int8(on_nonfinite=policy), RanksOfHost.EQUAL)):
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
        chosen = strategy(ErrorFeedback(Int4()), RanksOfHost.EQUAL, overlap_steps)
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


class Deadly(Int4):
    """Four bits, but the last rank dies at its third use: between hosts, or inside its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.uses = where, 0

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        self.uses += 1
        if self.uses == 3 and dist.get_rank() == 3:
            if self.where == "across":
                os.kill(os.getpid(), signal.SIGKILL)
            handle = super().start(buffer, peers, state, place)
            handle.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().start(buffer, peers, state, place)

    def __repr__(self) -> str:
        return "Deadly()"


def lose_one(where: str, overlap_steps: int) -> tuple[tuple[int, ...], str, float]:
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    strategy = Strategy(
        schedule=every(2),
        topology=Topology.from_sizes(HOSTS, timeout=6.0),
        reducer=TwoLevel(Deadly(where), ranks_of_host=RanksOfHost.EQUAL, ranks_per_host=2),
        overlap_steps=overlap_steps,
    )
    attach(net, optimizer, strategy)
    for _ in range(50):
        began = time.monotonic()
        try:
            optimizer.step()
        except PeerLost as error:
            return error.ranks, str(error), time.monotonic() - began
    return (), "", 0.0


@pytest.mark.parametrize(("where", "overlap_steps"), in_pairs(["across", "inside"], [0, 1], each=1))
def test_a_lost_rank_is_noticed_by_all(pool: RankPool, where: str, overlap_steps: int) -> None:
    """Nobody waits for ever, neither for other hosts nor for neighbours."""
    results = pool.run(4, lose_one, where, overlap_steps, allow_dead=[3])
    for rank in (0, 1, 2):
        ranks, text, seconds = results[rank]
        assert ranks, text
        assert f"rank {rank}: " in text
        assert seconds < 20


def start_apart(inner: Reducer | None, buffers: str) -> tuple[bool, list[float]]:
    """Start from other values on every rank, and let the first one's buffers count."""
    net: Any = make_net(seed=dist.get_rank())
    net.norm.running_mean.fill_(dist.get_rank())
    net.norm.num_batches_tracked.fill_(dist.get_rank())
    chosen = replace(strategy(inner, RanksOfHost.EQUAL), buffers=buffers)
    optimizer = sgd(net)
    with attach(net, optimizer, chosen):
        mine = torch.cat([p.detach().flatten() for p in net.parameters()])
        firsts = mine.clone()
        dist.broadcast(firsts, 0)
        net.norm.running_mean.fill_(dist.get_rank())
        net.norm.num_batches_tracked.fill_(dist.get_rank())
        for _ in range(3):
            optimizer.step()
    found = [float(net.norm.running_mean[0]), float(net.norm.num_batches_tracked)]
    return torch.equal(mine, firsts), found


@pytest.mark.parametrize("inner", [None, Int4()], ids=["exact", "int4"])
def test_the_first_rank_is_followed_by_all(pool: RankPool, inner: Reducer | None) -> None:
    """At the start all take its parameters, and with that policy its buffers at every sync."""
    assert pool.run(4, start_apart, inner, "broadcast") == [(True, [0.0, 0.0])] * 4
    assert pool.run(4, start_apart, inner, "mean") == [(True, [1.5, 3.0])] * 4


def by_sockets() -> bool:
    """Compare a divided average through memory with one by messages."""
    results = []
    for allowed in ("1", "0"):
        os.environ["LOOSESTEP_SHARED_MEMORY"] = allowed
        results.append(train_mixed(None, RanksOfHost.EQUAL, 1))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_without_shared_memory() -> None:
    """Neighbours that cannot share memory hand round by messages, also where one has nothing."""
    assert run_ranks(4, by_sockets) == [True] * 4


def with_an_empty_share() -> torch.Tensor:
    net = torch.nn.Linear(40, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, strategy(ErrorFeedback(Int8()), RanksOfHost.EQUAL)):
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.full((1, 40), 1.0 + dist.get_rank())).sum().backward()
            optimizer.step()
    return net.weight.detach().clone()


def test_a_row_cannot_be_cut(pool: RankPool) -> None:
    """Then one rank of a host has nothing to do, and nothing to remember."""
    results = pool.run(4, with_an_empty_share)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], torch.full((1, 40), 1.0 - STEPS * 0.1 * 2.5), rtol=0.01)


def sharded_inside_a_host() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 6, bias=False)
    fully_shard(net, mesh=mesh["shard"])
    rank = dist.get_rank()
    with torch.no_grad():
        assert isinstance(net.weight, DTensor)
        net.weight.to_local().fill_(float(10 * (rank % 2) + rank // 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    reducer = TwoLevel(ranks_of_host=RanksOfHost.EQUAL, ranks_per_host=2)
    chosen = Strategy(
        schedule=every(1, "replicate"),
        topology=Topology.from_mesh(mesh),
        initial="ignore",
        reducer=reducer,
    )
    with attach(net, optimizer, chosen):
        optimizer.step()
    assert isinstance(net.weight, DTensor)
    return net.weight.full_tensor()[:, 0].tolist()


def test_shards_are_left_where_they_are() -> None:
    """Ranks of a host that hold shards do not hold the same, and do not divide."""
    assert run_ranks(4, sharded_inside_a_host) == [[0.5] * 3 + [10.5] * 3] * 4


def roll_back() -> bool:
    """Load an averager's state in the middle of training."""
    net = torch.nn.Linear(9, 5)
    reducer = TwoLevel(Int8(), ranks_per_host=2, ranks_of_host=RanksOfHost.EQUAL)
    averager = PeriodicModelAverager(3, reducer=reducer, overlap_steps=2, module=net)

    def go(first: int, last: int) -> None:
        for step in range(first, last):
            with torch.no_grad():
                torch.manual_seed(step + 50 * (dist.get_rank() // 2))
                net.weight.add_(torch.randn(5, 9))
            averager.average_parameters(net.parameters())

    go(0, 5)
    saved = copy.deepcopy([net.state_dict(), averager.state_dict()])
    go(5, 12)
    expected = net.weight.detach().clone()
    net.load_state_dict(saved[0])
    averager.load_state_dict(saved[1])
    go(5, 12)
    return torch.equal(net.weight, expected)


def test_state_can_be_loaded_in_the_middle(pool: RankPool) -> None:
    """Training goes on from there as it did before."""
    assert pool.run(4, roll_back) == [True] * 4


def refuse() -> str:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with attach(net, optimizer, strategy(Int8(), RanksOfHost.EQUAL)):
        if dist.get_rank() == 2:
            net.bias.data = torch.zeros(1).expand(4)
        try:
            for _ in range(3):
                optimizer.step()
        except (ValueError, RankMismatch) as error:
            return f"{type(error).__name__} {error}"
    return "nobody noticed"


def test_a_rank_that_cannot_average_tells_the_others(pool: RankPool) -> None:
    """Everybody raises at once, not after a time-out."""
    heard = pool.run(4, refuse, timeout=30.0)
    assert all("'bias' was expanded" in text for text in heard), heard
