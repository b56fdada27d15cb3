"""Who is named when the store is lost with the rank that hosts it, or when a rank comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from loosestep import PeerLost, attach, average_, ddp
from loosestep.comm.group import Group, world_group
from loosestep.testing import RankPool
from tests.support.faults import kill, pause, settle, stop, use

TIMEOUT = 1.5  # seconds for every wait on a rank that hangs
PATIENCE = 20.0  # for one that is killed: what is found out much earlier was not a time-out
LATE = 1.5  # seconds after which all others have given up
SLACK = 2.5  # for asking the other survivors, and for few cores


class Seen(NamedTuple):
    """What a rank was told."""

    ranks: tuple[int, ...]
    text: str
    seconds: float


def attempt(step: Callable[[], object]) -> Seen:
    began = time.monotonic()
    try:
        step()
    except PeerLost as error:
        return Seen(error.ranks, str(error), time.monotonic() - began)
    return Seen((), "nobody was missed", time.monotonic() - began)


def host_on_rank_0() -> None:
    """Leave the pool's process group, whose store is the pool's, for one as under ``env://``."""
    rank, world, timeout = dist.get_rank(), dist.get_world_size(), timedelta(seconds=30)
    store = serve(0, True) if rank == 0 else None
    port = torch.tensor(0 if store is None else store.port)
    dist.broadcast(port, 0)
    dist.barrier()  # a group that ends while another rank still joins it is an error there
    dist.destroy_process_group()
    store = store or serve(int(port), False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def serve(port: int, hosts: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, None, hosts, wait_for_workers=False
    )


def by_average(timeout: float) -> Callable[[], object]:
    values = torch.zeros(1 << 16)
    return lambda: average_([values], timeout=timeout)


def by_gradients(timeout: float) -> Callable[[], object]:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters())
    attach(net, optimizer, ddp(), timeout=timeout)
    return lambda: net(torch.ones(2, 4)).sum().backward()


WAYS = {"average": by_average, "gradients": by_gradients}


def train(way: str, timeout: float, transport: str) -> Callable[[], object]:
    """Return a step that has been taken once."""
    use(transport)
    settle()
    step = WAYS[way](timeout)
    step()
    return step


# Rank 0 hosts the store.


def lose_host(way: str, late: int | None) -> Seen:
    """Kill rank 0; a rank that is late comes when all others have given up and closed."""
    host_on_rank_0()
    step = train(way, PATIENCE, "network")
    if dist.get_rank() == 0:
        kill()
    if dist.get_rank() == late:
        time.sleep(LATE)
    return attempt(step)


def check_host_lost(pool: RankPool, way: str, world: int, late: int | None) -> None:
    for seen in pool.run(world, lose_host, way, late, allow_dead=[0])[1:]:
        assert seen.ranks == (0,), seen
        assert "lost rank 0 while" in seen.text
        assert seen.seconds < SLACK + TIMEOUT, seen


@pytest.mark.parametrize(
    ("way", "world", "late"),
    [("average", 4, None), ("average", 3, 1), ("average", 4, 2), ("gradients", 3, 2)],
)
def test_the_host_of_the_store_is_named(
    pool: RankPool, way: str, world: int, late: int | None
) -> None:
    """All survivors name rank 0, which took the store with it, and so does one that comes late."""
    check_host_lost(pool, way, world, late)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "world", "late"),
    [("average", 3, None), ("average", 4, 1), ("gradients", 4, None), ("gradients", 3, 1)],
)
def test_the_host_of_the_store_is_named_every_time(
    pool: RankPool, way: str, world: int, late: int | None
) -> None:
    """It is no matter of luck."""
    for _ in range(10):
        check_host_lost(pool, way, world, late)


def outlive_host(way: str) -> Seen:
    """Kill rank 1; rank 0 gives up and ends, with the store, before rank 2 finds out."""
    host_on_rank_0()
    step = train(way, PATIENCE, "network")
    if dist.get_rank() == 1:
        kill()
    if dist.get_rank() == 2:
        time.sleep(2 * LATE)
    seen = attempt(step)
    if dist.get_rank() == 0:
        kill()
    return seen


@pytest.mark.parametrize("way", list(WAYS))
def test_a_host_that_gave_up_is_not_named(pool: RankPool, way: str) -> None:
    """A store is also gone when its host has ended because of another rank: that one is named."""
    seen = pool.run(3, outlive_host, way, allow_dead=[0, 1])[2]
    assert seen.ranks == (1,), seen


def lose_stuck_host(way: str) -> Seen:
    host_on_rank_0()
    step = train(way, TIMEOUT, "network")
    if dist.get_rank() == 0:
        stop()
    return attempt(step)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_stuck_host_of_the_store_is_named(pool: RankPool, way: str) -> None:
    """A store that takes a question and does not answer tells that its host hangs."""
    for seen in pool.run(3, lose_stuck_host, way, allow_dead=[0])[1:]:
        assert seen.ranks == (0,), seen
        assert seen.seconds < TIMEOUT + SLACK, seen


def told_hosts(hosted: bool) -> list[int | None]:
    if hosted:
        host_on_rank_0()
    store = Group.of(world_group()).store
    assert store is not None
    before = store.host
    average_([torch.zeros(1)])
    return [before, store.host]


def test_who_hosts_the_store_is_known(pool: RankPool) -> None:
    """Once a group was made, all know which rank hosts the store; of the pool's it is none."""
    assert pool.run(3, told_hosts, True) == [[None, 0]] * 3
    assert pool.run(3, told_hosts, False) == [[None, None]] * 3


# A rank is stopped, and goes on when the others have given it up.


def come_back(way: str, transport: str, victim: int, hosted: bool) -> Seen:
    if hosted:
        host_on_rank_0()
    step = train(way, TIMEOUT, transport)
    if dist.get_rank() == victim:
        pause(TIMEOUT + LATE)
    return attempt(step)


@pytest.mark.parametrize(
    ("way", "world", "victim", "transport", "hosted"),
    [
        ("average", 3, 2, "network", True),
        ("average", 3, 0, "network", True),
        ("average", 3, 0, "memory", False),
        ("average", 2, 1, "network", False),
        ("gradients", 3, 1, "network", False),
        ("gradients", 4, 0, "network", True),
    ],
)
def test_a_rank_that_comes_back_names_itself(
    pool: RankPool, way: str, world: int, victim: int, transport: str, hosted: bool
) -> None:
    """It finds that the others have given it up, and blames none of them."""
    for rank, seen in enumerate(pool.run(world, come_back, way, transport, victim, hosted)):
        assert seen.ranks == (victim,), seen
        own = f"rank {rank}: the others gave this rank up while "
        assert seen.text.startswith(own) == (rank == victim), seen.text
        if rank == victim:
            assert "it did not answer them for more than 1.5 s" in seen.text
            assert "it was stopped, swapped out or too slow" in seen.text
