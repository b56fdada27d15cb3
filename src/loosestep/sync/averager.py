"""Averaging named tensors in place: agree with the other ranks, cut into windows, send them.

agree       all ranks mean the same tensors, schedule and step, or all raise
start       launch the first windows
finish      carry all of them through and write them back (see ``pipeline``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from loosestep.comm.agreement import Header, Progress, Statement, agree, state
from loosestep.comm.fingerprints import fingerprints
from loosestep.comm.flat.rows import whole_name
from loosestep.comm.flat.windows import WINDOW_BYTES
from loosestep.comm.group import Group, peers_of, require_process_group, world_group
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import Mean, NonFinite, Reducer, check_reducer
from loosestep.comm.reducers.backend import First
from loosestep.comm.reducers.division import Division, sampled
from loosestep.comm.reducers.reducer import check_suits_parameters, compresses, policy_of
from loosestep.comm.sharded_types import is_dtensor
from loosestep.comm.tensors import Named, memory, shard_key, unique
from loosestep.errors import check_instance, check_seconds
from loosestep.strategy.gate import Gate
from loosestep.strategy.topology import check_weights
from loosestep.sync.bound import Binder, Bound, by_shard
from loosestep.sync.differences import Differences, remember
from loosestep.sync.finite import Batch, batches, first_nonfinite, not_finite, whole_replicas
from loosestep.sync.jobs import NO_FACTORS, Cutter, Job
from loosestep.sync.kept import Kept
from loosestep.sync.outer_steps import OuterState
from loosestep.sync.parts import Parts, compressible, only_exact
from loosestep.sync.pipeline import Averaging, Direct, Sender
from loosestep.telemetry.traffic import Traffic


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
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only members may average")
    chosen = Group.of(world_group()).twin(timeout) if group is None else Group.of(group)
    checked = check_weights(weights, chosen.ranks)
    by_rank = None if checked is None else tuple(checked.values())
    peers = peers_of(chosen, weights=by_rank, timeout=timeout)
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

    bound: Bound
    headers: list[Header]
    step: int
    firsts: list[Named] | None = None  # take the first rank's values afterwards; None: nothing does
    # Factors of the weights of some global ranks: 0 where theirs is not finite, or an outlier.
    say: Mapping[int, float] = field(default_factory=dict)

    @property
    def left_out(self) -> tuple[int, ...]:
        """The global ranks that have no say."""
        return tuple(rank for rank, factor in self.say.items() if factor == 0.0)

    def only(self, wanted: Callable[[str], bool]) -> Agreed:
        """Return the same, of some tensors by name."""
        parts = [(name, tensor) for name, tensor in self.bound.parts if wanted(name)]
        return replace(self, bound=replace(self.bound, parts=parts))


class Averager:
    """Averages tensors over one group, as often as asked.

    ``agreements`` are further lines that must be equal on all ranks, such as the schedule.
    What is remembered from sync to sync is in ``kept``; a lossy reducer is then given differences
    to the last sync's result, as a rule, and costs a copy of it.
    ``on_nonfinite`` is for infinities and NaN in what is neither a buffer nor optimizer state.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        reducer: Reducer | None = None,
        agreements: Sequence[str] = (),
        window_bytes: int = WINDOW_BYTES,
        kept: Kept | None = None,
        on_nonfinite: NonFinite = NonFinite.PASS,
        binder: Binder | None = None,
    ) -> None:
        check_instance("peers", peers, Peers, "a level's, such as topology.peers('host')")
        self.peers = peers
        if reducer is not None:
            check_reducer("reducer", reducer)
        self.reducer: Reducer = Mean() if reducer is None else reducer
        check_suits_parameters(self.reducer)
        if self.reducer.leaves_apart and kept is None:
            raise ValueError(
                f"{self.reducer} goes by what is remembered from sync to sync, and here is nobody "
                "who remembers it; use an averager or attach, or Int8() here"
            )
        self._policy = policy_of(self.reducer, on_nonfinite)
        self._encodes = compresses(self.reducer)
        own = (f"reducer {self.reducer!r}", f"weights {peers.weights}", str(self._policy))
        self._agreements = (*agreements, *own)
        self._cutter = Cutter(peers, self.reducer, window_bytes)
        self._binder = Binder() if binder is None else binder
        self._introduced = False  # whether the reducer has seen the tensors
        self._bound: Bound | None = None  # what was averaged last,
        self._cut: list[Job] | None = None  # in which windows,
        self._looked_at: list[Batch] | None = None  # where infinities are looked for,
        self._direct: Direct | None = None  # and how it was sent
        # How the ranks of a host divide what they have in common; None: each averages all of it.
        self._division: Division | None = None
        self._kept = Kept() if kept is None else kept
        self._sends_differences = self.reducer.sends_differences and kept is not None

    @property
    def name(self) -> str:
        """What it averages: a level, a fragment there, or shards that cross it."""
        return self.peers.level

    def guess(self, named: Sequence[Named]) -> None:
        """Let values take what the outer optimizer would make of them, were they the mean."""
        if self._kept.outer is not None:
            self._kept.outer.guess(compressible(named))

    @property
    def only_finite(self) -> bool:
        """Whether infinities and NaN are refused, in all but what always travels exactly."""
        return self._policy is NonFinite.RAISE

    @property
    def steps_outer(self) -> bool:
        """Whether the mean goes through an outer optimizer before it is anybody's parameters."""
        return self._kept.outer is not None

    def agree(self, parts: Parts, progress: Progress | None = None, *, look: bool = True) -> Agreed:
        """Compare what the ranks are about to average; all return or all raise.

        A rank whose tensors cannot be averaged says so to the others before it raises. Without
        ``look`` values do not matter: nothing is averaged yet.
        """
        at = Progress() if progress is None else progress
        refusal: ValueError | TypeError | None = None
        bad, sample, norm, outlier = "", b"", 0.0, False
        gate = self._kept.gate if look else None
        try:
            bound = self._bind(parts)
            statement = bound.statement(self._lines())
            bad = self._first_nonfinite(bound) if look else ""
            sample = at.sample or self.sample(bound.parts, at.step)
            if gate is not None:
                norm = self._outer.distance(compressible(bound.parts))
                outlier = gate.is_outlier(norm)
        except (ValueError, TypeError) as error:
            refusal = error
            statement = Statement((*self._agreements, f"an error: {error}"))
        peers = self.peers.during(Phase("agreeing what to average", step=at.step))
        finite = at.finite and not bad
        told = replace(at, finite=finite, sample=sample, norm=norm, outlier=outlier)
        headers = agree(peers, statement, told)
        if refusal is not None:
            raise refusal
        skipped = () if all(h.finite for h in headers) else self._skipped(headers, bad, parts.means)
        say: Mapping[int, float] = dict.fromkeys(skipped, 0.0)
        if gate is not None:
            say = self._gated(headers, skipped, gate.rule)
        if self._introduce(parts.means):
            bound = self._bind(parts)  # the reducer may have moved them
        return Agreed(bound, headers, at.step, parts.firsts, say)

    def take_over(self, agreed: Agreed, parts: Parts) -> Agreed:
        """Return what a wider group has agreed to average, for those here and these tensors."""
        return replace(agreed, bound=self._bind(parts), firsts=parts.firsts)

    def _bind(self, parts: Parts) -> Bound:
        """Return what was made for these tensors before, or make it."""
        bound = self._binder.bind(parts)
        if bound is not self._bound:
            if parts.means:
                self._check_device(parts.means[0][1].device)
            self._bound = bound
            self._cut = self._looked_at = self._direct = None
        return bound

    def _lines(self) -> tuple[str, ...]:
        """Return what must be equal on all ranks besides the tensors."""
        kept = self._kept.describe(self.reducer)
        return (*self._agreements, f"a reducer that keeps {kept}") if kept else self._agreements

    def _introduce(self, named: Sequence[Named]) -> bool:
        """Show the tensors to the reducer at the first call; return whether this was it."""
        if self._introduced:
            return False
        self._introduced = True
        self._kept.begin(self.reducer.init(named, self.peers))
        if not any(shard_key(tensor) for _, tensor in named):  # shards differ inside a host
            self._division = self.reducer.divide(self.peers)
            if self._division is not None and named:
                self._division.prepare(named[0][1].device)
        self._cut = self._looked_at = self._direct = None  # how it is divided is known only now
        return True

    def _first_nonfinite(self, bound: Bound) -> str:
        """Return where the first infinity or NaN is, in what this rank averages itself.

        Where ranks that have some are skipped, in all: those of a host must find the same.
        """
        if self._policy is NonFinite.PASS or self.peers.size == 1:
            return ""
        if self._looked_at is None:
            skips = self._policy is NonFinite.SKIP
            looked_at = bound.parts if skips else self.share(bound.parts)
            self._looked_at = batches(compressible(looked_at))
        return first_nonfinite(self._looked_at, encoded=self._encodes)

    @torch.no_grad()
    def start(self, agreed: Agreed, *, hand_round: bool = True) -> Averaging:
        """Launch the mean of what was agreed, and the maximum of its counters.

        Without ``hand_round`` that is left to the caller: what this host's other ranks average.
        """
        if self._division is not None:
            self._check_hosts(agreed)
        gate, me = self._kept.gate, self.peers.group_rank
        if gate is not None and self.peers.global_ranks[me] not in agreed.left_out:
            share = gate.rule.share(agreed.headers[me].norm)
            self._outer.shrink(compressible(agreed.bound.parts), share)
        jobs = self._jobs(agreed)

        def afterwards() -> Traffic:
            traffic = Traffic()
            if hand_round:
                traffic.add(self.hand_round(agreed.bound.parts, agreed.step))
            if self._kept.outer is not None:
                self._kept.outer.apply(compressible(agreed.bound.parts))
            if gate is not None:
                gate.learn(agreed.headers[me].norm)
            if agreed.firsts is not None:
                traffic.add(self.broadcast(agreed.firsts, agreed.say))
            return traffic

        largest = (agreed.bound.counters, self.peers)
        sender, step = self._sender(jobs), agreed.step
        moved = self._kept.outer is not None
        return Averaging(
            jobs, sender, largest=largest, step=step, afterwards=afterwards, moved=moved
        )

    def average(
        self, named: Sequence[Named], counters: Sequence[Named] = (), *, step: int = 0
    ) -> Traffic:
        """Agree, start and finish."""
        return self.average_parts(Parts(list(named), list(counters)), Progress(step))

    def average_parts(self, parts: Parts, progress: Progress) -> Traffic:
        """Do the same, and hand round what the first rank has of the rest."""
        return self.start(self.agree(parts, progress)).finish()

    def share(self, parts: list[Named]) -> list[Named]:
        """Return what of this rank's memory it averages itself.

        Divided are parameters, which the ranks of a host have in common, and not buffers.
        """
        if self._division is None:
            return parts
        return [*self._division.share(compressible(parts)), *only_exact(parts)]

    def hand_round(self, parts: Sequence[Named], step: int) -> Traffic:
        """Take from this host's other ranks what they have averaged; collective there."""
        if self._division is None:
            return Traffic()
        return self._division.hand_round(compressible(parts), step)

    def held_by_several(self, named: Sequence[Named]) -> list[Named]:
        """Return what is no shard that one rank alone holds; collective where there are shards."""
        keys = [shard_key(tensor) for _, tensor in named]
        several = {
            key: not key or self._cutter.shard(key)[0].can_average for key in {}.fromkeys(keys)
        }
        return [pair for pair, key in zip(named, keys, strict=True) if several[key]]

    def sample(self, parts: Sequence[Named], step: int) -> bytes:
        """Return a mark of some values, by which ranks that should hold the same can tell."""
        return b"" if self._division is None else sampled(compressible(parts), step)

    @torch.no_grad()
    def broadcast(self, named: Sequence[Named], say: Mapping[int, float] = NO_FACTORS) -> Traffic:
        """Give every rank the values of the first that has a say; any dtype will do."""
        parts, keys = self._agree_on(named, "agreeing what to broadcast")
        return Averaging(self._cutter.cut_exact(parts, keys, say), Direct(First())).finish()

    @torch.no_grad()
    def prepare(self, named: Sequence[Named], *, common: bool) -> None:
        """Make the process groups that tensors and reducer need; all ranks must call this.

        ``common``: all ranks hold the same values, from which differences are then taken.
        """
        self._introduce(named)
        jobs = self._jobs(Agreed(self._bind(Parts(list(named))), [], 0))
        if common and self._sends_differences:
            remember(self._kept.references, jobs)
        if common and self._kept.outer is not None:
            self._kept.outer.anchor(compressible(memory(named)))

    @torch.no_grad()
    def compare(self, named: Sequence[Named]) -> None:
        """Raise ``RankMismatch`` on every rank unless all hold the same values."""
        phase = Phase("comparing replicas")
        parts, keys = self._agree_on(named, "agreeing what to compare")
        for key, group in by_shard(parts, keys).items():
            _, peers = self._cutter.shard(key)
            agree(peers.during(phase), Statement(tuple(fingerprints(group))))

    def _agree_on(self, named: Sequence[Named], verb: str) -> tuple[list[Named], dict[str, str]]:
        """Compare names, shapes and dtypes, whatever they are; return memory and shard keys."""
        parts = memory(named)
        kept = {name for name, _ in parts}
        told = state([(name, t) for name, t in named if name in kept], *self._agreements)
        agree(self.peers.during(Phase(verb)), told)
        return parts, {name: shard_key(t) for name, t in named if is_dtensor(t)}

    def _check_device(self, device: torch.device) -> None:
        if self.peers.size > 1 and self.peers.device_for(device) != device:
            raise ValueError(
                f"the process group cannot move tensors on {device}; give one whose backend can, "
                "such as init_process_group('cpu:gloo,cuda:nccl')"
            )

    def _check_hosts(self, agreed: Agreed) -> None:
        """Raise on all ranks if those of a host do not hold the same; headers have samples."""
        assert self._division is not None
        headers = agreed.headers
        if not any(header.sample.strip(b"\0") for header in headers):  # nobody knew of hosts yet
            phase = Phase("comparing the ranks of hosts", step=agreed.step)
            told = Progress(agreed.step, sample=self.sample(agreed.bound.parts, agreed.step))
            headers = agree(self.peers.during(phase), Statement(()), told)
        self._division.check(self.peers, headers)

    def _jobs(self, agreed: Agreed) -> list[Job]:
        """Return the windows of what was agreed: cut once, but where some of it is left out."""
        usual = agreed.bound is self._bound and not agreed.say
        if usual and self._cut is not None:
            return self._cut
        divided = self._division is not None
        bound = agreed.bound
        jobs = self._cutter.cut(bound.parts, bound.shard_keys, say=agreed.say, divided=divided)
        if usual:
            self._cut = jobs
        return jobs

    @property
    def _outer(self) -> OuterState:
        """The outer optimizer, whose anchors a gate measures from."""
        assert self._kept.outer is not None, "checked when the strategy was made"
        return self._kept.outer

    def _gated(
        self, headers: Sequence[Header], skipped: Sequence[int], rule: Gate
    ) -> Mapping[int, float]:
        """Return by which factors ranks count, the same on all; what is not finite never does."""
        ranks = self.peers.global_ranks
        out = [h.outlier or rank in skipped for rank, h in zip(ranks, headers, strict=True)]
        if all(out):  # then outliers are no worse than the rest
            out = [rank in skipped for rank in ranks]
        factors = zip(ranks, rule.say([header.norm for header in headers], out), strict=True)
        return {rank: factor for rank, factor in factors if factor != 1.0}

    def _sender(self, jobs: Sequence[Job]) -> Sender:
        reducer = self.reducer if self._division is None else self._division.reducer
        if not self._sends_differences:
            if self._direct is None or jobs is not self._cut:
                self._direct = Direct(reducer, self._kept.state)
            return self._direct
        self._kept.references.follow(jobs)
        return Differences(reducer, self._kept.references, self._kept.state)

    def _skipped(
        self, headers: Sequence[Header], bad: str, named: Sequence[Named]
    ) -> tuple[int, ...]:
        """Return the ranks that have no say in this sync; raise on all ranks if that cannot be."""
        pairs = zip(self.peers.global_ranks, headers, strict=True)
        ranks = tuple(rank for rank, header in pairs if not header.finite)
        peers = self.peers.during(Phase("telling what is not finite"))
        if self._policy is NonFinite.SKIP:
            ranks = whole_replicas(peers, ranks, named)
            if len(ranks) < self.peers.size:
                return ranks
        raise not_finite(peers, whole_name(bad), self.reducer)
