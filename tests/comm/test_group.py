"""A group of ranks: found again, made from a store alone, closed with all that belongs to it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from loosestep import PeerLost
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.reducers import Mean, TwoLevel
from loosestep.sync.averager import Averager
from loosestep.testing import RankPool


def found_again() -> list[bool]:
    """Compare what is found for one c10d group at several times."""
    world = Group.of(world_group())
    own = Group.make(world.ranks)
    passed = dist.new_group(list(world.ranks))
    borrowed = Group.of(passed)
    twins = world.twin(), world.twin(), world.twin(20.0)
    return [
        Group.of(world_group()) is world,
        Group.of(own.process_group) is own,
        Group.of(passed) is borrowed,
        twins[0] is twins[1],
        twins[0] is not twins[2],
        peers_of(passed).group is borrowed,
        peers_of(passed).shared_memory is borrowed.shared_memory,
    ]


def test_a_group_is_found_again(pool: RankPool) -> None:
    """Whoever asks about one c10d group gets one Group, and one for each time-out beside it."""
    for same in pool.run(2, found_again):
        assert all(same), same


def not_kept() -> list[bool]:
    """Destroy a group that was handed to us; say whether it, and what belonged to it, is gone."""
    passed = dist.new_group([0, 1])
    group = Group.of(passed)
    assert not peers_of(group).shared_memory.unfinished
    child = group.subgroup((0, 1), 20.0)
    watched = [weakref.ref(passed), weakref.ref(group), weakref.ref(group.shared_memory)]
    child.close()
    dist.destroy_process_group(passed)
    del passed, group, child
    gc.collect()
    return [reference() is None for reference in watched]


def test_somebody_elses_group_is_not_kept_alive(pool: RankPool) -> None:
    """Its owner may destroy it any time, and its connections close then."""
    for gone in pool.run(2, not_kept):
        assert all(gone), gone


def handed_over() -> list[bool]:
    """Hand a group over and let go of it; say what is left, before and after it is destroyed."""
    group = Group.make((0, 1))
    passed, watched = group.hand_over(), weakref.ref(group)
    del group
    gc.collect()
    kept = Group.of(passed) is watched()
    dist.destroy_process_group(passed)
    del passed
    gc.collect()
    return [kept, watched() is None]


def test_a_group_that_a_user_was_given_is_kept_until_they_destroy_it(pool: RankPool) -> None:
    """What its members have found out together is not lost, and nothing of it outlives it."""
    for found in pool.run(2, handed_over):
        assert all(found), found


def closed() -> list[bool]:
    """Close a group with children; say what is left."""
    group = Group.make((0, 1))
    child = group.subgroup((0, 1), 20.0)
    assert not peers_of(group).shared_memory.unfinished
    handed_on = child.process_group
    group.close()
    group.close()
    return [group.shared_memory is None, handed_on not in dist.distributed_c10d._world.pg_map]


def test_closing_a_group_closes_its_children(pool: RankPool) -> None:
    """Memory is let go and connections are closed, once; a second call does nothing."""
    for done in pool.run(2, closed):
        assert all(done), done


def average_without_a_world(path: str, members: tuple[int, ...]) -> list[list[float]] | None:
    """Leave the default group, meet by a file, and average by several reducers."""
    rank = dist.get_rank()
    dist.barrier()  # who leaves while others still connect would hang up on them
    dist.destroy_process_group()
    if rank not in members:
        return None
    store = FileStore(path, len(members))
    group = Group.meet(store, rank, members, timeout=20.0)
    found = []
    for reducer in (Mean(), TwoLevel(ranks_per_host=1), TwoLevel()):
        tensor = torch.arange(3.0) + rank
        Averager(peers_of(group, level="met"), reducer=reducer).average([("w", tensor)])
        found.append(tensor.tolist())
    pair = group.subgroup(members[:2], 20.0) if rank in members[:2] else None
    tensor = torch.full((2,), float(rank))
    if pair is not None:
        Averager(peers_of(pair)).average([("w", tensor)])
    found.append(tensor.tolist())
    assert not dist.is_initialized()
    group.close()
    return found


@pytest.mark.parametrize("members", [(0, 1, 2), (1, 3)], ids=str)
def test_a_group_needs_no_default_process_group(
    pool: RankPool, tmp_path: Path, members: tuple[int, ...]
) -> None:
    """From a store, a rank and its members: exact means, two levels and children of its own."""
    world = max(members) + 1
    middle = sum(members) / len(members)
    mean = [middle, middle + 1.0, middle + 2.0]
    pair = sum(members[:2]) / 2
    results = pool.run(world, average_without_a_world, str(tmp_path / "store"), members)
    for rank, found in enumerate(results):
        if rank not in members:
            assert found is None
            continue
        assert found is not None
        assert found[:3] == [mean] * 3
        assert found[3] == [pair if rank in members[:2] else float(rank)] * 2


def meet_in_vain(path: str) -> tuple[tuple[int, ...], str] | None:
    """Meet where rank 1 never comes."""
    rank = dist.get_rank()
    if rank == 1:
        return None
    try:
        Group.meet(FileStore(path, 3), rank, (0, 1, 2), timeout=2.0)
    except PeerLost as error:
        return error.ranks, str(error)
    return None


def test_who_does_not_come_is_named(pool: RankPool, tmp_path: Path) -> None:
    """Those who wait hear whom they wait for, within the time-out."""
    for rank, found in enumerate(pool.run(3, meet_in_vain, str(tmp_path / "store"))):
        if rank != 1:
            assert found is not None
            assert found[0] == (1,), found
