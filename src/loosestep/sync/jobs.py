"""Which windows travel with whom: tensors cut up, by the shard that this rank holds of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from loosestep.comm.flat.cuts import Run, Runs
from loosestep.comm.flat.rows import origin
from loosestep.comm.flat.windows import OWN_WINDOW_BYTES, Window, windows
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Mean, Place, Reducer
from loosestep.comm.reducers.division import Division
from loosestep.comm.tensors import Holders, Named, holders_of
from loosestep.sync.bound import by_shard
from loosestep.sync.parts import compressible, only_exact

NO_FACTORS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Job:
    """A window that is to be averaged with some peers."""

    window: Window
    peers: Peers
    place: Place  # in the model
    by: Reducer | None = None  # what averages it; None: what averages the rest

    @cached_property
    def silent(self) -> bool:
        """Whether this rank has no say in the mean: its values must not even be looked at."""
        weights = self.peers.weights
        return weights is not None and weights[self.peers.group_rank] == 0.0

    @cached_property
    def some_silent(self) -> bool:
        """Whether that is so for any rank; the same on all of them."""
        return 0.0 in (self.peers.weights or ())


def jobs_of(
    windows: Sequence[Window],
    peers: Peers,
    shard_key: str = "",
    *,
    by: Reducer | None = None,
    origins: Mapping[str, tuple[str, int]] | None = None,
) -> list[Job]:
    """Return a job for every window; its name says which tensors, and counts those of one name.

    ``origins``: of which tensors the windows' are parts, and from which element.
    """
    jobs: list[Job] = []
    seen: Counter[str] = Counter()
    for window in windows:
        name = " ".join(part for part in (window.name, _contents(window), shard_key) if part)
        runs = Runs(tuple(_located(run, origins or {}) for run in window.runs))
        jobs.append(Job(window, peers, Place(f"{seen[name]} {name}", runs), by))
        seen[name] += 1
    return jobs


def _located(run: Run, origins: Mapping[str, tuple[str, int]]) -> Run:
    """Return a run of the whole tensor."""
    tensor, first = origins.get(run.tensor, (run.tensor, 0))
    return Run(tensor, first + run.offset, run.numel)


def _contents(window: Window) -> str:
    """Return a mark that tells shared windows apart whose tensors are not the same."""
    if len(window.runs) == 1:
        return ""
    held = [(run.tensor, run.offset, run.numel) for run in window.runs]
    return "#" + hashlib.blake2b(repr(held).encode(), digest_size=4).hexdigest()


class Cutter:
    """Cuts what one group averages into jobs."""

    def __init__(self, peers: Peers, reducer: Reducer, window_bytes: int) -> None:
        self._peers, self._reducer, self._window_bytes = peers, reducer, window_bytes
        self._shards: dict[str, tuple[Holders, Peers]] = {}

    def cut(
        self,
        parts: Sequence[Named],
        keys: dict[str, str],
        *,
        say: Mapping[int, float] = NO_FACTORS,
        divided: bool = False,
    ) -> list[Job]:
        """Return jobs for what has a mean; ``divided``: a host's ranks have a part of it each.

        ``say`` are factors of the weights of global ranks.
        """
        jobs: list[Job] = []
        for key, group in by_shard(parts, keys).items():
            holders, peers = self.shard(key)
            if key and not holders.can_average:
                raise ValueError(
                    f"level {peers.level!r} (ranks {list(self._peers.global_ranks)}) must hold "
                    f"every shard on several ranks, got {holders.by_shard}; a level inside the "
                    "shard mesh cannot average: choose one that spans whole meshes"
                )
            weighed = replace(peers.weighed(say), checked=True)
            # With the weights that the peers have now.
            division = self._reducer.divide(weighed) if divided else None
            jobs += self._cut_shard(key, group, weighed, division)
        return jobs

    def cut_exact(
        self, parts: Sequence[Named], keys: dict[str, str], say: Mapping[int, float] = NO_FACTORS
    ) -> list[Job]:
        """Return jobs for what travels as it is."""
        jobs: list[Job] = []
        for key, group in by_shard(parts, keys).items():
            peers = self.shard(key)[1].weighed(say)
            jobs += jobs_of(windows(group, self._window_size(peers)), peers, key)
        return jobs

    def shard(self, key: str) -> tuple[Holders, Peers]:
        """Return who of this group holds the same shard; the first call is collective."""
        if key == "":
            whole = self._peers.global_ranks
            return Holders({"": whole}, whole), self._peers
        if key not in self._shards:
            holders = holders_of(self._peers, key)
            self._shards[key] = (holders, _among(self._peers, holders.mine))
        return self._shards[key]

    def _cut_shard(
        self, key: str, group: list[Named], peers: Peers, division: Division | None
    ) -> list[Job]:
        lossy, size = self._reducer.lossy, self._window_size(peers)
        if division is None and not lossy:
            return jobs_of(windows(group, size), peers, key)
        by = Mean() if lossy or division is None else division.undivided
        exact = jobs_of(windows(only_exact(group), size), peers, key, by=by)
        rest = compressible(group)
        origins: dict[str, tuple[str, int]] = {}
        if division is None:
            self._reducer.check_replicas(peers)
        else:
            rest, peers = division.share(rest), division.across
            size = self._window_size(peers)
            origins = {name: origin(name, part) for name, part in rest}
        # Differences are copies in any case, so large pieces may share a window too.
        own = size if lossy else OWN_WINDOW_BYTES
        cut = windows(rest, size, own, self._reducer.block)
        return [*jobs_of(cut, peers, key, origins=origins), *exact]

    def _window_size(self, peers: Peers) -> int:
        # What a lossy reducer keeps goes by windows, and is loaded where bytes travel otherwise.
        most = self._window_bytes if self._reducer.lossy else peers.window_bytes
        return min(self._window_bytes, most)


def _among(peers: Peers, ranks: tuple[int, ...]) -> Peers:
    """Return the peers among ``ranks``, with a process group made for them once."""
    if ranks == peers.global_ranks:
        return peers
    weights = peers.weights
    if weights is not None:
        weights = tuple(weights[peers.global_ranks.index(rank)] for rank in ranks)
    group = peers.group.subgroup(ranks, peers.timeout)
    return Peers(group, peers.level, weights, peers.timeout)
