"""One copy a host: reduce inside the host, average between hosts, hand out inside the host.

Every rank of a host owns a slice. It takes the mean of its neighbours' versions (through memory),
averages that with the ranks at its place on the other hosts, and hands the result to its
neighbours. So what leaves a host is one copy of the buffer each way, however many ranks it has.

    mean = mean over hosts of round(mean over the host's ranks)

both as ``Mean`` defines it, in rank order; hosts count by the sum of their ranks' weights. Where
the ranks of a host hold the same values, as after gradients were shared inside it, rounding the
host's mean changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loosestep.comm.flat.cuts import Runs
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.division import Division
from loosestep.comm.reducers.mean import Mean, MeanInFlight
from loosestep.comm.reducers.nonfinite import all_finite, contributors
from loosestep.comm.reducers.pieces import InPieces
from loosestep.comm.reducers.reducer import Handle, NonFinite, Place, Reducer, check_reducer
from loosestep.comm.reducers.shared_memory_mean import SharedMemoryMean, room
from loosestep.comm.reducers.ways import Ways, blocks, make_ways
from loosestep.comm.tensors import Named
from loosestep.comm.transport.exchange import Task
from loosestep.comm.transport.shared_memory import Layout
from loosestep.errors import NotAttachable, check_whole, choose


class RanksOfHost(enum.Enum):
    """Whether the ranks of a host hold the same values before a sync."""

    DIFFER = "differ"  # they are averaged first
    EQUAL = "equal"  # gradients are shared inside the host at every step: nothing to average


_ONE_REPLICA = (
    "{} keeps what was not sent in the replica, and a host whose ranks differ has several; share "
    "gradients inside hosts at every step and give TwoLevel(..., ranks_of_host='equal'), or use "
    "ErrorFeedback"
)


@dataclass(frozen=True, init=False, repr=False)
class TwoLevel(Reducer):
    """Average inside hosts first and send one copy a host to the others, by ``inner``.

    ``inner`` (default: the exact ``Mean``) works between hosts only, which is where compression
    pays: ``TwoLevel(Int4())``. Hosts are told apart by name, or are ``ranks_per_host`` consecutive
    ranks each. A group inside one host, and hosts with different numbers of ranks, which have no
    common places, are averaged over all ranks directly: by ``Mean`` on one host, else by ``inner``.
    With ``inside=SharedMemoryMean()`` the gradients of a plain module live in memory that a host
    shares.

    >>> TwoLevel(ranks_per_host=2).bytes_on_wire(numel=8, dtype=torch.float32, group_size=4)
    16
    """

    inner: Reducer
    ranks_of_host: RanksOfHost
    inside: Mean
    ranks_per_host: int | None

    def __init__(
        self,
        inner: Reducer | None = None,
        *,
        ranks_of_host: RanksOfHost | str = RanksOfHost.DIFFER,
        inside: Mean | None = None,
        ranks_per_host: int | None = None,
    ) -> None:
        _check(inner, inside, ranks_per_host)
        vars(self).update(
            inner=Mean() if inner is None else inner,
            ranks_of_host=choose(RanksOfHost, ranks_of_host),
            inside=Mean() if inside is None else inside,
            ranks_per_host=ranks_per_host,
        )
        if self.leaves_apart and self.ranks_of_host is RanksOfHost.DIFFER:
            raise ValueError(_ONE_REPLICA.format(self.inner))

    @property
    def lossy(self) -> bool:
        """Whether ``inner`` drops something."""
        return self.inner.lossy

    @property
    def host_size(self) -> int | None:
        """``ranks_per_host``."""
        return self.ranks_per_host

    @property
    def sends_differences(self) -> bool:
        """Whether ``inner`` does."""
        return self.inner.sends_differences

    @property
    def leaves_apart(self) -> bool:
        """Whether ``inner`` does."""
        return self.inner.leaves_apart

    @property
    def block(self) -> int:
        """That of ``inner``."""
        return self.inner.block

    @property
    def remembers(self) -> bool:
        """Whether ``inner`` does."""
        return self.inner.remembers

    @property
    def on_nonfinite(self) -> NonFinite | None:
        """What ``inner`` does about infinities and NaN."""
        return self.inner.on_nonfinite

    @property
    def resident(self) -> bool:
        """Whether gradients are to live in memory that a host's ranks share."""
        return self.inside.resident

    @property
    def exact(self) -> Reducer:
        """What averages exactly on the same ways."""
        return TwoLevel(ranks_per_host=self.ranks_per_host)

    def among_groups(self, group_size: int) -> Reducer:
        """Return the reducer for one rank of every group: a host has fewer of them."""
        if self.ranks_per_host is None:
            return self
        size = self.ranks_per_host // group_size
        if size <= 1:
            return self.inner
        return TwoLevel(self.inner, ranks_of_host=self.ranks_of_host, ranks_per_host=size)

    def init(self, tensors: Sequence[Named], peers: Peers) -> Any:
        """Make the groups inside and between hosts; return the state of ``inner``; collective."""
        ways = None if peers.size == 1 else self._ways_of(peers)
        return self.inner.init(tensors, peers if ways is None else ways.peers(peers)[1])

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch the mean of ``buffer`` over ``peers``; a group's first call is collective."""
        ways = None if peers.size == 1 else self._ways_of(peers)
        if ways is None:
            one_host = peers.size == 1 or len(self._hosts_of(peers)) == 1
            return (Mean() if one_host else self.inner).start(buffer, peers, state, place)
        peers = self._only_finite(buffer, peers, place)
        inside, across = ways.peers(peers)
        if inside.size == 1:
            return self.inner.start(buffer, across, state, place)

        runs = place.holds(buffer.numel())

        def launch(piece: torch.Tensor, name: str, held: Runs) -> Handle:
            bounds = held.slices(inside.size, self.block)
            at = Place(name, held.part(*bounds[inside.group_rank]))

            def onward(mine: torch.Tensor) -> Handle:
                return self.inner.start(mine, across, state, at)

            return _ByHost(Task(piece, inside, bounds), self.ranks_of_host, onward)

        most = _most_bytes(inside.size)
        if buffer.nbytes <= most or self._lives_there(buffer, inside):
            return launch(buffer, place.name, runs)
        bounds = runs.pieces(most // buffer.element_size(), self.block, peers.size)
        pieces = (
            (buffer[start:stop], f"{place.name}, part {number}", runs.part(start, stop))
            for number, (start, stop) in enumerate(bounds)
        )
        return InPieces(pieces, lambda piece: launch(*piece))

    def room(
        self, size: int, devices: Sequence[torch.device], groups: Sequence[Peers]
    ) -> torch.Tensor | None:
        """Return memory of mine for gradients, which my host's ranks in all these groups see.

        A collective call of every group; where one member cannot, all of it raise. None: there is
        nobody else on this host.
        """
        memory, refusal = None, ""
        ways = [(peers, self._ways_of(peers)) for peers in groups if peers.size > 1]
        try:
            near = [peers if way is None else way.peers(peers)[0] for peers, way in ways]
            memory = room(size, devices, near)
        except NotAttachable as error:
            refusal = str(error)
        # The widest first, so that all hosts hear of one that cannot: they would wait for it.
        for peers, _ in sorted(ways, key=lambda pair: -pair[0].size):
            heard = [said.decode() for said in peers.exchange(refusal.encode())]
            if any(heard):
                raise NotAttachable(next(reason for reason in heard if reason))
        return memory

    def _lives_there(self, buffer: torch.Tensor, inside: Peers) -> bool:
        """Say whether the ranks of this host see the buffer where it is: no window bounds it."""
        return self.resident and inside.shared_memory.place_of(buffer) is not None

    def check_replicas(self, peers: Peers) -> None:
        """Raise where a host has several replicas of what is not divided, such as shards."""
        ways = None if peers.size == 1 or not self.leaves_apart else self._ways_of(peers)
        if ways is not None and len(ways.inside) > 1:
            raise ValueError(_ONE_REPLICA.format(self.inner))

    def _only_finite(self, buffer: torch.Tensor, peers: Peers, place: Place) -> Peers:
        """Ask all ranks whether what they send can be compressed, unless they have been asked.

        A host's mean would spread one rank's NaN, and only some of the ranks would see it.
        """
        if self.on_nonfinite is None or peers.checked:
            return peers
        mine = all_finite(buffer)
        said = [bool(flag[0]) for flag in peers.exchange_fixed(bytes([mine]))]
        bad = [member for member, finite in enumerate(said) if not finite]
        allowed = contributors(peers, bad, self.on_nonfinite, place.name)
        if not bad:
            return peers
        if not mine:
            buffer.zero_()  # it has no say, and gets the others' mean
        weights = peers.weights or (1.0,) * peers.size
        return replace(peers, weights=tuple(w * (m in allowed) for m, w in enumerate(weights)))

    def divide(self, peers: Peers) -> Division | None:
        """Return how the ranks of a host divide an average; None: there is nothing to divide.

        A group's first call is collective.
        """
        if self.ranks_of_host is RanksOfHost.DIFFER or peers.size == 1:
            return None
        ways = self._ways_of(peers)
        if ways is None or len(ways.inside) == 1:
            return None
        inner = None if self.lossy else self.inner  # what is never divided is never compressed
        apart = TwoLevel(inner, ranks_per_host=self.ranks_per_host)
        return Division(*ways.peers(peers), ways.hosts, self.inner, apart)

    def takes_many(self, peers: Peers, dtype: torch.dtype, device: torch.device) -> bool:
        """Say whether ``start_many`` can be used: where there is one host only."""
        if peers.size == 1 or self._ways_of(peers) is not None:
            return False
        one_host = len(self._hosts_of(peers)) == 1
        return one_host and Mean().takes_many(peers, dtype, device)

    def start_many(self, buffers: Sequence[torch.Tensor], peers: Peers) -> Handle:
        """Launch the mean of several buffers of one dtype."""
        return Mean().start_many(buffers, peers)

    def describe(self, state: Any) -> str:
        """Return whether ``inner`` keeps something, to be compared across ranks."""
        if (
            self.ranks_of_host is RanksOfHost.EQUAL
        ):  # a rank's part may be empty, and then it keeps nothing
            return ""
        # By pieces of this rank's own slice: ranks of a host keep other sizes than each other.
        return "something" if self.inner.describe(state) else ""

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what this rank sends to other hosts."""
        hosts = self._partition(group_size)
        mine = next(members for members in hosts if group_rank in members)
        if len(hosts) == 1:
            return Mean().bytes_on_wire(numel, dtype, group_size, group_rank)
        if len({len(members) for members in hosts}) > 1:
            return self.inner.bytes_on_wire(numel, dtype, group_size, group_rank)
        runs, at = Runs.of(numel), hosts.index(mine)
        if len(mine) == 1:
            return self.inner.bytes_on_wire(numel, dtype, len(hosts), at)
        sent = 0
        most = _most_bytes(len(mine)) // dtype.itemsize
        for start, stop in runs.pieces(most, self.block, group_size):
            piece = runs.part(start, stop)
            bounds = piece.slices(len(mine), self.block)
            sizes = [run.numel for run in piece.part(*bounds[mine.index(group_rank)]).each]
            sent += self.inner.bytes_on_wire(sizes, dtype, len(hosts), at)
        return sent

    def __repr__(self) -> str:
        size = "" if self.ranks_per_host is None else f", ranks_per_host={self.ranks_per_host}"
        inside = f", inside={self.inside}" if self.resident else ""
        return f"TwoLevel({self.inner}, {self.ranks_of_host.value}{inside}{size})"

    def _partition(self, group_size: int) -> list[tuple[int, ...]]:
        if self.ranks_per_host is None:
            raise ValueError(
                f"TwoLevel() finds out at the first sync on which hosts {group_size} ranks are; "
                "give ranks_per_host=... to know beforehand what is sent"
            )
        return blocks(group_size, self.ranks_per_host)

    def _hosts_of(self, peers: Peers) -> list[tuple[int, ...]]:
        size = self.ranks_per_host
        return peers.hosts if size is None else blocks(peers.size, size)

    def _ways_of(self, peers: Peers) -> Ways | None:
        known = peers.group.ways
        if self.ranks_per_host not in known:
            known[self.ranks_per_host] = make_ways(peers, self._hosts_of(peers))
        return known[self.ranks_per_host]


def check_hosts_fit(reducer: Reducer | None, level: str, groups: Iterable[Sequence[int]]) -> None:
    """Raise where ``ranks_per_host`` does not divide a group of a level, whoever is in it.

    Asked about all groups and not only one's own, all ranks raise alike, before any waits.
    """
    size = None if reducer is None else reducer.host_size
    for ranks in groups:
        if size is not None and len(ranks) > 1 and len(ranks) % size:
            raise ValueError(
                f"ranks_per_host must divide every group that averages: on level {level!r} ranks "
                f"{list(ranks)} are {len(ranks)}, no multiple of {size}; leave ranks_per_host away "
                "to tell hosts apart by name, or give levels that hold whole hosts"
            )


def _most_bytes(ranks_of_host: int) -> int:
    """Return how much goes through a host as one, in memory or not: so bytes are known before."""
    return Layout.of(ranks_of_host).window_bytes


class _ByHost(MeanInFlight):
    """A buffer that is reduced inside the host, goes on to the others, and comes back."""

    def __init__(
        self, task: Task, ranks_of_host: RanksOfHost, onward: Callable[[torch.Tensor], Handle]
    ) -> None:
        super().__init__(task)
        self._ranks_of_host, self._onward = ranks_of_host, onward
        self._across: Handle | None = None

    def advance(self) -> None:
        """Sum my slice over the host and send it on."""
        if self._across is None:
            if self._ranks_of_host is RanksOfHost.DIFFER:
                self.reduce()
            else:
                self.ready()
            self._across = self._onward(self.task.mine)

    def wait(self) -> None:
        """Take my slice back from the other hosts and hand it to the neighbours."""
        self.advance()
        assert self._across is not None
        self._across.wait()
        for place in super()._mirrors():
            place.copy_(self.task.mine)
        self.publish()
        self.collect()
        self.traffic.add(self._across.traffic)

    def commit(self) -> None:
        """Let the state have what was learnt between hosts."""
        assert self._across is not None, "waited for"
        self._across.commit()

    def _mirrors(self) -> list[torch.Tensor]:
        return []  # the host's own mean is nobody's result


def _check(inner: Reducer | None, inside: object, ranks_per_host: object) -> None:
    if inside is not None and type(inside) not in (Mean, SharedMemoryMean):
        raise TypeError(f"inside must be Mean() or SharedMemoryMean(), got {inside!r}")
    if inner is not None:
        check_reducer("inner", inner, "Int4()")
    if isinstance(inside, SharedMemoryMean) and not (inner and inner.lossy):
        raise ValueError(
            f"inside=SharedMemoryMean() is for gradients in few bits, and by {inner or Mean()} "
            "nothing is compressed between hosts; use SharedMemoryMean() alone, or "
            "TwoLevel(Ternary(), inside=SharedMemoryMean())"
        )
    if isinstance(inner, SharedMemoryMean):
        raise ValueError(
            "SharedMemoryMean() shares memory inside a host, and inner works between hosts; use "
            "TwoLevel() or SharedMemoryMean() alone"
        )
    if ranks_per_host is not None:
        check_whole("ranks_per_host", ranks_per_host, 1, hint="None tells hosts apart by name")
