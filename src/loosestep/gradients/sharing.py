"""Which level shares gradients in this backward, and the one way of doing it.

The three adapters (``ddp``, ``plain``, ``fsdp``) know how a framework hands out gradients; this
file knows nothing of frameworks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from loosestep.comm.failure import reason_of
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import AllReduce
from loosestep.errors import NotAttachable
from loosestep.gradients.reductions import Reductions
from loosestep.strategy.clock import Clock
from loosestep.strategy.schedules import Due, Schedule
from loosestep.telemetry import SyncRecord, Telemetry
from loosestep.telemetry.traffic import Traffic

DENSE_ONLY = (
    "only dense gradients can be packed; make the embedding with sparse=False, or attach a DDP "
    "module and leave gradient_reducer and sharding away: DDP shares sparse gradients itself"
)


def finished(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that is done: the gradients stay local."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def as_parameters(parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """View a bucket of DDP in its parameters' dtype; DDP has complex numbers as pairs of real ones.

    >>> as_parameters([torch.zeros(1, dtype=torch.complex64)], torch.tensor([1.0, 2.0]))
    tensor([1.+2.j])
    """
    if parameters[0].is_complex() and not buffer.is_complex():
        return torch.view_as_complex(buffer.view(-1, 2))
    return buffer


def check_dense(gradient: torch.Tensor, name: str) -> None:
    """Raise for a sparse gradient that is to be packed with others."""
    if gradient.layout != torch.strided:
        raise TypeError(f"the gradient of {name} is {gradient.layout}; {DENSE_ONLY}")


def check_no_sparse_parts(module: torch.nn.Module) -> None:
    """Raise where a part of a module will have sparse gradients, as DDP finds them too."""
    for name, part in module.named_modules():
        sparse = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        if sparse and part.weight.requires_grad:
            raise NotAttachable(
                f"the gradient of {f'{name}.weight'.lstrip('.')!r} is sparse, by sparse=True; "
                f"{DENSE_ONLY}"
            )


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


def wait_for(future: torch.futures.Future[Any], peers: Peers) -> Any:
    """Return what a future of a collective brings; raise ``PeerLost`` where it failed."""
    try:
        return future.wait()
    except RuntimeError as error:
        reason = reason_of(error)
    raise peers.lost(None, reason)  # [Note: errors outside except]


@dataclass
class GradientSharing:
    """Shares gradient buffers over the level that the schedule named after the last tick."""

    clock: Clock
    schedule: Schedule
    peers: Callable[[str], Peers]
    telemetry: Telemetry
    due: Due  # what the schedule answered: whoever counts the steps asks it and says so here
    step_traffic: Callable[[], Traffic] = Traffic  # what the step itself has moved since asked
    reductions: list[Reductions] = field(default_factory=list)  # by a reducer, where there is one
    _moved: Traffic = field(default_factory=Traffic)
    _began: float = field(default=0.0)
    _ended: float = field(default=0.0)
    _waited: float | None = field(default=None)

    def share(self, buffer: torch.Tensor, peers: Peers) -> torch.futures.Future[torch.Tensor]:
        """Launch the mean of a buffer and count it."""
        if peers.size == 1:
            return finished(buffer)
        peers.check()
        sent = AllReduce().bytes_on_wire(buffer.numel(), buffer.dtype, peers.size)
        self.count(Traffic(bytes_sent=sent))
        future = mean_future(buffer, peers.group.process_group, _share(peers))
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
        wait_for(future, peers.during(Phase("sharing gradients", step=self.clock.step)))

    def _done(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self.arrived()
        return future.value()

    def settle(self) -> None:
        """Let reducers believe what a backward has brought, unless something has failed."""
        for reductions in self.reductions:
            reductions.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return what reducers of gradients remember, by level."""
        states = [reductions.state_dict() for reductions in self.reductions]
        return {level: kept for state in states for level, kept in state.items() if kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let them go on with what they remembered."""
        for reductions in self.reductions:
            reductions.load_state_dict(state_dict)

    def record(self, step: int) -> None:
        """Hand what was shared since the last call to telemetry."""
        level = self.due.gradients
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
