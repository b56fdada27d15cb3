"""When a replica averages: at once, or beside training, and once more at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from loosestep.binding import Progress
from loosestep.clock import Clock
from loosestep.overlap import Overlap
from loosestep.replica import Replica
from loosestep.schedule import Schedule, next_sync
from loosestep.telemetry import Telemetry


class Syncs:
    """The averages of a replica, on a schedule and a clock.

    With ``overlap_steps`` they are launched where the schedule says, and applied that much later.
    """

    def __init__(
        self,
        replica: Replica,
        schedule: Schedule,
        clock: Clock,
        telemetry: Telemetry,
        overlap_steps: int = 0,
    ) -> None:
        self._replica, self._schedule = replica, schedule
        self._clock, self._telemetry = clock, telemetry
        self._clean = False  # whether replicas are equal since the widest level averaged
        self._overlap = Overlap(overlap_steps)
        if overlap_steps:
            self._overlap.prepare(replica.averager(replica.widest), replica.parts())

    @property
    def nbytes(self) -> int:
        """How much memory averages keep beside the model."""
        return self._overlap.nbytes + self._replica.nbytes

    def follow(self, step: int) -> None:
        """Do what is due now that ``step`` steps are finished."""
        self._clean = False
        level = self._schedule(step).parameters
        if level is not None or self._overlap.due(step):
            self.land()  # the one under way comes first, however close the next one is
        if level is None:
            return
        if self._overlap.steps:
            averager, parts = self._replica.averager(level), self._replica.parts()
            self._overlap.launch(averager, parts, step, level)
        else:
            self._sync(level, step)

    def land(self) -> None:
        """Wait for what is under way, if anything is, and apply it."""
        flight = self._overlap.land(self._replica.by_name)
        if flight is not None:
            seconds = {"seconds": flight.seconds, "seconds_waited": flight.seconds_waited}
            self._telemetry.averaged(flight.step, flight.level, flight.traffic, **seconds)
            self._replica.forget_state()

    def arrive(self) -> None:
        """Wait for what is under way, if anything is; it is applied when it is due."""
        self._overlap.finish()

    def finalize(self) -> None:
        """Average the steps since the last sync over the widest level that averages.

        This rank answers the syncs of those that still train, until all have come here.
        """
        if not self._schedule.parameter_levels():
            return
        self.land()
        step, widest = self._clock.step, self._replica.widest
        comes_again = next_sync(self._schedule, step, widest) is not None
        while (upcoming := next_sync(self._schedule, step)) is not None:
            step, level = upcoming
            done = self._sync(level, step, final=True)
            if done and level == widest:
                return
            if done and not comes_again:
                break
        self._sync(widest, step, final=True)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the average of all replicas inside the block; afterwards all is as before."""
        self._overlap.finish()  # the wire is needed
        kept = [(tensor, tensor.detach().clone()) for tensor in self._replica.touched()]
        try:
            self._replica.average_weights(self._clock.step)
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in kept:
                    tensor.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Return what is under way, waiting for it, and what lossy averages remember."""
        return {"flight": self._overlap.state_dict(), "references": self._replica.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; what is under way now is dropped."""
        self._overlap.load_state_dict(state_dict.get("flight", {}))
        self._replica.load_state_dict(state_dict.get("references", {}))
        self._clean = False

    def close(self) -> None:
        """Drop what is under way and let go of process groups."""
        self._overlap.close()
        self._replica.close()

    def _sync(self, level: str, step: int, *, final: bool = False) -> bool:
        """Average over ``level``; return whether all its ranks have said that they are final."""
        began, widest = time.perf_counter(), self._replica.widest
        agreed = self._replica.agree(level, Progress(step, final, self._clean))
        done = all(header.final for header in agreed.headers)
        if done and (level != widest or all(header.clean for header in agreed.headers)):
            return True  # the widest level will average all of it anyway, or has done so
        apart = self._replica.stays_apart
        if done and apart:  # the last word is exact
            traffic = self._replica.average_exactly(Progress(step, final=True))
        else:
            traffic = self._replica.average(level, agreed)
        self._telemetry.synced(self._clock.step, level, began, traffic)
        self._replica.forget_state()
        self._clean = level == widest and (done or not apart)
        return done
