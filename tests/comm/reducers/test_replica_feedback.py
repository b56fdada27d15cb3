"""What could not be sent stays in the replica: what that keeps, what it refuses, how it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import (
    PeriodicModelAverager,
    RankMismatch,
    Strategy,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    average_,
    gradient_hook,
    post_local_sgd,
    zero,
)
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.comm.reducers import NOTHING
from loosestep.comm.reducers.replica_feedback import OfMeans
from loosestep.reducers import ErrorFeedback, Int2, Int4, Mean, Reducer, ReplicaFeedback, TwoLevel
from loosestep.schedules import after, always, every
from loosestep.sync.averager import Averager
from loosestep.sync.kept import Kept
from loosestep.testing import RankPool
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot
from tests.support.reducing import reduce_

HOSTS = {"host": 2, "world": 4}


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.zero_grad()
    loss_of(net, dist.get_rank(), at).backward()
    optimizer.step()


def replicas(net: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    return gathered({name: p.detach().clone() for name, p in net.named_parameters()})


def moved_mean(reducer: Reducer, syncs: int) -> tuple[list[float], float]:
    """Return how far syncs moved the mean of all replicas, and how far those end apart."""
    peers = peers_of(Group.of(world_group()).twin())
    averager = Averager(peers, reducer=reducer, kept=Kept())
    generator = torch.Generator().manual_seed(dist.get_rank())
    values, moved = torch.zeros(1000), []
    averager.average([("values", values)])
    for _ in range(syncs):
        values += torch.randn(1000, generator=generator)
        before = torch.stack(gathered(values)).double().mean(0)
        averager.average([("values", values)])
        after = torch.stack(gathered(values)).double().mean(0)
        moved.append(float((after - before).norm() / before.norm()))
    one, other, *_ = gathered(values)
    return moved, float((one - other).norm() / one.norm())


def test_a_sync_leaves_the_mean_of_two_replicas_where_it_is(pool: RankPool) -> None:
    """Nothing is lost or put aside, however few the bits; error feedback puts a third aside."""
    (moved, apart), _ = pool.run(2, moved_mean, ReplicaFeedback(Int2()), 5)
    assert max(moved) < 1e-6
    assert 0.05 < apart < 0.6
    (moved, apart), _ = pool.run(2, moved_mean, ErrorFeedback(Int2()), 5)
    assert moved[0] > 0.2
    assert apart == 0.0


def hosts_of(reducer: Reducer, **options: Any) -> Strategy:
    topology = Topology.from_sizes(HOSTS, timeout=60.0)
    return post_local_sgd(
        2, warmup_steps=0, topology=topology, reducer=reducer, gradient_reducer=Mean(), **options
    )


def on_hosts(overlap_steps: int) -> list[list[bool]]:
    """Return which ranks equal rank 0 after a sync, inside ``averaged`` and at the end."""
    reducer = TwoLevel(ReplicaFeedback(Int2()), ranks_of_host="equal", ranks_per_host=2)
    net = make_net()
    optimizer, seen = sgd(net), []

    def look() -> None:
        first, *others = replicas(net)
        seen.append([equal(first, other) for other in others])

    with attach(net, optimizer, hosts_of(reducer, overlap_steps=overlap_steps)) as run:
        for at in range(6):
            step(net, optimizer, at)
        look()
        kept = snapshot(net)
        with run.averaged():
            look()
            mean = snapshot(net)
        assert equal(kept, snapshot(net))
        run.finalize()
        look()
        assert overlap_steps or all(torch.allclose(mean[n], v) for n, v in snapshot(net).items())
        run.finalize()  # nothing was trained since
        step(net, optimizer, 6)
        run.finalize()
        look()
    return seen


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_a_host_is_one_replica_and_the_end_is_exact(pool: RankPool, overlap_steps: int) -> None:
    """After a sync ranks of a host are equal and hosts are not; after ``finalize`` all are."""
    for apart, averaged, end, again in pool.run(4, on_hosts, overlap_steps):
        assert apart == [True, False, False]
        assert averaged == end == again == [True] * 3


def by_averager() -> tuple[list[bool], list[bool]]:
    net = make_net()
    optimizer, seen = sgd(net), []
    averager = PeriodicModelAverager(2, module=net, reducer=ReplicaFeedback(Int4()))
    for at in range(5):  # the last of which averages
        step(net, optimizer, at)
        averager.average_parameters(net.parameters())
    for _ in range(2):
        first, *others = replicas(net)
        seen.append([equal(first, other) for other in others])
        averager.finalize(net.parameters())
    first, *others = replicas(net)
    return seen[0], [equal(first, other) for other in others]


def test_averagers_end_exactly_too(pool: RankPool) -> None:
    """``finalize`` makes replicas equal, also right after a sync."""
    for after_sync, end in pool.run(3, by_averager):
        assert after_sync == [False, False]
        assert end == [True, True]


def by_shards(reducer: Reducer, size: int) -> list[list[bool]]:
    """Train on hosts with a sharded optimizer each; say who equals rank 0 in between and after."""
    topology = Topology.from_sizes({"host": size, "world": 4}, timeout=60.0)
    net = make_net()
    group = topology.process_group("host")
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, group, lr=0.01)
    seen = []
    with attach(net, optimizer, zero(2, topology=topology, reducer=reducer)) as run:
        for at in range(6):
            step(net, optimizer, at)
        for _ in range(2):
            first, *others = replicas(net)
            seen.append([equal(first, other) for other in others])
            run.finalize()
    return seen


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("kind", [ReplicaFeedback, ErrorFeedback])
def test_shards_keep_what_their_owner_could_not_send(
    pool: RankPool, kind: type[ErrorFeedback], levels: int
) -> None:
    """A sharded optimizer's ranks average their shards so, and end with one model."""
    reducer: Reducer = kind(Int2())
    if levels == 2:
        reducer = TwoLevel(reducer, ranks_of_host="equal", ranks_per_host=2)
    for between, end in pool.run(4, by_shards, reducer, 2):
        assert between == [True, *[kind is ErrorFeedback] * 2]
        assert end == [True] * 3


def test_four_hosts_with_a_rank_each(pool: RankPool) -> None:
    """What ``ranks_per_host`` counts are a level's ranks, not those at one place of its groups."""
    reducer = TwoLevel(ErrorFeedback(Int2()), ranks_per_host=1)
    assert pool.run(4, by_shards, reducer, 1) == [[[True] * 3] * 2] * 4


def at_different_steps() -> tuple[list[bool], bool]:
    """Average at step 4 only, train on for different numbers of steps, and end."""
    net = make_net()
    optimizer = sgd(net)
    strategy = Strategy(
        schedule=after(5, always(), every(4)),
        topology=Topology({"world": [[0, 1, 2]]}, timeout=20),
        reducer=ReplicaFeedback(Int2()),
    )
    with attach(net, optimizer, strategy) as run:
        for at in range(6 + dist.get_rank()):
            step(net, optimizer, at)
        mine = [p.detach().clone() for p in net.parameters()]
        run.finalize()
    everyone = gathered(mine)
    exact = [torch.stack(same).double().mean(0).float() for same in zip(*everyone, strict=True)]
    first, *others = replicas(net)
    ends = zip(exact, net.parameters(), strict=True)
    return [equal(first, other) for other in others], all(torch.allclose(a, b) for a, b in ends)


def test_the_end_is_the_mean_of_all_replicas(pool: RankPool) -> None:
    """Wherever they are by then, and whatever owners remember of earlier means."""
    assert pool.run(3, at_different_steps) == [([True, True], True)] * 3


def nobody_counts() -> float:
    """Take a mean of ranks that all have weight 0, in memory that has seen other things."""
    peers = replace(peers_of(Group.of(world_group()).twin()), weights=(0.0,) * 3)
    STAGING.give(STAGING.take(300, torch.float32, torch.device("cpu")).fill_(7.0))
    buffer = torch.ones(900)
    reduce_(Int4(), buffer, peers)
    return float(buffer.abs().max())


def test_the_mean_of_nobody_is_zero(pool: RankPool) -> None:
    """And not what happens to lie there."""
    assert pool.run(3, nobody_counts) == [0.0] * 3


def hosts_that_differ() -> str:
    net = make_net()
    optimizer = sgd(net)
    reducer = TwoLevel(ReplicaFeedback(Int2()), ranks_of_host="equal", ranks_per_host=2)
    strategy = Strategy(
        schedule=every(1), topology=Topology.from_sizes(HOSTS, timeout=20.0), reducer=reducer
    )
    with attach(net, optimizer, strategy):
        try:
            step(net, optimizer, 0)
        except RankMismatch as error:
            return str(error)
    return ""


def test_a_host_with_several_replicas_is_refused(pool: RankPool) -> None:
    """By name where it is known, and at the first sync where it is not."""
    with pytest.raises(ValueError, match="ranks_of_host='equal'"):
        TwoLevel(ReplicaFeedback(Int2()))
    assert all("share gradients inside hosts" in text for text in pool.run(4, hosts_that_differ))


def undivided_on_a_host() -> list[str]:
    """Ask for averages of what the ranks of a host do not divide, as shards are."""
    peers, said = peers_of(Group.of(world_group()).twin()), []
    for size in (2, 1, 4):
        wire = TwoLevel(ReplicaFeedback(Int2()), ranks_of_host="equal", ranks_per_host=size)
        try:
            wire.check_replicas(peers)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_several_holders_of_a_shard_on_a_host_are_refused(pool: RankPool) -> None:
    """Before anything is sent; one a host is fine, and so is one host, which needs no bits."""
    for several, one_each, one_host in pool.run(4, undivided_on_a_host):
        assert "has several" in several
        assert one_each == one_host == ""


def one_shot() -> str:
    try:
        average_([torch.zeros(3)], reducer=ReplicaFeedback(Int4()))
    except ValueError as error:
        return str(error)
    return ""


def test_what_has_no_replica_is_refused(pool: RankPool) -> None:
    """Gradients are gone after a step, and a single call remembers nothing."""
    for refused in (
        ReplicaFeedback(Int2()),
        TwoLevel(ReplicaFeedback(Int2()), ranks_of_host="equal"),
    ):
        with pytest.raises(ValueError, match=r"share gradients by ErrorFeedback"):
            Strategy(schedule=every(2), gradient_reducer=refused)
        with pytest.raises(ValueError, match=r"share gradients by ErrorFeedback"):
            gradient_hook(refused)
    with pytest.raises(ValueError, match="ReplicaFeedback sends later"):
        ReplicaFeedback(Mean())
    with pytest.raises(ValueError, match="rounding='nearest'"):
        ReplicaFeedback(Int2(rounding="stochastic"))
    with pytest.raises(ValueError, match="written with ErrorFeedback"):
        OfMeans(NOTHING).load_state_dict({"sent": {"0": torch.zeros(1)}})
    assert all("nobody who remembers" in text for text in pool.run(2, one_shot))
