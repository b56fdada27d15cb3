"""Any reducer as a DDP communication hook.

    model.register_comm_hook(*gradient_hook(ErrorFeedback(Int4())))

DDP deals its gradients to other buckets after the first backward, and deals them as at first after
a restart. What a reducer remembers must not depend on that. So windows are the buckets of the first
backward for good: gradients of later buckets are brought there, reduced as soon as a window is
full, and brought back. Buckets come in one order on all ranks, hence so do full windows ([Note:
order of collectives] in ``gradients/plain.py``).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable

from loosestep.comm.flat.cuts import Range, Run, Runs
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.group import peers_of, world_group
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import Place, Reducer, check_hosts_fit
from loosestep.errors import NotFinite, check_instance, check_seconds
from loosestep.gradients.reductions import (
    Reductions,
    await_landing,
    check_complex,
    check_gradient_reducer,
    check_no_rooms,
    future_of,
)
from loosestep.gradients.sharing import as_parameters, check_dense

Hook = Callable[["GradientHook", GradBucket], torch.futures.Future[torch.Tensor]]


def gradient_hook(
    reducer: Reducer,
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
) -> tuple["GradientHook", Hook]:
    """Return the state and the hook that share a DDP module's gradients by ``reducer``.

    Without ``process_group`` they are shared with the world; all its ranks call this. ``timeout``
    bounds every wait, in seconds. The state belongs into checkpoints, one for every rank.

    Example::

        state, hook = gradient_hook(ErrorFeedback(Int8()), ddp_model.process_group)
        ddp_model.register_comm_hook(state, hook)
    """
    check_gradient_reducer(reducer)
    check_no_rooms(reducer)
    if process_group is not None:
        hint = "a process group such as topology.process_group('host'), or None"
        check_instance("process_group", process_group, dist.ProcessGroup, hint)
    group = world_group() if process_group is None else process_group
    peers = peers_of(group, timeout=check_seconds("timeout", timeout))
    check_hosts_fit(reducer, peers.level, [peers.global_ranks])
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
    runs: Runs
    staging: torch.Tensor | None = None
    filled: int = 0  # elements
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    buckets: list[_Open] = field(default_factory=list)  # where the gradients came from

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Say whether these are its parameters, in their order."""
        same = zip(self.parameters, parameters, strict=False)
        return len(self.parameters) == len(parameters) and all(a is b for a, b in same)

    def lend(self, buffer: torch.Tensor) -> None:
        """Take a bucket that needs no copy."""
        self.staging, self.filled = buffer, buffer.numel()

    def put(self, place: Range, part: torch.Tensor) -> None:
        """Copy a gradient to its place."""
        if self.staging is None:
            self.staging = STAGING.take(self.runs.numel, part.dtype, part.device)
        start, stop = place
        self.copies.append((self.staging[start:stop].copy_(part), part))
        self.filled += part.numel()

    def land(self, error: Exception | None) -> None:
        """Copy all gradients back and tell their buckets."""
        for place, part in self.copies:
            if error is None:
                part.copy_(place)
        if self.copies and self.staging is not None:
            STAGING.give(self.staging)
        for bucket in self.buckets:
            bucket.landed(error)


class GradientHook:
    """What ``reduce_bucket`` needs: the reducer, its thread, and the windows."""

    def __init__(self, reducer: Reducer, peers: Peers) -> None:
        check_gradient_reducer(reducer)
        check_instance("peers", peers, Peers, "Peers; gradient_hook(reducer) makes them")
        self.reducer = reducer
        self._reductions = Reductions(reducer)
        self._peers = self._reductions.own_peers(peers)
        self._windows: list[_Window] = []
        self._places: dict[torch.Tensor, tuple[int, Range]] = {}  # window, and where in it
        self._passes = 0  # backwards that have begun
        self._open: list[_Open] = []  # of this backward

    def bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Bring a bucket's gradients to their windows and launch those that are full."""
        check_dense(bucket.buffer(), f"bucket {bucket.index()}")
        self._begin(bucket.index())
        self.observe(bucket)
        opened = _Open(bucket.buffer())
        self._open.append(opened)
        self._deal(opened, bucket.parameters(), as_parameters(bucket.parameters(), opened.buffer))
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
    def reductions(self) -> Reductions:
        """What shares the windows."""
        return self._reductions

    def state_dict(self) -> dict[str, Any]:
        """Return what the reducer remembers."""
        state: dict[str, Any] = self._reductions.state_dict()[self._peers.level]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the reducer go on with what it remembered, on a model with the same buckets."""
        self._reductions.load_state_dict({self._peers.level: state_dict})

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
        check_complex(self.reducer, parameters)
        # By their number from the end, from where DDP fills its first buckets: the same whatever
        # their size is. Names it does not tell.
        last = len(self._places) + len(parameters) - 1
        runs = [Run(f"gradient {last - i}", 0, p.numel()) for i, p in enumerate(parameters)]
        window = _Window(len(self._windows), list(parameters), Runs(tuple(runs)))
        places = zip(parameters, window.runs.bounds, strict=True)
        self._places |= {parameter: (window.index, place) for parameter, place in places}
        self._windows.append(window)

    def _deal(
        self, opened: _Open, parameters: Sequence[torch.Tensor], values: torch.Tensor
    ) -> None:
        """Fill windows with a bucket's gradients and launch the full ones."""
        places = [self._place(parameter) for parameter in parameters]
        touched = {index: self._windows[index] for index, _ in places}
        opened.waiting = len(touched)
        for window in touched.values():
            window.buckets.append(opened)
        if len(touched) == 1 and window.holds(parameters):
            window.lend(values)
        else:
            sizes = [parameter.numel() for parameter in parameters]
            for (index, place), part in zip(places, torch.split(values, sizes), strict=True):
                touched[index].put(place, part)
        for window in touched.values():
            if window.filled == window.runs.numel:
                self._launch(window)

    def _place(self, parameter: torch.Tensor) -> tuple[int, Range]:
        if parameter not in self._places:
            raise RuntimeError(
                f"a gradient hook serves one DDP module, and a parameter of shape "
                f"{tuple(parameter.shape)} is of another; make a hook for each"
            )
        return self._places[parameter]

    def _launch(self, window: _Window) -> None:
        """Hand a full window to the thread, and begin an empty one."""
        self._windows[window.index] = _Window(window.index, window.parameters, window.runs)
        phase = Phase("sharing gradients", f"bucket {window.index}", self._passes - 1)
        reductions, peers = self._reductions, self._peers.during(phase)

        def job() -> None:
            assert window.staging is not None, "it is full"
            place = Place(f"gradients {window.index}", window.runs)
            window.land(reductions.reduce(window.staging, peers, place))

        reductions.submit(job)

    def _at_the_end(self) -> None:
        """Raise errors from ``backward`` with their types, where DDP would turn them to text."""
        self._reductions.settle()
        opened, self._open = self._open, []
        assert not any(window.filled for window in self._windows), "full ones are on their way"
        peers = self._peers.during(Phase("sharing gradients", step=self._passes - 1))

        def lost() -> None:  # before DDP's own end, which might wait for the lost rank too
            for bucket in opened:
                await_landing(bucket.arrived, peers)
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
