"""A set of ranks that talk, and all that belongs to them.

[Note: names of groups] ``dist.new_group(..., use_local_synchronization=True)`` is made for groups
whose members alone make them, and does not hold: it derives the name from how many groups this
process has at the moment. Ranks that have different numbers (uneven hosts) then wait under
different names, and a group that is made again after it was freed finds the old one's addresses in
the store. So the name here counts how often these very ranks have made a group together, which all
of them know.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from loosestep.comm.deadline import within
from loosestep.comm.reasons import in_words
from loosestep.comm.store import GroupStore
from loosestep.comm.torch_versions import group_name, warn_if_untested
from loosestep.errors import PeerLost

if TYPE_CHECKING:
    from loosestep.comm.transport.board import Board

STORE_SECONDS = 1.0  # how long the store may take to say who came
# User code rarely uses tags up here, so a group that the user handed to us can be shared.
FIRST_TAG = 1 << 24
NEVER_SENT = FIRST_TAG - 1
LAST_WORDS = FIRST_TAG - 3
NOTHING = -2  # has been heard from a member yet
_LEAVING_SECONDS = 0.05

Kept = TypeVar("Kept")

warn_if_untested()  # here, because all that shares anything between ranks imports this module


@dataclass(frozen=True)
class Failure:
    """How a group failed; not the error itself, whose traceback would keep the group alive."""

    text: str
    ranks: tuple[int, ...]
    phase: str

    def error(self, prefix: str = "") -> PeerLost:
        """Return it as an error."""
        return PeerLost(prefix + self.text, ranks=self.ranks, phase=self.phase)


@dataclass(frozen=True)
class Words:
    """Where last words come to, by group rank ([Note: last words])."""

    heard: torch.Tensor
    works: list[dist.Work]  # kept: a receive ends with its handle


class Group:
    """One set of ranks that talk: the c10d group, and whatever belongs to these ranks.

    ``Group.make`` makes a c10d group that nobody else uses, ``Group.of`` finds the Group of one
    that somebody handed to us, ``Group.meet`` needs a store and no default process group, and
    ``Group.alone`` is a rank by itself. Groups of some of the ranks, or with another time-out, are
    children: they are closed with their parent. A Group that is lost is closed and made anew, and
    nothing of it outlives that.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        group_rank: int,
        store: GroupStore | None = None,
        *,
        ours: bool = True,
    ) -> None:
        self.ranks, self.group_rank, self.store = ranks, group_rank, store
        # One that belongs to somebody else is not kept alive: they may destroy it any time.
        self._held = process_group if ours else None
        self._borrowed = None if ours or process_group is None else weakref.ref(process_group)
        self.tags = itertools.count(FIRST_TAG)  # of messages, the same ones on every member
        self.failure: Failure | None = None
        self.words: Words | None = None  # where the members' last words come to
        self.board: Board | None = None  # shared memory; None: the members have not met yet
        self.traits: dict[Hashable, Any] = {}  # what else its members have found out together
        self._children: dict[Hashable, Group] = {}
        self._made: Counter[tuple[int, ...]] = Counter()  # how often ranks have made a group
        if process_group is not None:
            _known[process_group] = weakref.ref(self) if ours else lambda: self

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """Return the Group of a c10d group, always the same one."""
        found = _known[process_group]() if process_group in _known else None
        if found is None:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            me = dist.get_group_rank(process_group, dist.get_rank())
            found = cls(process_group, ranks, me, _default_store(process_group), ours=False)
        return found

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
        world = Group.of(world_group())
        backend = c10d._world.pg_map[world.process_group if like is None else like][0]
        limit = world.own_timeout if timeout is None else timedelta(seconds=timeout)
        store = _default_store(None)

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
            reason = in_words(error)
        if reason:
            raise _not_made(name, ranks, rank, store, reason)
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
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The c10d group."""
        found = self._held if self._borrowed is None else self._borrowed()
        assert found is not None, f"{self} sends no messages: it is alone, or was closed"
        return found

    @property
    def own_timeout(self) -> timedelta:
        """How long an operation may take unless somebody says otherwise."""
        group = self.process_group
        timeout: timedelta = group._get_backend(group._device_types[-1]).options._timeout
        return timeout

    @property
    def on_cpu(self) -> bool:
        """Whether tensors of the CPU can be sent."""
        return any(kind.type == "cpu" for kind in self.process_group._device_types)

    def subgroup(self, ranks: tuple[int, ...], timeout: float | None = None) -> Group:
        """Return the group of some of the ranks, made once; its members ask together."""
        if len(ranks) == 1:
            return Group.alone(ranks[0])
        return self._child((ranks, timeout), lambda: self._make(ranks, timeout))

    def twin(self, timeout: float | None = None) -> Group:
        """Return a group of the same ranks that nobody else uses; one for each time-out."""
        return self if self.size == 1 else self.subgroup(self.ranks, timeout)

    def find_out(self, question: Hashable, ask: Callable[[], Kept]) -> Kept:
        """Return what the members have found out together; ``ask`` does so the first time."""
        if question not in self.traits:
            self.traits[question] = ask()
        found: Kept = self.traits[question]
        return found

    def close(self) -> None:
        """Close the connections of a group of ours, and of its children; safe to call twice."""
        while self._children:
            self._children.popitem()[1].close()
        self.words = self.board = None
        self.traits.clear()
        group, self._held = self._held, None
        _open.discard(self)
        if group is not None and dist.is_initialized() and group in c10d._world.pg_map:
            dist.destroy_process_group(group)

    def listen(self) -> None:
        """Be ready for the others' last words; asks nothing of them, and does so once."""
        if self.words is not None or self.size == 1 or not self.on_cpu:
            return
        heard, works = torch.full((self.size,), NOTHING), []
        for member in range(self.size):
            if member != self.group_rank:
                with contextlib.suppress(RuntimeError):  # it has gone already
                    into = [heard[member : member + 1]]
                    works.append(self.process_group.recv(into, member, LAST_WORDS))
        self.words = Words(heard, works)

    def hang_up(self) -> None:
        """Close all connections, so that those who wait for this rank need not sit it out."""
        if not self.on_cpu:
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.size):
            # Gloo does so when a wait times out; one for a peer that is gone ends at once.
            if peer != self.group_rank:
                with contextlib.suppress(RuntimeError):
                    waiting = self.process_group.recv([nothing], peer, NEVER_SENT)
                    waiting.wait(timedelta(milliseconds=1))

    def _make(self, ranks: tuple[int, ...], timeout: float | None) -> Group:
        store = self.store
        if dist.is_initialized() and (store is None or store.is_default):
            return Group.make(ranks, timeout, self.process_group)
        assert store is not None, "who met by a store has it"
        seconds = self.own_timeout.total_seconds() if timeout is None else timeout
        name = f"{self.process_group.group_name}-{self._next_name(ranks)}"
        return Group.meet(store.c10d, self.ranks[self.group_rank], ranks, seconds, name)

    def _child(self, key: Hashable, make: Callable[[], Group]) -> Group:
        if key not in self._children:
            self._children[key] = make()
        return self._children[key]


# The one place where the Group of a c10d group is found again: c10d's objects take no attributes,
# and calls such as average_(tensors, group) come with nothing else. An entry keeps the Group of
# somebody else's c10d group, for as long as that lives, and none of ours.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Callable[[], Group | None]] = (
    weakref.WeakKeyDictionary()
)
_open: weakref.WeakSet[Group] = weakref.WeakSet()  # groups of ours that have connections


def leave() -> None:
    """Let go of the groups that nobody needs any more, before the interpreter ends.

    [Note: leaving] A thread of Gloo that has just finished a collective drops its tensors, for
    which it needs the interpreter's lock. Where the interpreter is ending it does not get it, and
    the process aborts ("terminate called without an active exception"). A group that is freed has
    ended its threads. Those that somebody still holds get a moment in which the lock is free.
    """
    _known.clear()
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


def _default_store(group: dist.ProcessGroup | None) -> GroupStore:
    """Return the store of the default process group, one for all groups: it learns who hosts it."""
    world = world_group()
    if group is world:
        return GroupStore(None, dist.get_rank())
    store = Group.of(world).store
    assert store is not None, "the world has met by a store"
    return store


def _not_made(
    name: str, ranks: tuple[int, ...], rank: int, store: GroupStore, reason: str
) -> PeerLost:
    def absent(reached: Any) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not reached.check([f"{name}/{rank}"]))

    missing = store.ask(STORE_SECONDS, absent)
    if missing is not None:
        who = f"ranks {list(missing)} did not come" if missing else "one of them was lost"
    elif store.host is None:
        who = "the store does not answer, so the rank that hosts it (0, as a rule) hangs or is gone"
    else:
        missing = (store.host,)
        who = f"the store does not answer, so rank {store.host}, which hosts it, hangs or is gone"
    return PeerLost(
        f"rank {rank}: cannot make a process group of ranks {list(ranks)}: {who} "
        f"({reason}). A rank that died, hangs or was given other ranks to average with does this",
        ranks=missing or (),
        phase="making a process group",
    )
