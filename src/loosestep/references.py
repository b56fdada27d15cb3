"""What lossy reducers send: differences to values that all ranks of a group have in common.

    difference = mine - reference,  reference += mean of all differences,  mine = reference

(``ReplicaFeedback`` adds what was left of the difference to the last of these.)

Four bits are too few for a parameter, and enough for how far it moved since the last sync. A
window that has no reference yet is averaged exactly, and the result is its first one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from loosestep.flat import STAGING, pack, unpack, unpack_sum
from loosestep.peers import Phase
from loosestep.pipeline import Direct, Job, Sent, SentTogether, stage
from loosestep.wire import Mean, Reducer, Traffic

SAMPLE = 1 << 12  # elements of a window from which the size of the mean is estimated


class References:
    """The values that all ranks of one group had after their last sync, by slot.

    They take as much memory as what is averaged, once for every level that averages (``nbytes``).
    When other tensors are averaged than before, all ranks forget all of them alike.
    """

    def __init__(self) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._signature = ""

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return sum(values.nbytes for values in self._values.values())

    def follow(self, jobs: Sequence[Job]) -> None:
        """Forget everything unless the jobs are those that the references were kept for."""
        signature = _signature(jobs)
        if signature != self._signature:
            self.clear()
        self._signature = signature

    def clear(self) -> None:
        """Forget everything; the next sync is exact."""
        self._values, self._signature = {}, ""

    def get(self, slot: str, device: torch.device) -> torch.Tensor | None:
        """Return the common values of a slot, or None before its first sync."""
        values = self._values.get(slot)
        if values is not None and values.device != device:  # a checkpoint is loaded to the CPU
            values = self._values[slot] = values.to(device)
        return values

    def keep(self, slot: str, values: torch.Tensor) -> None:
        """Take values that all ranks have; the tensor is theirs from now on."""
        self._values[slot] = values

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the values, and what they belong to."""
        values = {slot: tensor.clone() for slot, tensor in self._values.items()}
        return {"signature": self._signature, "values": values}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""
        self._signature = str(state_dict["signature"])
        self._values = {slot: tensor.clone() for slot, tensor in state_dict["values"].items()}


def remember(references: References, jobs: Sequence[Job]) -> None:
    """Keep the windows' values, which all ranks must have in common."""
    references.follow(jobs)
    for job in jobs:
        if job.peers.size > 1 and job.by is None:
            window = job.window
            empty = torch.empty(window.numel, dtype=window.dtype, device=window.device)
            references.keep(job.slot, pack(window, empty))


@dataclass(frozen=True)
class Differences:
    """Sends what changed since the last sync; the first time, exact values."""

    reducer: Reducer
    references: References

    def batch(self, jobs: deque[Job]) -> list[Job]:
        """Take one: every window has a reference of its own."""
        return [jobs.popleft()]

    def send_together(self, jobs: Sequence[Job], phase: Phase) -> SentTogether:
        """Never asked for."""
        raise AssertionError("windows go one by one")

    def send(self, job: Job, phase: Phase) -> Sent:
        """Launch the mean of the differences; parameters stay as they are until it is there."""
        if job.peers.size == 1 or job.by is not None:
            return Direct(Mean()).send(job, phase)
        reference = self.references.get(job.slot, job.window.device)
        peers = job.peers.during(phase)
        if reference is None:
            buffer = stage(job)
            handle = Mean().start(buffer, peers, job.slot)
            return _First(job, buffer, handle, staged=True, references=self.references)
        buffer = stage(job, reference)
        handle = self.reducer.start(buffer, peers, job.slot)
        return _Difference(job, buffer, handle, staged=True, reference=reference)


@dataclass
class _First(Sent):
    """An exact mean under way, which will be the reference of what follows."""

    references: References

    def land(self) -> Traffic:
        """Wait for the mean, write it back and keep it."""
        traffic, values = super().land(), torch.empty_like(self.buffer)
        window = self.job.window
        self.references.keep(self.job.slot, pack(window, values))
        return traffic


@dataclass
class _Difference(Sent):
    """A mean of differences under way."""

    reference: torch.Tensor

    @property
    def bytes_staged(self) -> int:
        """How much memory the difference takes, and what will be left of it."""
        left = 4 * self.buffer.numel() if hasattr(self.handle, "left") else 0
        return self.buffer.nbytes + left

    def land(self) -> Traffic:
        """Move the reference by the mean difference, and the values to it and what was left."""
        self.handle.wait()
        self.reference.add_(self.buffer)
        left = getattr(self.handle, "left", None)
        if left is None:
            unpack(self.job.window, self.reference)
        else:
            unpack_sum(self.job.window, self.reference, left)
            STAGING.give(left)
        STAGING.give(self.buffer)
        return _relative_to(self.reference, self.handle.traffic)


def _relative_to(mean: torch.Tensor, traffic: Traffic) -> Traffic:
    """Return the figures with the size of the mean in place of that of the mean difference."""
    size = float(mean[:SAMPLE].double().square().mean()) * traffic.samples
    return replace(traffic, magnitude=size)


def _signature(jobs: Sequence[Job]) -> str:
    lines = [f"{job.slot} {job.window.numel} {job.window.dtype}" for job in jobs]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
