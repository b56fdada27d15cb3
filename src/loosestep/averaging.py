"""Averaging named tensors in place: agree with the other ranks, cut into windows, send them.

agree       all ranks mean the same tensors, schedule and step, or all raise
start       launch the first windows
finish      carry all of them through and write them back (see ``pipeline``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from loosestep.binding import Header, Progress, Statement, agree, state
from loosestep.checks import check_seconds
from loosestep.finite import first_nonfinite, not_finite, policy_of, ranks_without
from loosestep.flat import OWN_WINDOW_BYTES, WINDOW_BYTES, windows
from loosestep.groups import own_subgroup, private_twin, require_process_group, world_group
from loosestep.peers import Peers, Phase, peers_of
from loosestep.pipeline import Averaging, Direct, Job, Sender, jobs_of
from loosestep.policies import Parts, compressible, only_exact
from loosestep.references import Differences, References, remember
from loosestep.replicas import fingerprints
from loosestep.tensors import (
    Holders,
    Named,
    check_averageable,
    holders_of,
    memory,
    shard_key,
    unique,
)
from loosestep.topology import check_weights
from loosestep.wire import Mean, Reducer, Traffic, check_reducer, leaves_apart, links
from loosestep.wire.division import whole_name
from loosestep.wire.native import First
from loosestep.work import Work


@torch.no_grad()
def average_(
    tensors: Iterable[torch.Tensor] | Sequence[Named],
    group: dist.ProcessGroup | None = None,
    *,
    reducer: Reducer | None = None,
    weights: Sequence[float] | None = None,
    timeout: float | None = None,
) -> Traffic:
    """Replace every tensor by its mean over the ranks of ``group`` (default: the world), in place.

    ``weights`` gives one number a rank of the group, ``timeout`` seconds for every wait. A call
    has no memory, so a lossy ``reducer`` compresses the values themselves, not how far they moved
    since the last sync, as averagers that live longer do: of a model's parameters little is left
    at four bits.

    Example::

        average_(model.parameters())
        average_(ema.values(), group, reducer=Cast(torch.bfloat16))
    """
    require_process_group()
    check_seconds("timeout", timeout)
    named = unique(with_names(tensors))
    process_group = private_twin(world_group(), timeout) if group is None else group
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only members may average")
    ranks = tuple(dist.get_process_group_ranks(process_group))
    checked = check_weights(weights, ranks)
    chosen = None if checked is None else tuple(checked.values())
    peers = peers_of(process_group, weights=chosen, timeout=timeout)
    return Averager(peers, reducer=reducer).average(named)


def with_names(tensors: Iterable[torch.Tensor] | Sequence[Named]) -> list[Named]:
    """Give every tensor that has no name its place as one."""
    return [
        item if isinstance(item, tuple) else (f"tensor {index}", item)
        for index, item in enumerate(tensors)
    ]


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed to average."""

    parts: list[Named]  # this rank's memory, ties once
    counters: tuple[Named, ...]
    shard_keys: dict[str, str]
    headers: list[Header]
    step: int
    skipped: tuple[int, ...] = ()  # global ranks that have no say, since theirs is not finite


class Averager:
    """Averages tensors over one group, as often as asked.

    ``agreements`` are further lines that must be equal on all ranks, such as the schedule.
    ``subset`` makes the peers for some of the ranks; sharded tensors need it. With ``references``
    a lossy reducer is given differences to the last sync's result, and costs a copy of it.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        reducer: Reducer | None = None,
        agreements: Sequence[str] = (),
        subset: Callable[[tuple[int, ...]], Peers] | None = None,
        window_bytes: int = WINDOW_BYTES,
        references: References | None = None,
    ) -> None:
        self.peers = peers
        self._window_bytes = window_bytes
        if reducer is not None:
            check_reducer("reducer", reducer)
        self.reducer: Reducer = Mean() if reducer is None else reducer
        if leaves_apart(self.reducer) and references is None:
            raise ValueError(
                f"{self.reducer} sends differences to what all replicas had after the last sync, "
                "and here is nobody who remembers it; use an averager or attach, or Int8() here"
            )
        self._agreements = (*agreements, f"reducer {self.reducer!r}", f"weights {peers.weights}")
        self._subset = subset or (lambda ranks: _own_peers(peers, ranks))
        self._shards: dict[str, tuple[Holders, Peers]] = {}
        self._bound = False  # whether the reducer has seen the tensors
        self.work = Work(self.reducer, peers)
        self._references = references if is_lossy(self.reducer) else None
        self._policy = policy_of(self.reducer) if is_lossy(self.reducer) else ""

    @property
    def only_finite(self) -> bool:
        """Whether infinities and NaN are refused, in all but what always travels exactly."""
        return self._policy == "RAISE"

    def agree(
        self,
        named: Sequence[Named],
        counters: Sequence[Named] = (),
        progress: Progress | None = None,
    ) -> Agreed:
        """Compare what the ranks are about to average; all return or all raise.

        A rank whose tensors cannot be averaged says so to the others before it raises.
        """
        at = Progress() if progress is None else progress
        refusal: ValueError | TypeError | None = None
        parts: list[Named] = []
        bad, sample = "", b""
        try:
            check_averageable(named)
            self._check_device(named[0][1].device)
            parts = memory(named)
            statement = state([*_originals(parts, named), *counters], *self._lines())
            bad = first_nonfinite(self._looked_at(named)) if self._policy else ""
            sample = at.sample or self.work.sample(named, at.step)
        except (ValueError, TypeError) as error:
            refusal = error
            statement = Statement((*self._agreements, f"an error: {error}"))
        peers = self.peers.during(Phase("agreeing what to average", step=at.step))
        headers = agree(peers, statement, replace(at, finite=not bad, sample=sample))
        if refusal is not None:
            raise refusal
        skipped = self._skipped(headers, whole_name(bad))
        if self._bind(named):
            parts = memory(named)
        return Agreed(parts, tuple(counters), _shard_keys(named), headers, at.step, skipped)

    def _lines(self) -> tuple[str, ...]:
        """Return what must be equal on all ranks besides the tensors."""
        describe = getattr(self.reducer, "describe_kept", None)
        kept = "" if describe is None else describe(self.peers.level)
        return (*self._agreements, f"a reducer that keeps {kept}") if kept else self._agreements

    def _bind(self, named: Sequence[Named]) -> bool:
        """Show the tensors to the reducer once; return whether it may have moved them."""
        bind = getattr(self.reducer, "bind", None)
        if bind is None or self._bound:
            return False
        self._bound = True
        bind(named, self.peers)
        self.work.settle(named)
        return True

    def _looked_at(self, named: Sequence[Named]) -> list[Named]:
        """Return where infinities are looked for: in what this rank averages itself.

        Where ranks that have some are skipped, in all: those of a host must find the same.
        """
        skips = self._policy == "SKIP"
        return compressible(memory(named) if skips else self.work.mine(named))

    @torch.no_grad()
    def start(self, agreed: Agreed) -> Averaging:
        """Launch the mean of what was agreed, and the maximum of its counters."""
        return self._start(agreed, lambda: self.work.hand_round(agreed.parts, agreed.step))

    def _start(self, agreed: Agreed, afterwards: Callable[[], Traffic]) -> Averaging:
        self._check_shards(agreed)
        self.work.check(agreed.headers, agreed.parts, agreed.step)
        jobs, largest = self._jobs(agreed), (agreed.counters, self.peers)
        sender, step = self._sender(jobs), agreed.step
        return Averaging(jobs, sender, largest=largest, step=step, afterwards=afterwards)

    def average(
        self, named: Sequence[Named], counters: Sequence[Named] = (), *, step: int = 0
    ) -> Traffic:
        """Agree, start and finish."""
        return self.start(self.agree(named, counters, Progress(step))).finish()

    def average_parts(self, parts: Parts, progress: Progress) -> Traffic:
        """Agree, average, take the largest counters, and hand round what the first rank has."""
        agreed = self.agree(parts.means, parts.largest, progress)
        return self.follow_first(parts, self.start(agreed).finish())

    def average_share(self, parts: Parts, progress: Progress) -> Traffic:
        """Do the same, but leave what this host's other ranks average to ``work.hand_round``."""
        agreed = self.agree(parts.means, parts.largest, progress)
        return self.follow_first(parts, self._start(agreed, Traffic).finish())

    def follow_first(self, parts: Parts, traffic: Traffic) -> Traffic:
        """Hand round what the first rank has, if that is asked for, and count it."""
        if parts.firsts is not None:
            traffic.add(self.broadcast(parts.firsts))
        return traffic

    @torch.no_grad()
    def broadcast(self, named: Sequence[Named]) -> Traffic:
        """Give every rank the first rank's values, in place; any dtype will do."""
        agreed = self._agree_on(named, "agreeing what to broadcast")
        jobs: list[Job] = []
        for key, group in _by_shard(agreed).items():
            _, peers = self._shard(key)
            jobs += jobs_of(windows(group, self._window_size(peers)), peers, key)
        return Averaging(jobs, Direct(First())).finish()

    @torch.no_grad()
    def prepare(self, named: Sequence[Named], *, common: bool) -> None:
        """Make the process groups that tensors and reducer need; all ranks must call this.

        ``common``: all ranks hold the same values, from which differences are then taken.
        """
        self._bind(named)
        jobs = self._jobs(Agreed(memory(named), (), _shard_keys(named), [], 0))
        if common and self._references is not None:
            remember(self._references, jobs)

    @torch.no_grad()
    def compare(self, named: Sequence[Named]) -> None:
        """Raise ``RankMismatch`` on every rank unless all hold the same values."""
        phase = Phase("comparing replicas")
        for key, group in _by_shard(self._agree_on(named, "agreeing what to compare")).items():
            _, peers = self._shard(key)
            agree(peers.during(phase), Statement(tuple(fingerprints(group))))

    def _agree_on(self, named: Sequence[Named], verb: str) -> Agreed:
        """Compare names, shapes and dtypes, whatever they are."""
        parts = memory(named)
        statement = state(_originals(parts, named), *self._agreements)
        headers = agree(self.peers.during(Phase(verb)), statement)
        return Agreed(parts, (), _shard_keys(named), headers, 0)

    def _check_device(self, device: torch.device) -> None:
        if self.peers.size > 1 and self.peers.device_for(device) != device:
            raise ValueError(
                f"the process group cannot move tensors on {device}; give one whose backend can, "
                "such as init_process_group('cpu:gloo,cuda:nccl')"
            )

    def _check_shards(self, agreed: Agreed) -> None:
        for key in _by_shard(agreed):
            holders, _ = self._shard(key)
            if key and not holders.can_average:
                raise ValueError(
                    f"level {self.peers.level!r} (ranks {list(self.peers.global_ranks)}) must hold "
                    f"every shard on several ranks, got {holders.by_shard}; a level inside the "
                    "shard mesh cannot average: choose one that spans whole meshes"
                )

    def _jobs(self, agreed: Agreed) -> list[Job]:
        jobs: list[Job] = []
        for key, group in _by_shard(agreed).items():
            peers = replace(self._shard(key)[1].muted(agreed.skipped), checked=True)
            jobs += self._jobs_of_shard(key, group, peers)
        return jobs

    def _jobs_of_shard(self, key: str, group: list[Named], peers: Peers) -> list[Job]:
        lossy, size = is_lossy(self.reducer), self._window_size(peers)
        division = self.work.among(peers)
        if division is None and not lossy:
            return jobs_of(windows(group, size), peers, key)
        by = Mean() if lossy or division is None else division.undivided
        exact = jobs_of(windows(only_exact(group), size), peers, key, by=by)
        rest = compressible(group)
        if division is None:
            self.work.check_replicas(peers)
        else:
            rest, peers = division.share(rest), division.across
            size = self._window_size(peers)
        # Differences are copies in any case, so large pieces may share a window too.
        own = size if lossy else OWN_WINDOW_BYTES
        return [*jobs_of(windows(rest, size, own), peers, key), *exact]

    def _window_size(self, peers: Peers) -> int:
        return min(self._window_bytes, links.window_bytes(peers))

    def _sender(self, jobs: Sequence[Job]) -> Sender:
        division = self.work.division
        reducer = self.reducer if division is None else division.reducer
        if self._references is None:
            return Direct(reducer)
        self._references.follow(jobs)
        return Differences(reducer, self._references)

    def _skipped(self, headers: Sequence[Header], bad: str) -> tuple[int, ...]:
        """Return the ranks that have no say in this sync; raise on all ranks if that cannot be."""
        ranks = ranks_without(self.peers, headers)
        if ranks and (self._policy != "SKIP" or len(ranks) == self.peers.size):
            raise not_finite(self.peers.during(Phase("telling what is not finite")), bad)
        return ranks

    def _shard(self, key: str) -> tuple[Holders, Peers]:
        """Return who of this group holds the same shard; the first call is collective."""
        if key == "":
            whole = self.peers.global_ranks
            return Holders({"": whole}, whole), self.peers
        if key not in self._shards:
            holders = holders_of(self.peers, key)
            self._shards[key] = (holders, self._subset(holders.mine))
        return self._shards[key]


def is_lossy(reducer: Reducer) -> bool:
    """Say whether a reducer drops something, so that it needs differences to work on."""
    return bool(getattr(reducer, "lossy", False))


def _shard_keys(named: Sequence[Named]) -> dict[str, str]:
    return {name: shard_key(tensor) for name, tensor in named}


def _by_shard(agreed: Agreed) -> dict[str, list[Named]]:
    """Group the parts by the shard that this rank holds of them; empty parts count."""
    groups: dict[str, list[Named]] = {}
    for name, local in agreed.parts:
        groups.setdefault(agreed.shard_keys[name], []).append((name, local))
    return groups


def _originals(parts: Sequence[Named], named: Sequence[Named]) -> list[Named]:
    """Return the tensors that ``parts`` are the memory of: their shape is the global one."""
    kept = {name for name, _ in parts}
    return [(name, tensor) for name, tensor in named if name in kept]


def _own_peers(peers: Peers, ranks: tuple[int, ...]) -> Peers:
    """Return the peers among ``ranks``, with a process group made for them once."""
    me = peers.global_ranks[peers.group_rank]
    weights = peers.weights
    if weights is not None:
        weights = tuple(weights[peers.global_ranks.index(rank)] for rank in ranks)
    group = own_subgroup(peers.process_group, ranks, peers.timeout)
    return Peers(group, ranks, ranks.index(me), peers.level, weights, peers.timeout)
