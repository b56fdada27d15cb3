"""Process groups of our own, under names of our own.

``dist.new_group(..., use_local_synchronization=True)`` is made for this and does not hold: it
derives the name from how many groups this process has at the moment. Ranks that have different
numbers (uneven hosts) then wait under different names, and a group that is made again after it
was freed finds the old one's addresses in the store. So the name here counts how often these very
ranks have made a group together, which all of them know.
"""

from __future__ import annotations

import atexit
import gc
import time
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from loosestep.deadline import ask_store, within
from loosestep.errors import PeerLost
from loosestep.torch_versions import group_name, warn_if_untested

STORE_SECONDS = 1.0  # how long the store may take to say who came

warn_if_untested()  # here, because all that shares anything between ranks imports this module

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float | None, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_subgroups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()
_own: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_LEAVING_SECONDS = 0.05


def leave() -> None:
    """Let go of the groups that nobody needs any more, before the interpreter ends.

    [Note: leaving] A thread of Gloo that has just finished a collective drops its tensors, for
    which it needs the interpreter's lock. Where the interpreter is ending it does not get it, and
    the process aborts ("terminate called without an active exception"). A group that is freed has
    ended its threads. Those that somebody still holds get a moment in which the lock is free.
    """
    _twins.clear()
    _subgroups.clear()
    gc.collect()  # modules and their hooks are cycles that hold groups
    if _own:
        time.sleep(_LEAVING_SECONDS)


atexit.register(leave)


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


def own_group(
    ranks: tuple[int, ...],
    timeout: float | None = None,
    like: dist.ProcessGroup | None = None,
) -> dist.ProcessGroup:
    """Make a process group that nobody else uses; its members call this, and only they.

    Its backend is that of ``like``, by default the world's. ``get_pg_count()`` and the names of
    groups made later stay as they are.
    """
    world = world_group()
    backend = c10d._world.pg_map[world if like is None else like][0]
    made = _made.setdefault(world, Counter())
    made[ranks] += 1
    name = f"loosestep-{'-'.join(map(str, ranks))}-{made[ranks]}"
    limit = group_timeout(world) if timeout is None else timedelta(seconds=timeout)
    reason = ""
    try:
        # In a thread: where the store's host hangs, torch's own time-out does not end the call.
        group = within(limit.total_seconds() + 1.0, lambda: _make(name, ranks, limit, backend))
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
    if reason:
        raise _not_made(name, ranks, reason)
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    _own.add(group)
    return group


def _make(name: str, ranks: tuple[int, ...], timeout: timedelta, backend: str) -> dist.ProcessGroup:
    store = c10d._get_default_store()
    store.set(f"{name}/{dist.get_rank()}", "here")
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        backend,
        store,
        group_name(name),
        timeout=timeout,
        group_desc="loosestep",
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _not_made(name: str, ranks: tuple[int, ...], reason: str) -> PeerLost:
    def absent(store: Any) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not store.check([f"{name}/{rank}"]))

    missing = ask_store(STORE_SECONDS, absent)
    if missing is None:
        who = "the store does not answer, so the rank that hosts it (0, as a rule) hangs or is gone"
    else:
        who = f"ranks {list(missing)} did not come" if missing else "one of them was lost"
    return PeerLost(
        f"rank {dist.get_rank()}: cannot make a process group of ranks {list(ranks)}: {who} "
        f"({reason}). A rank that died, hangs or was given other ranks to average with does this",
        ranks=missing or (),
        phase="making a process group",
    )


def own_subgroup(
    parent: dist.ProcessGroup | None, ranks: tuple[int, ...], timeout: float | None
) -> dist.ProcessGroup | None:
    """Return a group of some of a group's ranks, made once; None for a rank alone."""
    if len(ranks) == 1 or parent is None:
        return None
    made = _subgroups.setdefault(parent, {})
    if ranks not in made:
        made[ranks] = own_group(ranks, timeout, parent)
    return made[ranks]


def private_twin(group: dist.ProcessGroup, timeout: float | None = None) -> dist.ProcessGroup:
    """Return a process group with the same ranks that nobody else uses; one for each time-out."""
    if dist.get_world_size(group) == 1:
        return group
    twins = _twins.setdefault(group, {})
    if timeout not in twins:
        twins[timeout] = own_group(tuple(dist.get_process_group_ranks(group)), timeout, group)
    return twins[timeout]


def free_group(group: dist.ProcessGroup) -> None:
    """Close the group's connections, unless everything has been closed already."""
    for subgroup in _subgroups.pop(group, {}).values():
        free_group(subgroup)
    if dist.is_initialized() and group in c10d._world.pg_map:
        dist.destroy_process_group(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long the group's operations may take."""
    timeout: timedelta = group._get_backend(group._device_types[-1]).options._timeout
    return timeout
