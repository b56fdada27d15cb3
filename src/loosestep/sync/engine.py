"""The engine that averages what takes part, when it is due: at once, or beside training.

    follow    a step is finished: land what is due to land, then sync the level that is due
    sync      agree, launch, commit; or copy what takes part, and let that travel (see ``overlap``)
    commit    wait for the mean, which is written back in place, and only then believe it
    land      wait for a mean under way and add what it differs by
    finalize  average once more at the end, over the widest level

``attach`` and the drop-in averagers are two doors to it. They say what takes part (a replica), who
averages on a level, and when; nothing of an average is decided there.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loosestep.comm.agreement import Progress, all_clean
from loosestep.comm.fingerprints import fingerprint
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import NonFinite, Reducer
from loosestep.comm.tensors import Named, memory, shard_key
from loosestep.errors import RankMismatch
from loosestep.strategy.arrivals import Arrival, Delta
from loosestep.strategy.clock import Clock
from loosestep.strategy.fragments import Fragments
from loosestep.strategy.gate import Gate
from loosestep.strategy.gossip import Gossip
from loosestep.strategy.outer_rules import Outer
from loosestep.strategy.policies import Initial
from loosestep.strategy.timetable import Timetable
from loosestep.sync.averager import Agreed, Averager
from loosestep.sync.bound import Binder
from loosestep.sync.gossiping import Gossiping
from loosestep.sync.kept import Kept, load_into, state_of
from loosestep.sync.observing import Numbers, Observer
from loosestep.sync.overlap import Overlap
from loosestep.sync.parts import (
    FRAGMENT,
    Parts,
    compressible,
    level_of,
    parameter_of,
    split_floats,
)
from loosestep.sync.replica import Average, Replica
from loosestep.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine averages; the part of a strategy that it reads."""

    reducer: Reducer
    on_nonfinite: NonFinite = NonFinite.RAISE
    outer: Mapping[str, Outer] = field(default_factory=dict)  # by level; none: the mean itself
    gate: Gate | None = None  # who has a say on the widest level; None: everybody
    gossip: Gossip | None = None  # with one peer at a time; None: with all of the level
    fragments: Fragments | None = None  # what averages at once; None: all that takes part
    overlap_steps: int = 0  # from a launch to applying it; 0: a sync is done at once
    arrival: Arrival = field(default_factory=Delta)  # what becomes of parameters then
    agreements: Callable[[], Sequence[str]]  # lines that ranks must have in common: a schedule, say


class Engine:
    """Averages a replica over the levels of ``levels``, named from narrow to wide.

    ``peers`` says who averages on a level. With ``timetable`` a rank that has finished answers the
    syncs of those that still train; without, all must finish after the same step. ``observer`` is
    asked for what the timetable wants to hear.
    """

    def __init__(
        self,
        replica: Replica,
        levels: Sequence[str],
        peers: Callable[[str], Peers],
        settings: Settings,
        clock: Clock,
        telemetry: Telemetry,
        timetable: Timetable | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.replica, self.levels, self._peers = replica, levels, peers
        self._settings, self._timetable, self._observer = settings, timetable, observer
        self._clock, self._telemetry = clock, telemetry
        self._leaves_apart = settings.reducer.leaves_apart  # replicas, by what could not be sent
        self._averagers: dict[str, Averager] = {}
        # By fragment and by whether it is of shards: all levels average the same tensors.
        self._binders: dict[tuple[str, bool], Binder] = defaultdict(Binder)
        self._kept: dict[str, Kept] = {}  # by averager
        self._num_syncs: Counter[str] = Counter()  # likewise
        self._pairs: Gossiping | None = None
        if settings.gossip is not None:
            self._pairs = Gossiping(settings.gossip, self._keep(self.widest).slow)
        self._fragment_of = _fragment_of(replica, settings.fragments)  # by a parameter's name
        num = 1 + max(self._fragment_of.values(), default=0)
        self._fragments: Sequence[int | None] = range(num) if num > 1 else [None]
        self._overlap = Overlap(settings.overlap_steps, settings.arrival, len(self._fragments))
        self._last_step = 0  # that was followed
        self._synced_step = -1  # after which the widest level averaged last; -1: not yet
        self._common_step = 0  # every replica has all replicas' steps up to this one
        self._inside_averaged = False
        self._begins = 0 if timetable is None else timetable.begins
        self._start_is_common = False

    @property
    def widest(self) -> str:
        """The level that averages at the end."""
        return self.levels[-1]

    @property
    def nbytes(self) -> int:
        """How much memory averages keep beside the model."""
        return self._overlap.nbytes + sum(held.nbytes for held in self._kept.values())

    @property
    def local_steps(self) -> int:
        """How many steps are only in this rank's own replica; 0: all replicas are equal."""
        return 0 if self._inside_averaged else self._clock.step - self._common_step

    def begin(self, level: str, initial: Initial = Initial.IGNORE, *, prepare: bool = True) -> None:
        """Compare over ``level`` what the ranks have, and start from one point.

        With ``prepare`` what averages need is made now, on this thread and before the first.
        """
        averager, weights = self.averager(level), self.replica.weights()
        averager.agree(weights, Progress(self._clock.step), look=False)
        if initial is Initial.BROADCAST:
            averager.broadcast(self.replica.everything())
        elif initial is Initial.REFUSE:
            averager.compare(self.replica.everything())
        self._start_is_common = initial is not Initial.IGNORE
        if prepare:
            self._prepare(common=self._start_is_common)

    def _prepare(self, *, common: bool) -> None:
        """Make what averages need; where replicas have ``common`` values, those go into it."""
        remembers = self._settings.reducer.lossy or self._settings.outer or self._overlap.steps
        remembers = remembers or self._pairs is not None
        weights = self.replica.weights()
        for name in self.levels if remembers else ():
            for fragment in self._fragments:
                by, parts = self.averager(name, fragment=fragment), self._only(weights, fragment)
                self.replica.prepare(parts, by, self.averager, common=common)
                if self._pairs is not None:
                    self._pairs.prepare(by.peers, parts, common=common)
                if self._overlap.steps and name == self.widest:
                    self._overlap.prepare(self.replica.shares(parts, by, self.averager))

    # What happens after a step.

    def lands(self, step: int) -> bool:
        """Say whether an average under way is to be applied after ``step`` steps."""
        return self._overlap.is_due(step)

    def follow(
        self, level: str | None, step: int, *, fragment: int | None = None, local: bool = True
    ) -> None:
        """Average over ``level``, which is due now that ``step`` steps are finished.

        Only a ``fragment`` of the parameters, if one is given. ``local``: gradients of this step
        were not shared by all.
        """
        self._last_step = step
        if not local and self._common_step == step - 1:
            self._common_step = step
            # A warm-up was no part of what averages are about, where it has left all equal.
            if self._start_is_common and step == self._begins and self._all_hold_the_same(step):
                self._prepare(common=True)
        # What is under way comes first, however close the next one is.
        while self._overlap.flights and (
            self.lands(step) or (level is not None and self._overlap.is_full)
        ):
            self.land()
        if level is not None:
            self.sync(level, step, fragment)

    def _all_hold_the_same(self, step: int) -> bool:
        """Say whether all replicas have equal parameters; shards, which differ, are not asked."""
        parts = self.replica.weights()
        trained = compressible(memory(parts.means))
        sharded = any(shard_key(tensor) for _, tensor in parts.means)
        told = Progress(step, clean=b"shards" if sharded else fingerprint(trained))
        return all_clean(self.averager(self.widest).agree(parts, told, look=False).headers)

    def sync(self, level: str, step: int, fragment: int | None = None) -> None:
        """Average what takes part over ``level``: now, or beside training from now on."""
        began, averager = time.perf_counter(), self.averager(level, fragment=fragment)
        parts = self._parts(averager, fragment)
        observed = self._observe(parts, step)
        if self._overlap.steps:  # the ranks agree there too
            shares = self.replica.shares(parts, averager, self.averager)
            self._overlap.launch(shares, step, averager.name, observed)
            return
        agreed = averager.agree(parts, Progress(step, observed=observed))
        average = self._launch(agreed, averager, parts)
        whole = fragment is None and not self._leaves_apart and self._pairs is None
        self.commit(average, averager, level, began, equal=whole, left_out=agreed.left_out)
        self._hear(step, [header.observed for header in agreed.headers])
        self._anchor_narrower(level, parts)

    def _launch(self, agreed: Agreed, averager: Averager, parts: Parts) -> Average:
        """Start the average of all that have agreed, or of this rank's pair."""
        if self._pairs is None:
            return self.replica.launch(agreed, averager, self.averager)
        turn = self._num_syncs[averager.name]
        return self._pairs.launch(agreed, parts, averager.peers, turn)

    def _observe(self, parts: Parts, step: int) -> Numbers:
        """Return what this rank tells the others before the sync that begins now."""
        if self._timetable is None or self._observer is None or not self._timetable.adaptive:
            return ()
        observed = self._observer.tell(parts.means, self._timetable.period(step))
        self._timetable.begun(step)
        return observed

    def _hear(self, step: int, told: Sequence[Numbers]) -> None:
        """Let the timetable know what all ranks told before the sync of ``step``."""
        if self._timetable is not None and self._observer is not None and any(told):
            self._timetable.hear(step, self._observer.reduce(told))

    def _parts(self, averager: Averager, fragment: int | None) -> Parts:
        """Return what takes part in the sync that comes now; all ranks there must ask together."""
        self.replica.sync = self._num_syncs[averager.name] + 1
        return self._only(self.replica.parts(averager.peers), fragment)

    def _only(self, parts: Parts, fragment: int | None) -> Parts:
        """Return a fragment's share: buffers, and parameters that came later, go with the last."""
        if fragment is None:
            return parts
        of, last = self._fragment_of, len(self._fragments) - 1
        return parts.only(lambda name: of.get(parameter_of(name), last) == fragment)

    def commit(
        self,
        average: Average,
        averager: Averager,
        name: str,
        began: float,
        *,
        equal: bool,
        left_out: Sequence[int] = (),
    ) -> None:
        """Let the mean come, and only then believe it.

        ``name`` is what telemetry calls it; ``equal``: all replicas are, afterwards; ``left_out``
        are the global ranks that have no say in it.
        """
        traffic = average.wait()  # PeerLost: what reducers remember is as it was before
        average.commit()  # residuals become valid with what they belong to
        self._num_syncs[averager.name] += 1
        self._telemetry.synced(self._clock.step, name, began, traffic, left_out)
        self._count_memory(name)
        self.replica.forget_state()
        widest = self.averager(self.widest).peers.global_ranks
        self._synced_step = -1
        if averager.peers.global_ranks == widest and equal:
            self._synced_step, self._common_step = self._last_step, self._clock.step

    def _count_memory(self, level: str) -> None:
        kept = [held.nbytes for name, held in self._kept.items() if level_of(name) == level]
        self._telemetry.kept(level, sum(kept) + self._overlap.nbytes)

    def _anchor_narrower(self, level: str, parts: Parts) -> None:
        """Let outer optimizers of narrower levels go on from where a wider average has led."""
        for narrow in self.levels[: self.levels.index(level)]:
            if (outer := self._keep(narrow).outer) is not None:
                outer.anchor(compressible(memory(parts.means)))

    def land(self) -> None:
        """Wait for the first average under way, if any is, and apply it."""
        if not self._overlap.flights:
            return
        flight = self._overlap.land(self.replica.by_name)
        self.replica.landed()
        self._hear(flight.step, flight.observed)
        seconds = {"seconds": flight.seconds, "seconds_waited": flight.seconds_waited}
        name, left_out = level_of(flight.level), flight.left_out
        self._telemetry.averaged(flight.step, name, flight.traffic, left_out=left_out, **seconds)
        self._count_memory(name)
        self.replica.forget_state()
        if flight.level == self.widest:
            self._common_step = max(self._common_step, flight.step)

    def arrive(self) -> None:
        """Wait for what is under way, if anything is; it is applied when it is due."""
        self._overlap.finish()

    # What happens at the end, and aside.

    def finalize(self, last_step: int, *, name: str | None = None) -> None:
        """Average the steps since the last sync over the widest level.

        ``last_step`` is the number by which the last step was, or would have been, followed. A
        schedule that averages nothing leaves to do what something other than steps has moved.
        """
        if self._timetable is not None and not self._timetable.averages:
            self._average_what_moved()
            return
        while self._overlap.flights:
            self.land()
        # Ranks that have ended at different steps would next ask for different fragments.
        settled = len(self._fragments) > 1 and self._synced_step == last_step >= 0
        self._last_step, step = last_step, self._clock.step
        if self._timetable is not None and not settled:
            comes_again = self._timetable.upcoming(step, self.widest) is not None
            while (upcoming := self._timetable.upcoming(step)) is not None:
                step, due = upcoming
                assert due.parameters is not None, "that is what was asked for"
                of_all = due.fragment is None and due.parameters == self.widest
                done = self._answer(due.parameters, step, due.fragment, once_more=not of_all)
                if done and of_all:
                    return
                if done and (due.fragment is not None or not comes_again):
                    break
        for fragment in self._fragments:
            self._answer(self.widest, step, fragment, name)
        self._synced_step, self._common_step = self._last_step, self._clock.step

    def _answer(
        self,
        level: str,
        step: int,
        fragment: int | None = None,
        name: str | None = None,
        *,
        once_more: bool = False,
    ) -> bool:
        """Average over ``level`` after the last step; return whether all its ranks are there.

        With a timetable some may still train, and need this rank's parameters. ``once_more``: the
        widest level averages all of it in the end.
        """
        began, averager = time.perf_counter(), self.averager(level, fragment=fragment)
        parts = self._parts(averager, fragment)
        observed = self._observe(parts, step)
        progress = Progress(step, final=self._timetable is not None, observed=observed)
        # More than steps changes replicas: other optimizers, a forward (BatchNorm), the user. So
        # where no step was taken since the last sync, ranks compare what they hold now.
        if self._synced_step == self._last_step >= 0:
            progress = replace(progress, clean=fingerprint(parts.everything))
        agreed = averager.agree(parts, progress)
        done = self._timetable is None or all(header.final for header in agreed.headers)
        if done and (once_more or all_clean(agreed.headers)):
            return True
        average: Average
        apart = self._leaves_apart or self._pairs is not None
        if done and apart:  # the last word is exact, and everybody's
            exact, told = self._exact(), Progress(step, final=progress.final)
            slow = [] if self._pairs is None else self._pairs.state()
            everything = replace(parts, means=[*parts.means, *slow])
            average = exact.start(exact.agree(everything, told))
        else:
            average = self._launch(agreed, averager, parts)
        equal = fragment is None and (done or not apart)
        out = agreed.left_out
        self.commit(average, averager, name or level, began, equal=equal, left_out=out)
        self._hear(step, [header.observed for header in agreed.headers])
        self._anchor_narrower(level, parts)
        return done

    def _average_what_moved(self) -> None:
        """Average exactly where replicas differ although all steps have been all replicas'."""
        began, exact, step = time.perf_counter(), self._exact(), self._clock.step
        parts = self.replica.parts(exact.peers)
        parts = replace(parts, means=exact.held_by_several(parts.means))
        if not parts.means:
            return
        clean = Progress(step, final=True, clean=fingerprint(parts.everything))
        # Without a look: equal replicas are left as they are, infinite ones too.
        if all_clean(exact.agree(parts, clean, look=False).headers):
            return
        average = exact.start(exact.agree(parts, Progress(step, final=True)))
        self.commit(average, exact, self.widest, began, equal=True)

    def average_also(self, named: Sequence[Named]) -> None:
        """Average what is no part of the replica over the widest level; all ranks call it.

        Where some ranks have such tensors and others have none, all raise.
        """
        peers = self._peers(self.widest).during(Phase("agreeing what else to average"))
        told = peers.exchange_fixed(bytes([bool(named)]))
        if len(set(told)) > 1:
            without = [r for r, has in zip(peers.global_ranks, told, strict=True) if not any(has)]
            raise RankMismatch(
                f"all ranks must give finalize(also=...) the same tensors, and ranks {without} "
                "gave none; nothing of it was averaged"
            )
        if named:
            floats, counters = split_floats(named)
            self._exact().average_parts(Parts(floats, counters), Progress(self._clock.step))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average of all replicas inside the block; afterwards all is as before."""
        self._overlap.finish()  # the wire is needed
        kept = [(tensor, tensor.detach().clone()) for tensor in self.replica.touched()]
        try:
            self._average_weights(Progress(self._clock.step))
            self._inside_averaged = True
            yield
        finally:
            self._inside_averaged = False
            with torch.no_grad():
                for tensor, copy in kept:
                    tensor.copy_(copy)

    def _average_weights(self, progress: Progress) -> None:
        """Average over the widest level, without the optimizer's state.

        Lossy reducers, outer optimizers and pairs are left out: what they keep belongs to training.
        """
        weights = self.replica.weights()
        simple = not self._settings.reducer.lossy and not self._settings.outer
        if not simple or len(self._fragments) > 1 or self._pairs is not None:
            self._exact().average_parts(weights, progress)
            return
        averager = self.averager(self.widest)
        agreed = averager.agree(weights, progress)
        average = self.replica.launch(agreed, averager, self.averager, stateful=False)
        average.wait()
        average.commit()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what is under way, waiting for it, and what averages remember.

        Inside ``averaged`` nothing is: what comes would move equal replicas apart again.
        """
        overlap = Overlap(0) if self._inside_averaged else self._overlap
        return {
            "flights": overlap.state_dict(),  # first: what is under way changes the rest
            "kept": state_of(self._kept),
            "num_syncs": dict(self._num_syncs),
            "local_steps": self.local_steps,
            "synced_step": self._synced_step,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; what is under way now is dropped.

        The clock must have been loaded before.
        """
        self._overlap.load_state_dict(state_dict.get("flights", {}))
        load_into(self._kept, state_dict.get("kept", {}), self._keep)
        self._num_syncs = Counter(state_dict.get("num_syncs", {}))
        self._synced_step = state_dict.get("synced_step", -1)
        self._common_step = self._clock.step - state_dict.get("local_steps", 0)

    def forget_syncs(self) -> None:
        """Drop what is under way: the clock was set, and what was averaged says nothing now."""
        self._synced_step = -1
        self._overlap.discard()

    def close(self) -> None:
        """Drop what is under way and let go of the process groups."""
        self._overlap.close()
        self._averagers.clear()
        if self._pairs is not None:
            self._pairs.close()

    # Who averages.

    def averager(
        self,
        level: str,
        peers: Peers | None = None,
        reducer: Reducer | None = None,
        *,
        fragment: int | None = None,
    ) -> Averager:
        """Return what averages on a level; where it is not of the usual kind, with whom and how."""
        name = level if fragment is None else f"{level}{FRAGMENT}{fragment}"
        if name not in self._averagers:
            self._averagers[name] = Averager(
                replace(self._peers(level), level=name) if peers is None else peers,
                reducer=reducer or self._settings.reducer,
                agreements=self._settings.agreements(),
                kept=self._keep(name),
                on_nonfinite=self._settings.on_nonfinite,
                binder=self._binders[name.partition(FRAGMENT)[2], peers is not None],
            )
        return self._averagers[name]

    def _keep(self, name: str) -> Kept:
        """Return what averages on a level keep; those of shards go by the level they cross."""
        if name not in self._kept:
            level = level_of(name)
            gate = self._settings.gate if level == self.widest else None
            gossip = self._settings.gossip
            pair = None if gossip is None else gossip.step
            self._kept[name] = Kept(self._settings.outer.get(level), gate, pair)
        return self._kept[name]

    def _exact(self) -> Averager:
        """Return what averages on the widest level with an exact mean in place of the reducer."""
        return Averager(
            self.averager(self.widest).peers,
            reducer=self._settings.reducer.exact,
            agreements=self._settings.agreements(),
            on_nonfinite=self._settings.on_nonfinite,
            binder=self._binders["", False],
        )


def _fragment_of(replica: Replica, fragments: Fragments | None) -> dict[str, int]:
    """Return in which part the parameters are that are trained now, by name."""
    if fragments is None:
        return {}
    trained = compressible(replica.weights().means)
    split = fragments.split([(name, tensor.nbytes) for name, tensor in trained])
    return {name: number for number, names in enumerate(split) for name in names}
