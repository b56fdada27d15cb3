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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loosestep.comm.agreement import Progress, all_clean
from loosestep.comm.fingerprints import fingerprint
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import NonFinite, Reducer
from loosestep.comm.tensors import Named, memory
from loosestep.errors import RankMismatch
from loosestep.strategy.clock import Clock
from loosestep.strategy.outer_rules import Outer
from loosestep.strategy.policies import Initial
from loosestep.strategy.schedules import Schedule, next_sync
from loosestep.sync.averager import Averager
from loosestep.sync.bound import Binder
from loosestep.sync.kept import Kept, load_into, state_of
from loosestep.sync.overlap import Overlap
from loosestep.sync.parts import ACROSS, Parts, compressible, split_floats
from loosestep.sync.replica import Average, Replica
from loosestep.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine averages; the part of a strategy that it reads."""

    reducer: Reducer
    on_nonfinite: NonFinite = NonFinite.RAISE
    outer: Mapping[str, Outer] = field(default_factory=dict)  # by level; none: the mean itself
    overlap_steps: int = 0  # from a launch to applying it; 0: a sync is done at once
    agreements: Callable[[], Sequence[str]]  # lines that ranks must have in common: a schedule, say


class Engine:
    """Averages a replica over the levels of ``levels``, named from narrow to wide.

    ``peers`` says who averages on a level. With ``schedule`` a rank that has finished answers the
    syncs of those that still train; without, all must finish after the same step.
    """

    def __init__(
        self,
        replica: Replica,
        levels: Sequence[str],
        peers: Callable[[str], Peers],
        settings: Settings,
        clock: Clock,
        telemetry: Telemetry,
        schedule: Schedule | None = None,
    ) -> None:
        self.replica, self.levels, self._peers = replica, levels, peers
        self._settings, self._schedule = settings, schedule
        self._clock, self._telemetry = clock, telemetry
        self._leaves_apart = settings.reducer.leaves_apart  # replicas, by what could not be sent
        self._averagers: dict[str, Averager] = {}
        self._whole, self._shards = Binder(), Binder()  # all levels average the same tensors
        self._kept: dict[str, Kept] = {}  # by level
        self._num_syncs: Counter[str] = Counter()  # by level
        self._overlap = Overlap(settings.overlap_steps)
        self._last_step = 0  # that was followed
        self._synced_step = -1  # after which the widest level averaged last; -1: not yet
        self._common_step = 0  # every replica has all replicas' steps up to this one
        self._inside_averaged = False

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
        if prepare and (
            self._settings.reducer.lossy or self._settings.outer or self._overlap.steps
        ):
            common = initial is not Initial.IGNORE
            for name in self.levels:
                self.replica.prepare(self.averager(name), self.averager, common=common)
        if prepare and self._overlap.steps:
            self._overlap.prepare(self.averager(self.widest), weights)

    # What happens after a step.

    def lands(self, step: int) -> bool:
        """Say whether an average under way is to be applied after ``step`` steps."""
        return self._overlap.is_due(step)

    def follow(self, level: str | None, step: int, *, local: bool = True) -> None:
        """Average over ``level``, which is due now that ``step`` steps are finished.

        ``local``: gradients of this step were not shared by all.
        """
        self._last_step = step
        if not local and self._common_step == step - 1:
            self._common_step = step
        # What is under way comes first, however close the next one is.
        while self._overlap.flights and (
            self.lands(step) or (level is not None and self._overlap.is_full)
        ):
            self.land()
        if level is not None:
            self.sync(level, step)

    def sync(self, level: str, step: int) -> None:
        """Average what takes part over ``level``: now, or beside training from now on."""
        began, averager = time.perf_counter(), self.averager(level)
        self.replica.sync = self._num_syncs[level] + 1
        parts = self.replica.parts(averager.peers)
        if self._overlap.steps:  # the ranks agree there too
            self._overlap.launch(averager, parts, step, level)
            return
        agreed = averager.agree(parts, Progress(step))
        average = self.replica.launch(agreed, averager, self.averager)
        self.commit(average, averager, level, began, equal=not self._leaves_apart)
        self._anchor_narrower(level, parts)

    def commit(
        self, average: Average, averager: Averager, name: str, began: float, *, equal: bool
    ) -> None:
        """Let the mean come, and only then believe it.

        ``name`` is what telemetry calls it; ``equal``: all replicas are, afterwards.
        """
        traffic = average.wait()  # PeerLost: what reducers remember is as it was before
        average.commit()  # residuals become valid with what they belong to
        self._num_syncs[averager.peers.level] += 1
        self._telemetry.synced(self._clock.step, name, began, traffic)
        self.replica.forget_state()
        widest = self.averager(self.widest).peers.global_ranks
        self._synced_step = -1
        if averager.peers.global_ranks == widest and equal:
            self._synced_step, self._common_step = self._last_step, self._clock.step

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
        seconds = {"seconds": flight.seconds, "seconds_waited": flight.seconds_waited}
        self._telemetry.averaged(flight.step, flight.level, flight.traffic, **seconds)
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
        if self._schedule is not None and not self._schedule.parameter_levels():
            self._average_what_moved()
            return
        while self._overlap.flights:
            self.land()
        self._last_step, step = last_step, self._clock.step
        if self._schedule is not None:
            comes_again = next_sync(self._schedule, step, self.widest) is not None
            while (upcoming := next_sync(self._schedule, step)) is not None:
                step, level = upcoming
                done = self._answer(level, step)
                if done and level == self.widest:
                    return
                if done and not comes_again:
                    break
        self._answer(self.widest, step, name)

    def _answer(self, level: str, step: int, name: str | None = None) -> bool:
        """Average over ``level`` after the last step; return whether all its ranks are there.

        With a schedule some may still train, and need this rank's parameters.
        """
        began, averager = time.perf_counter(), self.averager(level)
        self.replica.sync = self._num_syncs[level] + 1
        parts = self.replica.parts(averager.peers)
        progress = Progress(step, final=self._schedule is not None)
        # More than steps changes replicas: other optimizers, a forward (BatchNorm), the user. So
        # where no step was taken since the last sync, ranks compare what they hold now.
        if self._synced_step == self._last_step >= 0:
            progress = Progress(step, progress.final, clean=fingerprint(parts.everything))
        agreed = averager.agree(parts, progress)
        done = self._schedule is None or all(header.final for header in agreed.headers)
        if done and (level != self.widest or all_clean(agreed.headers)):
            return True  # the widest level will average all of it anyway, or has done so
        average: Average
        if done and self._leaves_apart:  # the last word is exact
            exact, told = self._exact(), Progress(step, final=progress.final)
            average = exact.start(exact.agree(self.replica.parts(averager.peers), told))
        else:
            average = self.replica.launch(agreed, averager, self.averager)
        equal = done or not self._leaves_apart
        self.commit(average, averager, name or level, began, equal=equal)
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

        A lossy reducer and an outer optimizer are left out: what they remember belongs to training.
        """
        weights = self.replica.weights()
        if self._settings.reducer.lossy or self._settings.outer:
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

    # Who averages.

    def averager(
        self, level: str, peers: Peers | None = None, reducer: Reducer | None = None
    ) -> Averager:
        """Return what averages on a level; where it is not of the usual kind, with whom and how."""
        if level not in self._averagers:
            self._averagers[level] = Averager(
                self._peers(level) if peers is None else peers,
                reducer=reducer or self._settings.reducer,
                agreements=self._settings.agreements(),
                kept=self._keep(level),
                on_nonfinite=self._settings.on_nonfinite,
                binder=self._whole if peers is None else self._shards,
            )
        return self._averagers[level]

    def _keep(self, name: str) -> Kept:
        """Return what averages on a level keep; those of shards go by the level they cross."""
        if name not in self._kept:
            self._kept[name] = Kept(self._settings.outer.get(name.removeprefix(ACROSS)))
        return self._kept[name]

    def _exact(self) -> Averager:
        """Return what averages on the widest level with an exact mean in place of the reducer."""
        return Averager(
            self.averager(self.widest).peers,
            reducer=self._settings.reducer.exact,
            agreements=self._settings.agreements(),
            on_nonfinite=self._settings.on_nonfinite,
            binder=self._whole,
        )
