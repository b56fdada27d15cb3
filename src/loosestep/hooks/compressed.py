"""Any reducer as a DDP communication hook.

    model.register_comm_hook(*gradient_hook(ErrorFeedback(Int4())))

DDP deals its gradients to other buckets after the first backward, and deals them as at first after
a restart. What a reducer remembers, and how blocks are cut, must not depend on that. So windows are
the buckets of the first backward for good: gradients of later buckets are brought there, reduced
as soon as a window is full, and brought back. [Note: order of windows] Buckets come in one order on
all ranks, hence so do full windows.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable

from loosestep.errors import NotFinite
from loosestep.flat import STAGING
from loosestep.groups import world_group
from loosestep.hooks.reductions import Reductions, check_gradient_reducer, future_of
from loosestep.peers import Peers, Phase, peers_of
from loosestep.wire import Reducer, Traffic

Hook = Callable[["GradientHook", GradBucket], torch.futures.Future[torch.Tensor]]


def gradient_hook(
    reducer: Reducer, level: Peers | dist.ProcessGroup | None = None
) -> tuple["GradientHook", Hook]:
    """Return the state and the hook that share a DDP module's gradients by ``reducer``.

    ``level`` is a level of a topology (``topology.peers("host")``), a process group, or None for
    the world; all its ranks call this. The state belongs into checkpoints, one for every rank.

    Example::

        state, hook = gradient_hook(ErrorFeedback(Int8()), topology.peers("host"))
        ddp_model.register_comm_hook(state, hook)
    """
    check_gradient_reducer(reducer)
    if not isinstance(level, Peers | dist.ProcessGroup | None):
        raise TypeError(
            "level must be a level such as topology.peers('host'), a process group or None, got "
            f"{level!r}"
        )
    if isinstance(level, Peers):
        peers = level
    else:
        peers = peers_of(world_group() if level is None else level)
    return GradientHook(reducer, peers), reduce_bucket


@dataclass(eq=False)
class _Open:
    """A bucket of DDP that waits for its windows."""

    buffer: torch.Tensor
    waiting: int = 0  # for so many windows
    error: Exception | None = None
    arrived: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Make the future that DDP gets."""
        self._done = future_of(self.buffer)
        self.future = self._done.then(self._result)

    @property
    def spared(self) -> bool:
        """Whether DDP may go on: nothing was wrong, but for values that were not finite."""
        return self.error is None or isinstance(self.error, NotFinite)

    def landed(self, error: Exception | None) -> None:
        """Note that a window is through; with the last one the bucket is."""
        self.waiting -= 1
        self.error = self.error or error
        if self.waiting == 0:
            self.arrived.set()
            self._done.set_result(self.buffer)

    def _result(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        if self.error is not None and not self.spared:
            raise self.error  # in a callback: DDP takes an exception that is set for a value
        return done.value()


@dataclass(eq=False)
class _Window:
    """Gradients that are reduced together, in every backward."""

    index: int
    parameters: list[torch.Tensor]
    staging: torch.Tensor | None = None
    filled: int = 0  # elements
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    buckets: list[_Open] = field(default_factory=list)  # where the gradients came from

    @property
    def numel(self) -> int:
        """The number of elements of all its gradients."""
        return sum(parameter.numel() for parameter in self.parameters)

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Say whether these are its parameters, in their order."""
        same = zip(self.parameters, parameters, strict=False)
        return len(self.parameters) == len(parameters) and all(a is b for a, b in same)

    def lend(self, buffer: torch.Tensor) -> None:
        """Take a bucket that needs no copy."""
        self.staging, self.filled = buffer, buffer.numel()

    def put(self, start: int, part: torch.Tensor) -> None:
        """Copy a gradient to its place."""
        if self.staging is None:
            self.staging = STAGING.take(self.numel, part.dtype, part.device)
        place = self.staging[start : start + part.numel()]
        self.pieces.append((place.copy_(part), part))
        self.filled += part.numel()

    def land(self, error: Exception | None) -> None:
        """Copy all gradients back and tell their buckets."""
        for place, part in self.pieces:
            if error is None:
                part.copy_(place)
        if self.pieces and self.staging is not None:
            STAGING.give(self.staging)
        for bucket in self.buckets:
            bucket.landed(error)


class GradientHook:
    """What ``reduce_bucket`` needs: the reducer, its thread, and the windows."""

    def __init__(self, reducer: Reducer, peers: Peers) -> None:
        self.reducer = reducer
        self._reductions = Reductions(reducer)
        self._peers = self._reductions.own_peers(peers)
        self._windows: list[_Window] = []
        self._places: dict[torch.Tensor, tuple[int, int]] = {}  # window and first element
        self._passes = 0  # backwards that have begun
        self._open: list[_Open] = []  # of this backward

    def bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Bring a bucket's gradients to their windows and launch those that are full."""
        self._begin(bucket.index())
        self.observe(bucket)
        opened = _Open(bucket.buffer())
        self._open.append(opened)
        self._deal(opened, bucket.parameters())
        if bucket.is_last():
            self._at_the_end()
        return opened.future

    def observe(self, bucket: GradBucket) -> None:
        """Count a bucket, and take it for a window in the first backward, whoever shares it."""
        if bucket.index() == 0:
            self._passes += 1
        if self._passes == 1:
            self._settle(bucket.parameters())

    @property
    def traffic(self) -> Traffic:
        """What has been moved so far."""
        return self._reductions.traffic

    def state_dict(self) -> dict[str, Any]:
        """Return what the reducer remembers."""
        return self.reducer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the reducer go on with what it remembered, on a model with the same buckets."""
        self.reducer.load_state_dict(state_dict)

    def close(self) -> None:
        """End the thread and free the process group; no backward may follow."""
        self._reductions.close()

    def _begin(self, index: int) -> None:
        if index == 0 and self._open:
            raise RuntimeError(
                "the last backward was interrupted by an error, so gradients are only partly "
                "shared and ranks may be out of step; restart from a checkpoint"
            )

    def _settle(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take a bucket of the first backward for a window."""
        window, start = _Window(len(self._windows), list(parameters)), 0
        for parameter in parameters:
            self._places[parameter] = (window.index, start)
            start += parameter.numel()
        self._windows.append(window)

    def _deal(self, opened: _Open, parameters: Sequence[torch.Tensor]) -> None:
        """Fill windows with a bucket's gradients and launch the full ones."""
        places = [self._place(parameter) for parameter in parameters]
        touched = {index: self._windows[index] for index, _ in places}
        opened.waiting = len(touched)
        for window in touched.values():
            window.buckets.append(opened)
        if len(touched) == 1 and window.holds(parameters):
            window.lend(opened.buffer)
        else:
            sizes = [parameter.numel() for parameter in parameters]
            for (index, start), part in zip(places, torch.split(opened.buffer, sizes), strict=True):
                touched[index].put(start, part)
        for window in touched.values():
            if window.filled == window.numel:
                self._launch(window)

    def _place(self, parameter: torch.Tensor) -> tuple[int, int]:
        if parameter not in self._places:
            raise RuntimeError(
                f"a gradient hook serves one DDP module, and a parameter of shape "
                f"{tuple(parameter.shape)} is of another; make a hook for each"
            )
        return self._places[parameter]

    def _launch(self, window: _Window) -> None:
        """Hand a full window to the thread, and begin an empty one."""
        self._windows[window.index] = _Window(window.index, window.parameters)
        phase = Phase("sharing gradients", f"bucket {window.index}", self._passes - 1)
        reductions, peers = self._reductions, self._peers.during(phase)

        def job() -> None:
            assert window.staging is not None, "it is full"
            window.land(reductions.reduce(window.staging, peers, f"gradients {window.index}"))

        reductions.submit(job)

    def _at_the_end(self) -> None:
        """Raise errors from ``backward`` with their types, where DDP would turn them to text."""
        opened, self._open = self._open, []

        def lost() -> None:  # before DDP's own end, which might wait for the lost rank too
            for bucket in opened:
                bucket.arrived.wait()
            _raise_first(bucket.error for bucket in opened if not bucket.spared)

        def not_finite() -> None:  # after it, so that DDP is ready for the next step
            _raise_first(bucket.error for bucket in opened)

        engine = Variable._execution_engine
        try:
            engine.queue_callback(lost)
        except RuntimeError:  # no backward runs: a rank without batches shadows the others'
            return
        engine.queue_callback(lambda: engine.queue_callback(not_finite))


def reduce_bucket(state: GradientHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Share one bucket (DDP wants a function with a state)."""
    return state.bucket(bucket)


def _raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
