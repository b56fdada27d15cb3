"""Process groups of our own, under names of our own.

``dist.new_group(..., use_local_synchronization=True)`` is made for this and does not hold: it
derives the name from how many groups this process has at the moment. Ranks that have different
numbers (uneven hosts) then wait under different names, and a group that is made again after it
was freed finds the old one's addresses in the store. So the name here counts how often these very
ranks have made a group together, which all of them know.
"""

from __future__ import annotations

import weakref
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def require_process_group() -> None:
    """Raise unless ``torch.distributed`` has been initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there is no default process group; call torch.distributed.init_process_group(...) "
            "first (one worker is fine: rank=0, world_size=1)"
        )


def world_group() -> dist.ProcessGroup:
    """Return the default process group."""
    require_process_group()
    group = dist.group.WORLD
    assert group is not None
    return group


def own_group(ranks: tuple[int, ...], timeout: float | None = None) -> dist.ProcessGroup:
    """Make a process group that nobody else uses; its members call this, and only they.

    ``get_pg_count()`` and the names of groups made later stay as they are.
    """
    world = world_group()
    made = _made.setdefault(world, Counter())
    made[ranks] += 1
    name = f"loosestep-{'-'.join(map(str, ranks))}-{made[ranks]}"
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d._world.pg_map[world][0],
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=group_timeout(world) if timeout is None else timedelta(seconds=timeout),
        group_desc="loosestep",
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    assert isinstance(group, dist.ProcessGroup)
    return group


def private_twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a process group with the same ranks that nobody else uses; one for each group."""
    if dist.get_world_size(group) == 1:
        return group
    if group not in _twins:
        _twins[group] = own_group(tuple(dist.get_process_group_ranks(group)))
    return _twins[group]


def free_group(group: dist.ProcessGroup) -> None:
    """Close the group's connections, unless everything has been closed already."""
    if dist.is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long the group's operations may take."""
    timeout: timedelta = group._get_backend(group._device_types[-1]).options._timeout
    return timeout
