"""One copy a host: the mean in two levels, what it equals and what leaves a host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import NotFinite, PeerLost, Strategy, attach
from loosestep.comm.group import Group, peers_of
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import NOTHING, Place, mean_into
from loosestep.reducers import (
    Cast,
    ErrorFeedback,
    Int4,
    Int8,
    Mean,
    RanksOfHost,
    Reducer,
    SharedMemoryMean,
    TwoLevel,
)
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.netns import TwoHosts, missing, sent
from tests.support.reducing import reduce_
from tests.support.values import values

NUMEL = 700_003  # more than a window, and no multiple of anything


def group_of(ranks: list[int], weights: tuple[float, ...] | None = None) -> Peers:
    return peers_of(Group.make(tuple(ranks), 20), weights=weights, timeout=20)


def reduce_with(
    reducer: Reducer, ranks: list[int], weights: tuple[float, ...] | None = None
) -> tuple[torch.Tensor, int, int]:
    """Reduce a buffer of several windows twice; return the second result, bytes sent and said."""
    if dist.get_rank() not in ranks:
        return torch.empty(0), 0, 0
    peers = group_of(ranks, weights)
    state = reducer.init([], peers)
    for _ in range(2):
        buffer = values(dist.get_rank(), NUMEL, torch.float32)
        handle = reduce_(reducer, buffer, peers, state=state)
    if not isinstance(reducer, TwoLevel) or reducer.ranks_per_host is None:
        return buffer, handle.traffic.bytes_sent, 0
    told = reducer.bytes_on_wire(NUMEL, torch.float32, len(ranks), ranks.index(dist.get_rank()))
    return buffer, handle.traffic.bytes_sent, told


def in_two_levels(
    ranks: list[int], per_host: int, weights: tuple[float, ...] | None = None
) -> torch.Tensor:
    """Return the written definition: the mean over hosts of their ranks' mean."""
    counts = [1.0] * len(ranks) if weights is None else list(weights)
    means, totals = [], []
    for first in range(0, len(ranks), per_host):
        host = range(first, first + per_host)
        mean = torch.empty(NUMEL)
        mean_into(
            mean,
            [values(ranks[i], NUMEL, torch.float32) for i in host],
            None if weights is None else [counts[i] for i in host],
        )
        means.append(mean)
        totals.append(sum(counts[i] for i in host))
    result = torch.empty(NUMEL)
    mean_into(result, means, None if weights is None else totals)
    return result


@pytest.mark.parametrize("weights", [None, (1.0, 2.5, 3.0, 0.5)], ids=["even", "weighted"])
def test_two_levels_equal_their_definition(
    pool: RankPool, weights: tuple[float, ...] | None
) -> None:
    """Two hosts of two ranks: to the bit what is written down."""
    results = pool.run(4, reduce_with, TwoLevel(ranks_per_host=2), [0, 1, 2, 3], weights)
    expected = in_two_levels([0, 1, 2, 3], 2, weights)
    assert all(torch.equal(result, expected) for result, *_ in results)


@pytest.mark.parametrize(
    ("ranks", "per_host"), [([0], 1), ([2, 3], 1), ([2, 3], 2), ([1, 2, 3], 1), ([1, 2, 3], 3)]
)
def test_any_group_works_like_the_world(pool: RankPool, ranks: list[int], per_host: int) -> None:
    """One rank a host, one host only, a group that does not start at 0."""
    results = pool.run(4, reduce_with, TwoLevel(ranks_per_host=per_host), ranks)
    expected = in_two_levels(ranks, per_host)
    assert all(torch.equal(results[rank][0], expected) for rank in ranks)


def test_on_one_host_it_is_the_exact_mean(pool: RankPool) -> None:
    """Hosts that are told apart by name: here there is one, and nothing is compressed."""
    plain = pool.run(3, reduce_with, Mean(), [0, 1, 2])
    two = pool.run(3, reduce_with, TwoLevel(Int4()), [0, 1, 2])
    assert all(torch.equal(one[0], other[0]) for one, other in zip(plain, two, strict=True))


def agreeing_hosts() -> bool:
    rank = dist.get_rank()
    peers = group_of([0, 1, 2, 3])
    results = []
    for hosts in (RanksOfHost.DIFFER, RanksOfHost.EQUAL):
        buffer = values(rank // 2, NUMEL, torch.float32)
        reduce_(TwoLevel(ranks_per_host=2, ranks_of_host=hosts), buffer, peers)
        results.append(buffer)
    expected = torch.empty(NUMEL)
    mean_into(expected, [values(host, NUMEL, torch.float32) for host in (0, 1)])
    return all(torch.equal(result, expected) for result in results)


def test_hosts_that_agree_need_no_mean_of_their_own(pool: RankPool) -> None:
    """Where the ranks of a host hold the same values, averaging them first changes nothing."""
    assert pool.run(4, agreeing_hosts) == [True] * 4


@pytest.mark.parametrize(
    "inner", [Cast(torch.bfloat16), Int4(), ErrorFeedback(Int4())], ids=lambda r: repr(r)[:20]
)
def test_compression_works_between_hosts_only(pool: RankPool, inner: Reducer) -> None:
    """All ranks end bit-equal, near the mean, and send what they said they would."""
    reducer = TwoLevel(inner, ranks_per_host=2)
    results = pool.run(4, reduce_with, reducer, [0, 1, 2, 3])
    expected = in_two_levels([0, 1, 2, 3], 2)
    for rank, (result, sent_bytes, _) in enumerate(results):
        assert torch.equal(result, results[0][0])
        assert (result - expected).norm() < 0.35 * expected.norm()  # what was held back comes later
        if not isinstance(inner, Cast):  # whose mean goes through memory here
            assert sent_bytes == results[rank][2]


def test_bytes_are_said_before_a_group_is_met() -> None:
    """One copy a host each way: with two ranks a host every rank sends half a buffer."""
    reducer = TwoLevel(ranks_per_host=2)
    assert reducer.bytes_on_wire(1000, torch.float32, 4, 3) == 2000
    assert reducer.bytes_on_wire(1000, torch.float32, 2, 0) == Mean().bytes_on_wire(
        1000, torch.float32, 2, 0
    )
    with pytest.raises(ValueError, match="ranks_per_host"):
        TwoLevel().bytes_on_wire(1000, torch.float32, 4)
    with pytest.raises(ValueError, match="3 ranks are no multiple of 2"):
        reducer.bytes_on_wire(1000, torch.float32, 3)


# Between emulated hosts, by the kernel's counters.


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts and a cable between them, for one test."""
    with TwoHosts() as pair:
        yield pair


REDUCERS: dict[str, Reducer] = {
    "Mean": Mean(),
    "TwoLevel": TwoLevel(),
    "TwoLevel bf16": TwoLevel(Cast(torch.bfloat16)),
    "TwoLevel int4": TwoLevel(ErrorFeedback(Int4())),
}
ELEMENTS = 2_000_000


def bytes_that_leave() -> dict[str, dict[str, Any]]:
    """Average with every reducer and count what this host sends in one sync."""
    found = {}
    for name, reducer in REDUCERS.items():
        torch.manual_seed(dist.get_rank())
        net = torch.nn.ParameterList([torch.randn(ELEMENTS), torch.randn(1000)])
        optimizer = torch.optim.SGD(net.parameters())
        with attach(net, optimizer, Strategy(schedule=every(1), reducer=reducer)) as run:
            optimizer.step()
            with torch.no_grad():
                net[0].add_(torch.randn(ELEMENTS))
            dist.barrier()
            before, total = sent(), run.metrics()["parameters/world"]["bytes_sent"]
            optimizer.step()
            dist.barrier()
            after = sent()
            total = run.metrics()["parameters/world"]["bytes_sent"] - total
        kernel = after.in_all - before.in_all - (after.again - before.again)
        found[name] = {"kernel": kernel, "telemetry": total, "sum": float(net[0].detach().sum())}
    return found


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_one_copy_leaves_a_host(hosts: TwoHosts) -> None:
    """Two hosts, two ranks each: two copies by Mean, one in two levels, half, an eighth."""
    started = [
        hosts.start(bytes_that_leave, rank=rank, host=rank // 2, size=4) for rank in range(4)
    ]
    results = [rank.result(timeout=100) for rank in started]
    model = 4 * (ELEMENTS + 1000)
    expected = {"Mean": 2.0, "TwoLevel": 1.0, "TwoLevel bf16": 0.5, "TwoLevel int4": 0.129}
    for name, copies in expected.items():
        one_host = sum(results[rank][name]["telemetry"] for rank in (0, 1))
        assert one_host == pytest.approx(copies * model, rel=0.01), name
        kernel = results[0][name]["kernel"]
        assert kernel == pytest.approx(one_host, rel=0.04, abs=40_000), name
        assert len({result[name]["sum"] for result in results}) == 1


def train_with_a_mask() -> bool:
    """Average a model whose buffers hold infinities and statistics, by two bits."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    net.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mask = net.get_buffer("mask").clone()
    with attach(net, optimizer, Strategy(schedule=every(1), reducer=ErrorFeedback(Int4()))):
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + dist.get_rank())
            net(torch.randn(5, 4)).square().sum().backward()
            net.get_buffer("1.running_mean").fill_(float(dist.get_rank()) / 3)
            optimizer.step()
    exact = torch.equal(net.get_buffer("mask"), mask)
    return exact and bool((net.get_buffer("1.running_mean") == torch.tensor(1 / 6)).all())


def test_buffers_are_never_compressed(pool: RankPool) -> None:
    """An attention mask of infinities is no error, and statistics are averaged exactly."""
    assert pool.run(2, train_with_a_mask) == [True, True]


def weigh_anew() -> list[float]:
    """Average twice on one group, with other weights each time."""
    rank, peers = dist.get_rank(), group_of([0, 1, 2, 3])
    found = []
    for weights in (None, (3.0, 1.0, 1.0, 1.0), None):
        buffer = torch.full((5,), float(rank))
        weighed = replace(peers, weights=weights)
        reduce_(TwoLevel(ranks_per_host=2), buffer, weighed)
        found.append(float(buffer[0]))
    return found


def test_weights_are_those_of_the_call(pool: RankPool) -> None:
    """(0 + 1 + 2 + 3) / 4 = 1.5; (3 * 0 + 1 + 2 + 3) / 6 = 1; and 1.5 again."""
    assert pool.run(4, weigh_anew) == [[1.5, 1.0, 1.5]] * 4


def spread_nan(policy: str) -> tuple[str, float]:
    """Reduce where one element of one rank is NaN; return who was named, or the mean."""
    rank, peers = dist.get_rank(), group_of([0, 1, 2, 3])
    buffer = torch.full((1000,), float(rank))
    if rank == 1:
        buffer[3] = float("nan")
    reducer = TwoLevel(Int8(on_nonfinite=policy), ranks_per_host=2)
    try:
        reduce_(reducer, buffer, peers)
    except NotFinite as error:
        named, kept = str(error.ranks), buffer.nan_to_num(0.0)[0].item() == rank
        buffer = torch.full((1000,), float(rank))
        reduce_(reducer, buffer, peers)  # the group can go on
        return named if kept else "changed", float(buffer[0])
    return "", float(buffer[0])


def test_nan_on_one_rank_is_told_to_all_before_hosts_average(pool: RankPool) -> None:
    """All ranks raise with the rank that has it, or all leave it out: (0 + 2 + 3) / 3."""
    for named, mean in pool.run(4, spread_nan, "raise"):
        assert named == "(1,)"
        assert mean == pytest.approx(1.5, rel=0.01)
    for named, mean in pool.run(4, spread_nan, "skip"):
        assert named == ""
        assert mean == pytest.approx(5 / 3, rel=0.01)


def test_what_cannot_work_is_refused_at_once() -> None:
    """With the value and the way out."""
    with pytest.raises(TypeError, match="such as Int4"):
        TwoLevel(Int8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SharedMemoryMean"):
        TwoLevel(SharedMemoryMean())
    with pytest.raises(ValueError, match="whole number"):
        TwoLevel(ranks_per_host=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole number"):
        Int8(block=2.5)  # type: ignore[arg-type]


def wait_twice(reducer: Reducer) -> bool:
    peers = group_of([0, 1])
    first = torch.full((100,), float(dist.get_rank()))
    handle = reducer.start(first, peers, NOTHING, Place("first"))
    handle.wait()
    for step in range(8):  # other buffers use the same windows
        other = torch.full((100,), 100.0 + step)
        reduce_(reducer, other, peers, "other")
    handle.wait()
    return bool((first == 0.5).all())


@pytest.mark.parametrize("reducer", [Mean(), TwoLevel(ranks_per_host=1)], ids=repr)
def test_waiting_twice_changes_nothing(pool: RankPool, reducer: Reducer) -> None:
    """Also when the windows have been used by others since."""
    assert pool.run(2, wait_twice, reducer) == [True, True]


def after_a_loss() -> list[float]:
    """Queue buffers on a group where a neighbour never comes; return how long each one took."""
    peers = replace(group_of([0, 1]), timeout=1.0)
    reduce_(Mean(), torch.ones(10), peers)
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        if dist.get_rank() == 0:
            with contextlib.suppress(PeerLost):
                reduce_(Mean(), torch.ones(10), peers)
        seconds.append(time.monotonic() - began)
    time.sleep(0.0 if dist.get_rank() == 0 else 2.0)
    return seconds


def test_a_lost_group_is_not_waited_for_again(pool: RankPool) -> None:
    """The first wait takes the time-out, the others nothing."""
    first, *others = pool.run(2, after_a_loss)[0]
    assert 0.9 < first < 2.5
    assert max(others) < 0.3
