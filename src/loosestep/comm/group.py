"""A set of ranks that talk, and all that belongs to them.

[Note: names of groups] ``dist.new_group(..., use_local_synchronization=True)`` is made for groups
whose members alone make them, and does not hold: it derives the name from how many groups this
process has at the moment. Ranks that have different numbers (uneven hosts) then wait under
different names, and a group that is made again after it was freed finds the old one's addresses in
the store. So the name here counts how often these very ranks have made a group together, which all
of them know.

[Note: threads and groups] Messages of one group meet by their order ([Note: order of collectives]
in ``gradients/plain.py``), so one thread at a time uses it. The user's own thread has the groups of
the topology: gradients in backward, blocking averages after the step, in program order. Every
thread that we start gets groups that nobody else uses:

    loosestep overlap   an average under way: groups of its own level and schedule
    Reductions' lines   gradients by a reducer: a group for each set of peers
    loosestep-zero      a ZeRO hook: parameters; another group has the gradients

Groups themselves are made on the user's thread, because all ranks must make them in one order.
Gloo's threads run callbacks, in which nobody waits. ``within`` lets a thread ask a store by a
connection of its own.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from loosestep.comm.failure import FIRST_TAG, Failure, LastWords, listen, not_made, reason_of
from loosestep.comm.flat.windows import WINDOW_BYTES
from loosestep.comm.peers import Peers
from loosestep.comm.store import GroupStore, within
from loosestep.comm.torch_versions import group_name, warn_if_untested
from loosestep.comm.transport.meeting import Hosts, meet
from loosestep.comm.transport.shared_memory import Layout, SharedMemory

if TYPE_CHECKING:
    from loosestep.comm.reducers.ways import Ways

_LEAVING_SECONDS = 0.05

warn_if_untested()  # here, because all that shares anything between ranks imports this module


class Group:
    """One set of ranks that talk: the c10d group, and whatever belongs to these ranks.

    ``Group.make`` makes a c10d group that nobody else uses, ``Group.of`` finds the Group of one
    that somebody handed to us, ``Group.meet`` needs a store and no default process group, and
    ``Group.alone`` is a rank by itself. Groups of some of the ranks, or with another time-out, are
    children: they are closed with their parent. A Group that is lost is closed and made anew, and
    nothing of it outlives that.
    """

    _world: ClassVar[Group | None] = None  # of the default process group; it knows all others

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        group_rank: int,
        store: GroupStore | None = None,
        *,
        ours: bool = True,
    ) -> None:
        self.ranks, self.group_rank, self.size, self.store = ranks, group_rank, len(ranks), store
        # One that belongs to somebody else is not kept alive: they may destroy it any time.
        self._held = process_group if ours else None
        self._borrowed = None if ours or process_group is None else weakref.ref(process_group)
        kinds = () if process_group is None else process_group._device_types
        self.device_types = tuple(kind.type for kind in kinds)
        self.on_cpu = "cpu" in self.device_types  # whether tensors of the CPU can be sent
        self.tags = itertools.count(FIRST_TAG)  # of messages, the same ones on every member
        self.failure: Failure | None = None
        self.last_words: LastWords | None = None
        self.hosts: Hosts = []  # the members by host; none: they have not met yet
        self.shared_memory: SharedMemory | None = None  # None: likewise
        # Groups inside hosts and between them, by the number of ranks that count as a host; where
        # that is None, as they have met.
        self.ways: dict[int | None, Ways | None] = {}
        self._children: dict[tuple[tuple[int, ...], float | None], Group] = {}
        self._made: Counter[tuple[int, ...]] = Counter()  # how often ranks have made a group
        # Of the world only: the Groups of c10d groups, which take no attributes, by their names.
        self._ours: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self._users: dict[str, Group] = {}  # for as long as the c10d group lives

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """Return the Group of a c10d group, always the same one."""
        world = cls._of_world()
        if process_group is world.process_group:
            return world
        name = process_group.group_name
        found = world._ours.get(name) or world._users.get(name)
        if found is None or found._c10d is not process_group:  # names are used again
            ranks = tuple(dist.get_process_group_ranks(process_group))
            me = dist.get_group_rank(process_group, dist.get_rank())
            found = cls(process_group, ranks, me, world.store, ours=False)
            world._keep(found)
        return found

    @classmethod
    def _of_world(cls) -> Group:
        current, known = world_group(), cls._world
        if known is None or known._c10d is not current:
            rank, size = dist.get_rank(), dist.get_world_size()
            store = GroupStore(None, rank)  # one for all groups: it learns who hosts it
            known = cls._world = cls(current, tuple(range(size)), rank, store, ours=False)
            weakref.finalize(current, _end_of, weakref.ref(known)).atexit = False
        return known

    def _keep(self, group: Group) -> None:
        """Keep the Group of a user's c10d group, for as long as that lives."""
        process_group = group.process_group
        name, world, kept = process_group.group_name, weakref.ref(self), weakref.ref(group)
        self._users[name] = group
        weakref.finalize(process_group, _forget, world, kept, name).atexit = False

    @classmethod
    def make(
        cls,
        ranks: tuple[int, ...],
        timeout: float | None = None,
        like: dist.ProcessGroup | None = None,
    ) -> Group:
        """Make a group that nobody else uses; its members call this, and only they.

        Its backend is that of ``like``, by default the world's. ``get_pg_count()`` and the names of
        groups made later stay as they are.
        """
        world = cls._of_world()
        store = world.store
        assert store is not None, "the world has met by a store"
        backend = c10d._world.pg_map[world.process_group if like is None else like][0]
        limit = world.own_timeout if timeout is None else timedelta(seconds=timeout)

        def connect(name: str) -> dist.ProcessGroup:
            made, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                list(ranks),
                backend,
                store.c10d,
                group_name(name),
                timeout=limit,
                group_desc="loosestep",
            )
            assert isinstance(made, dist.ProcessGroup)
            return made

        group = cls._connected(
            connect, world._next_name(ranks), ranks, dist.get_rank(), store, limit
        )
        c10d._world.pg_group_ranks[group.process_group] = {rank: i for i, rank in enumerate(ranks)}
        world._ours[group.process_group.group_name] = group
        return group

    @classmethod
    def meet(
        cls, store: Any, rank: int, ranks: tuple[int, ...], timeout: float, name: str = "meeting"
    ) -> Group:
        """Make a Gloo group from a store alone: no default process group is needed or touched.

        ``store`` is a ``torch.distributed`` store that all members can reach. ``name`` must be new
        to it, on all members alike, say by the number of a generation.
        """
        own, limit = GroupStore(store, rank), timedelta(seconds=timeout)

        def connect(name: str) -> dist.ProcessGroup:
            behind = c10d.PrefixStore(name, store)
            size, group_rank = len(ranks), ranks.index(rank)
            made = dist.ProcessGroup(behind, group_rank, size)
            gloo = dist.ProcessGroupGloo(behind, group_rank, size, limit)
            kind = dist.ProcessGroup.BackendType.GLOO
            made._register_backend(torch.device("cpu"), kind, gloo)
            made._set_default_backend(kind)
            made._set_group_name(group_name(name))
            return made

        return cls._connected(connect, f"loosestep-{name}", ranks, rank, own, limit)

    @classmethod
    def alone(cls, rank: int) -> Group:
        """Return the group of one rank, which needs no messages."""
        return cls(None, (rank,), 0)

    @classmethod
    def _connected(
        cls,
        connect: Callable[[str], dist.ProcessGroup],
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        store: GroupStore,
        limit: timedelta,
    ) -> Group:
        """Let all members connect, or raise for those who have not come."""

        def attempt() -> dist.ProcessGroup:
            store.declare_host()
            store.c10d.set(f"{name}/{rank}", "here")
            made = connect(name)
            store.learn_host()
            if any(device.type == "cpu" for device in made._device_types):
                # Gloo connects before it returns, here and not yet everywhere: a member that
                # leaves at once would hang up on those that are still at it.
                made.barrier().wait(limit)
            return made

        reason = ""
        try:
            # In a thread: where the store's host hangs, torch's own time-out does not end the call.
            process_group = within(limit.total_seconds() + 1.0, attempt)
        except (RuntimeError, TimeoutError) as error:
            reason = reason_of(error)
        if reason:  # not before: [Note: errors outside except]
            raise not_made(name, ranks, rank, store, reason)
        made = cls(process_group, ranks, ranks.index(rank), store)
        _open.add(made)
        made.listen()
        return made

    def _next_name(self, ranks: tuple[int, ...]) -> str:
        self._made[ranks] += 1
        return f"loosestep-{'-'.join(map(str, ranks))}-{self._made[ranks]}"

    def __repr__(self) -> str:
        return f"Group(ranks {list(self.ranks)}, seen by rank {self.ranks[self.group_rank]})"

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The c10d group."""
        found = self._c10d
        assert found is not None, f"{self} sends no messages: it is alone, or was closed"
        return found

    @property
    def _c10d(self) -> dist.ProcessGroup | None:
        return self._held if self._borrowed is None else self._borrowed()

    @property
    def own_timeout(self) -> timedelta:
        """How long an operation may take unless somebody says otherwise."""
        group = self.process_group
        timeout: timedelta = group._get_backend(group._device_types[-1]).options._timeout
        return timeout

    def subgroup(self, ranks: tuple[int, ...], timeout: float | None = None) -> Group:
        """Return the group of some of the ranks, made once; its members ask together."""
        if len(ranks) == 1:
            return Group.alone(ranks[0])
        key = ranks, timeout
        if key not in self._children:
            self._children[key] = self._make(ranks, timeout)
        return self._children[key]

    def twin(self, timeout: float | None = None) -> Group:
        """Return a group of the same ranks that nobody else uses; one for each time-out."""
        return self if self.size == 1 else self.subgroup(self.ranks, timeout)

    def share_memory(self, peers: Peers) -> SharedMemory:
        """Let the members meet, by way of a view of this group; a collective call."""
        self.hosts, self.shared_memory = meet(peers)
        return self.shared_memory

    def use_network(self) -> None:
        """Send everything by the network; all members must say so before the first use."""
        self.hosts = [(member,) for member in range(self.size)]
        self.shared_memory = SharedMemory(None, self.size, Layout(WINDOW_BYTES))

    def hand_over(self) -> dist.ProcessGroup:
        """Return the c10d group, which is a user's from now on: it lives until they destroy it.

        The world's Group keeps this one as long, so that it is found again.
        """
        process_group = self.process_group
        self._held, self._borrowed = None, weakref.ref(process_group)
        Group._of_world()._keep(self)
        return process_group

    def close(self) -> None:
        """Close the connections of a group of ours, and of its children; safe to call twice."""
        while self._children:
            self._children.popitem()[1].close()
        while self._users:
            self._users.popitem()[1].close()
        self.last_words = self.shared_memory = None
        self.hosts, self.ways = [], {}
        group, self._held = self._held, None
        _open.discard(self)
        if group is not None and dist.is_initialized() and group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    def listen(self) -> None:
        """Be ready for the others' last words; asks nothing of them, and does so once."""
        if self.last_words is None and self.size > 1 and self.on_cpu:
            self.last_words = listen(self)

    def _make(self, ranks: tuple[int, ...], timeout: float | None) -> Group:
        store = self.store
        if dist.is_initialized() and (store is None or store.is_default):
            return Group.make(ranks, timeout, self.process_group)
        assert store is not None, "who met by a store has it"
        seconds = self.own_timeout.total_seconds() if timeout is None else timeout
        name = f"{self.process_group.group_name}-{self._next_name(ranks)}"
        return Group.meet(store.c10d, self.ranks[self.group_rank], ranks, seconds, name)


def _end_of(ended: weakref.ref[Group]) -> None:
    """Let go of the world's Group, and with it of all others, when its c10d group has ended."""
    if (world := ended()) is not None:
        if Group._world is world:
            Group._world = None
        world.close()


def _forget(world: weakref.ref[Group], group: weakref.ref[Group], name: str) -> None:
    users = {} if (known := world()) is None else known._users
    if name in users and users[name] is group():  # and not of another one that took the name
        del users[name]


_open: weakref.WeakSet[Group] = weakref.WeakSet()  # groups of ours that have connections


def leave() -> None:
    """Let go of the groups that nobody needs any more, before the interpreter ends.

    [Note: leaving] A thread of Gloo that has just finished a collective drops its tensors, for
    which it needs the interpreter's lock. Where the interpreter is ending it does not get it, and
    the process aborts ("terminate called without an active exception"). A group that is freed has
    ended its threads. Those that somebody still holds get a moment in which the lock is free.
    """
    Group._world = None
    gc.collect()  # modules and their hooks are cycles that hold groups
    if _open:
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


def peers_of(
    group: Group | dist.ProcessGroup,
    *,
    level: str = "group",
    weights: tuple[float, ...] | None = None,
    timeout: float | None = None,
) -> Peers:
    """Return this rank's view of ``group``."""
    known = group if isinstance(group, Group) else Group.of(group)
    known.listen()
    return Peers(known, level, weights, timeout)
