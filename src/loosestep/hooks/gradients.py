"""Which level shares gradients now, and the one way of doing it.

The three adapters (``ddp``, ``plain``, ``fsdp``) know how a framework hands out gradients; this
file knows nothing of frameworks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from loosestep.clock import Clock
from loosestep.peers import Peers, Phase
from loosestep.schedule import Schedule
from loosestep.telemetry import SyncRecord, Telemetry
from loosestep.wire import Native, Traffic


def finished(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that is done: the gradients stay local."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def mean_future(
    buffer: torch.Tensor, group: dist.ProcessGroup | None, share: float | None = None
) -> torch.futures.Future[torch.Tensor]:
    """Launch the mean of ``buffer`` over ``group``, in place, without waiting.

    ``share`` is this rank's weight, all ranks' adding up to 1. Scaling comes first, as in DDP, so
    that sharing with the world gives DDP's gradients to the bit.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return finished(buffer)
    if share is None:
        buffer.div_(size)
    else:
        buffer.mul_(share)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


@dataclass
class GradientSharing:
    """Shares gradient buffers over the level that the schedule names for this step."""

    clock: Clock
    schedule: Schedule
    peers: Callable[[str], Peers]
    telemetry: Telemetry
    step_traffic: Callable[[], Traffic] = Traffic  # what the step itself has moved since asked
    _level: tuple[int, str | None] = (-1, None)  # of a step: every parameter's hook asks
    _moved: Traffic = field(default_factory=Traffic)
    _began: float = field(default=0.0)
    _ended: float = field(default=0.0)
    _waited: float | None = field(default=None)

    @property
    def level(self) -> str | None:
        """The level that shares gradients at this step; None: they stay local."""
        step = self.clock.step
        if self._level[0] != step:
            self._level = (step, self.schedule(step).gradients)
        return self._level[1]

    def share(self, buffer: torch.Tensor, peers: Peers) -> torch.futures.Future[torch.Tensor]:
        """Launch the mean of a buffer and count it."""
        if peers.size == 1:
            return finished(buffer)
        sent = Native().bytes_on_wire(buffer.numel(), buffer.dtype, peers.size)
        self.count(Traffic(bytes_sent=sent))
        future = mean_future(buffer, peers.process_group, _share(peers))
        return future.then(self._done)

    def count(self, traffic: Traffic) -> None:
        """Count what has just been launched."""
        self._began = self._began or time.perf_counter()
        self._moved.add(traffic)

    def arrived(self) -> None:
        """Say that everything has come that was launched so far."""
        self._ended = time.perf_counter()

    def stood_still(self, seconds: float) -> None:
        """Count how long training has waited for gradients, where an adapter can tell."""
        self._waited = (self._waited or 0.0) + seconds

    def wait(self, future: torch.futures.Future[torch.Tensor], peers: Peers) -> None:
        """Wait for what ``share`` launched; raise ``PeerLost`` where it failed."""
        reason = ""
        try:
            future.wait()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
        if reason:
            phase = Phase("sharing gradients", step=self.clock.step)
            raise peers.during(phase).lost(None, reason)

    def _done(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self.arrived()
        return future.value()

    def record(self, step: int) -> None:
        """Hand what was shared since the last call to telemetry."""
        level = self.schedule(step).gradients
        moved, self._moved = self._moved, Traffic()
        moved.add(self.step_traffic())
        if (moved.bytes_sent or moved.bytes_copied) and level is not None:
            seconds = max(0.0, self._ended - self._began)
            sizes = (moved.bytes_sent, moved.bytes_copied)
            self.telemetry.record(
                SyncRecord(step, level, "gradients", seconds, *sizes, None, self._waited)
            )
        self._began, self._waited = 0.0, None


def _share(peers: Peers) -> float | None:
    if peers.weights is None:
        return None
    return peers.weights[peers.group_rank] / sum(peers.weights)
