"""A sync under way: windows in a pipeline, each sent, summed and written back.

launch      a few windows at a time, so that memory stays bounded
advance     sum what has arrived, launch the way back
wait        write back; ``data_ptr``, strides and views are what they were
commit      then let reducers and references keep what they have learnt: all of it, or nothing
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from loosestep.comm.flat.staging import STAGING
from loosestep.comm.flat.windows import pack, pack_difference, unpack, windows
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import NOTHING, AllReduce, Handle, Place, Reducer, State
from loosestep.comm.tensors import Named
from loosestep.sync.jobs import Job
from loosestep.telemetry.traffic import Traffic

BUDGET_BYTES = 12 << 20  # what they may take together, in each direction; one is always allowed
BATCH_BYTES = 4 << 20  # what windows that go together may take; a batch before may be on its way
COUNTER_WINDOW_BYTES = 512 << 10  # counters are widened to 8 bytes on the way


@dataclass
class Sent:
    """A window on its way, in its tensor's own memory or in a copy."""

    job: Job
    buffer: torch.Tensor
    handle: Handle
    staged: bool

    @property
    def bytes_staged(self) -> int:
        """How much memory the copy takes."""
        return self.buffer.nbytes if self.staged else 0

    def land(self) -> Traffic:
        """Wait for the mean and write it back."""
        self.handle.wait()
        if self.staged:
            unpack(self.job.window, self.buffer)
            STAGING.give(self.buffer)
        return self.handle.traffic

    def look_again(self) -> None:
        """Learn what is in the window now, where that is remembered."""

    def commit(self) -> None:
        """Let the reducer's state have what was learnt."""
        self.handle.commit()


@dataclass
class SentTogether:
    """Several windows on their way as one."""

    jobs: Sequence[Job]
    buffers: Sequence[torch.Tensor]
    handle: Handle

    @property
    def bytes_staged(self) -> int:
        """How much memory the copies take."""
        return sum(_bytes_staged(job) for job in self.jobs)

    def land(self) -> Traffic:
        """Wait for all means and write them back."""
        self.handle.wait()
        for job, buffer in zip(self.jobs, self.buffers, strict=True):
            if not job.window.in_place:
                unpack(job.window, buffer)
                STAGING.give(buffer)
        return self.handle.traffic

    def look_again(self) -> None:
        """Learn what is in the window now, where that is remembered."""

    def commit(self) -> None:
        """Let the reducer's state have what was learnt."""
        self.handle.commit()


class Sender(Protocol):
    """Starts windows on their way."""

    def batch(self, jobs: deque[Job]) -> list[Job]:
        """Take from the front of ``jobs`` what goes together."""

    def send_together(self, jobs: Sequence[Job], phase: Phase) -> SentTogether:
        """Launch the means of windows that go together."""

    def send(self, job: Job, phase: Phase) -> Sent:
        """Launch the window's mean."""


@dataclass(frozen=True)
class Direct:
    """Sends values as they are."""

    reducer: Reducer
    state: State = NOTHING
    _many: dict[int, bool] = field(default_factory=dict)  # by the identity of a job

    def batch(self, jobs: deque[Job]) -> list[Job]:
        """Take one, or as many as the reducer takes at a time and memory allows."""
        first = jobs.popleft()
        taken = [first]
        # A silent rank stages what others have in place, which for many would take much memory;
        # all ranks must put the same windows together.
        if first.some_silent or not self._takes_many(first):
            return taken
        staged = _bytes_staged(first)
        while jobs and _alike(first, jobs[0]):
            staged += _bytes_staged(jobs[0])
            if staged > BATCH_BYTES:
                break
            taken.append(jobs.popleft())
        return taken

    def _takes_many(self, job: Job) -> bool:
        if id(job) not in self._many:
            reducer, window = job.by or self.reducer, job.window
            self._many[id(job)] = reducer.takes_many(job.peers, window.dtype, window.device)
        return self._many[id(job)]

    def send_together(self, jobs: Sequence[Job], phase: Phase) -> SentTogether:
        """Launch them by one call."""
        buffers = [
            job.window.pieces[0].view.view(-1) if job.window.in_place else stage(job)
            for job in jobs
        ]
        reducer = jobs[0].by or self.reducer
        handle = reducer.start_many(buffers, jobs[0].peers.during(phase))
        return SentTogether(jobs, buffers, handle)

    def send(self, job: Job, phase: Phase) -> Sent:
        """Launch the mean of the values."""
        reducer, peers = job.by or self.reducer, job.peers.during(phase)
        # Of a replica that goes on with its own values these come back: they cannot be zeros.
        silent = job.silent and not reducer.leaves_apart
        staged = silent or not job.window.in_place
        buffer = stage(job, silent=silent) if staged else job.window.pieces[0].view.view(-1)
        if self._takes_many(job):  # one buffer too: the windows for single ones stay untouched
            handle = reducer.start_many([buffer], peers)
        else:
            handle = reducer.start(buffer, peers, self.state, job.place)
        return Sent(job, buffer, handle, staged)


def _alike(one: Job, other: Job) -> bool:
    same = one.window.dtype == other.window.dtype and one.by is other.by
    return same and one.peers == other.peers


def _bytes_staged(job: Job) -> int:
    return 0 if job.window.in_place else job.window.numel * job.window.dtype.itemsize


def stage(
    job: Job, reference: torch.Tensor | None = None, *, silent: bool | None = None
) -> torch.Tensor:
    """Return a flat copy of the window, or its difference to a reference.

    Zeros where this rank is silent: unless told otherwise, where it has no say.
    """
    window = job.window
    buffer = STAGING.take(window.numel, window.dtype, window.device)
    if job.silent if silent is None else silent:
        return buffer.zero_()
    return pack(window, buffer) if reference is None else pack_difference(window, buffer, reference)


class Averaging:
    """A pipeline of windows, and the counters at its end."""

    def __init__(
        self,
        jobs: Sequence[Job],
        sender: Sender,
        *,
        largest: tuple[Sequence[Named], Peers] | None = None,
        step: int | None = None,
        afterwards: Callable[[], Traffic] = Traffic,
        moved: bool = False,
    ) -> None:
        self._afterwards, self._moved = afterwards, moved
        self._jobs = deque(jobs)
        self._depth = min((job.peers.depth for job in jobs), default=1)
        self._sender, self._largest, self._step = sender, largest, step
        self._inbound: deque[Sent | SentTogether] = deque()
        self._outbound: deque[Sent | SentTogether] = deque()
        self._landed: list[Sent | SentTogether] = []
        self.traffic = Traffic()
        self._launch_some()

    def finish(self) -> Traffic:
        """Wait, and believe it at once."""
        traffic = self.wait()
        self.commit()
        return traffic

    @torch.no_grad()
    def wait(self) -> Traffic:
        """Carry all windows through and write them back."""
        while self._inbound:
            sent = self._inbound.popleft()
            sent.handle.advance()
            self._outbound.append(sent)
            self._launch_some()
            while (
                len(self._outbound) > self._depth
                or sum(sent.bytes_staged for sent in self._outbound) > BUDGET_BYTES
            ):
                self._land()
        while self._outbound:
            self._land()
        if self._largest is not None and self._largest[0]:
            self._take_largest(*self._largest)
        self.traffic.add(self._afterwards())
        if self._moved:  # an outer optimizer leads elsewhere than to the mean
            for sent in self._landed:
                sent.look_again()
        return self.traffic

    def commit(self) -> None:
        """Let reducers and references keep what they have learnt."""
        for sent in self._landed:
            sent.commit()
        self._landed.clear()

    def _land(self) -> None:
        sent = self._outbound.popleft()
        self.traffic.add(sent.land())
        self._landed.append(sent)

    def _launch_some(self) -> None:
        while self._jobs and len(self._inbound) < self._depth:
            held = sum(sent.bytes_staged + sent.handle.bytes_held for sent in self._inbound)
            if self._inbound and held >= BUDGET_BYTES:
                return
            jobs = self._sender.batch(self._jobs)
            phase = Phase("averaging", jobs[0].window.name, self._step)
            if len(jobs) == 1:
                self._inbound.append(self._sender.send(jobs[0], phase))
            else:
                self._inbound.append(self._sender.send_together(jobs, phase))

    def _take_largest(self, counters: Sequence[Named], peers: Peers) -> None:
        for window in windows(counters, COUNTER_WINDOW_BYTES):
            wide = torch.uint8 if window.dtype in (torch.bool, torch.uint8) else torch.int64
            wide = torch.float64 if window.dtype.is_floating_point else wide
            device = window.device if peers.size == 1 else peers.device_for(window.device)
            staging = torch.empty(window.numel, dtype=wide, device=device)
            buffer = pack(window, staging)
            phase = Phase("taking the largest of", window.name, self._step)
            reducer, place = AllReduce(dist.ReduceOp.MAX), Place(window.name)
            handle = reducer.start(buffer, peers.during(phase), NOTHING, place)
            handle.wait()
            unpack(window, buffer)
            self.traffic.add(handle.traffic)
