"""What lossy reducers send: differences to values that all ranks of a group have in common.

    difference = mine - reference,  reference += mean of all differences,  mine = reference

(``ReplicaFeedback`` adds what was left of the difference to the last of these.)

Four bits are too few for a parameter, and enough for how far it moved since the last sync. A
window that has no reference yet is averaged exactly, and the result is its first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loosestep.comm.flat.staging import STAGING
from loosestep.comm.flat.windows import pack, unpack, unpack_sum
from loosestep.comm.peers import Phase
from loosestep.comm.reducers import Mean, Reducer, State
from loosestep.sync.jobs import Job
from loosestep.sync.kept import References
from loosestep.sync.pipeline import Direct, Sent, SentTogether, stage
from loosestep.telemetry.traffic import Traffic

SAMPLE = 1 << 12  # elements of a window from which the size of the mean is estimated


def remember(references: References, jobs: Sequence[Job]) -> None:
    """Keep the windows' values, which all ranks must have in common."""
    references.follow(jobs)
    for job in jobs:
        if job.peers.size > 1 and job.by is None:
            window = job.window
            empty = torch.empty(window.numel, dtype=window.dtype, device=window.device)
            references.keep(job.place.name, pack(window, empty))


@dataclass(frozen=True)
class Differences:
    """Sends what changed since the last sync; the first time, exact values."""

    reducer: Reducer
    references: References
    state: State

    def batch(self, jobs: deque[Job]) -> list[Job]:
        """Take one: every window has a reference of its own."""
        return [jobs.popleft()]

    def send_together(self, jobs: Sequence[Job], phase: Phase) -> SentTogether:
        """Never asked for."""
        raise AssertionError("windows go one by one")

    def send(self, job: Job, phase: Phase) -> Sent:
        """Launch the mean of the differences; parameters stay as they are until it is there."""
        if job.peers.size == 1 or job.by is not None:
            return Direct(Mean(), self.state).send(job, phase)
        reference = self.references.get(job.place.name, job.window.device)
        peers = job.peers.during(phase)
        if reference is None:
            buffer = stage(job)
            handle = Mean().start(buffer, peers, self.state, job.place)
            return _First(job, buffer, handle, True, self.references)
        buffer = stage(job, reference)
        handle = self.reducer.start(buffer, peers, self.state, job.place)
        return _Difference(job, buffer, handle, True, reference, self.references)


@dataclass
class _First(Sent):
    """An exact mean under way, which will be the reference of what follows."""

    references: References

    def land(self) -> Traffic:
        """Wait for the mean, write it back and copy it."""
        traffic, values = super().land(), torch.empty_like(self.buffer)
        self._mean = pack(self.job.window, values)
        return traffic

    def look_again(self) -> None:
        """Take what is in the window now."""
        pack(self.job.window, self._mean)

    def commit(self) -> None:
        """Take the mean for a reference from now on."""
        super().commit()
        self.references.keep(self.job.place.name, self._mean)


@dataclass
class _Difference(Sent):
    """A mean of differences under way."""

    reference: torch.Tensor
    references: References

    @property
    def bytes_staged(self) -> int:
        """How much memory the difference takes, and what will be left of it."""
        left = 4 * self.buffer.numel() if self.handle.leaves else 0
        return self.buffer.nbytes + left

    def land(self) -> Traffic:
        """Move the values to the reference, the mean difference and what was left of their own."""
        self.handle.wait()
        moved = self._moved = self.reference + self.buffer
        left = self.handle.left
        if left is None:
            unpack(self.job.window, moved)
        else:
            unpack_sum(self.job.window, moved, left)
            STAGING.give(left)
        STAGING.give(self.buffer)
        return _relative_to(moved, self.handle.traffic)

    def look_again(self) -> None:
        """Take what is in the window now."""
        pack(self.job.window, self._moved)

    def commit(self) -> None:
        """Let the reference move too."""
        super().commit()
        self.references.keep(self.job.place.name, self._moved)


def _relative_to(mean: torch.Tensor, traffic: Traffic) -> Traffic:
    """Return the figures with the size of the mean in place of that of the mean difference."""
    size = float(mean[:SAMPLE].double().square().mean()) * traffic.samples
    return replace(traffic, magnitude=size)
