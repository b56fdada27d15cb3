"""Reductions on a thread of their own, in the order in which they were asked for.

A reducer has to be waited for, and nothing may wait inside a backward or in a communication
callback. So one thread does the waiting, and what is handed out can be waited for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from loosestep.comm.group import Group
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import (
    Handle,
    Place,
    Reducer,
    State,
    check_reducer,
    check_suits_gradients,
)
from loosestep.comm.tensors import short_dtype
from loosestep.errors import NotAttachable, warn_once
from loosestep.telemetry.traffic import Traffic

Job = Callable[[], None]

SLACK_SECONDS = 10.0  # for what a reduction does beside waiting for messages


class Reductions:
    """Shares buffers by a reducer, one after another, on process groups of its own.

    The order of calls must be the same on all ranks. A buffer must be left alone until it was
    waited for, and holds the mean then. What the reducer learns from a backward becomes valid when
    that is over (``settle``) and nothing has failed.
    """

    def __init__(self, reducer: Reducer) -> None:
        check_gradient_reducer(reducer)
        self.reducer = reducer
        self.traffic = Traffic()  # of all that is done
        self._groups: dict[Peers, Peers] = {}
        self._states: dict[str, State] = {}  # by level
        self._landed: list[Handle] = []  # since ``settle``
        self._failed = False
        self._line = _Line()
        self._end = weakref.finalize(self, self._line.put, None)

    def share(self, buffer: torch.Tensor, peers: Peers, place: Place) -> Shared:
        """Launch the mean of ``buffer`` in place; the first call with some peers is collective."""
        own = self.own_peers(peers)
        shared = Shared(buffer, own)
        self.submit(lambda: shared.landed(self.reduce(buffer, own, place)))
        return shared

    def own_peers(self, peers: Peers) -> Peers:
        """Return the same peers on a group that nobody else uses, made at the first call."""
        # By hand and not on the thread: groups must be made in one order on all ranks.
        key = peers.during(Phase("sharing gradients"))
        if key not in self._groups:
            # Not a child of theirs: it is closed with the reductions, and may be asked for again.
            group, ranks = peers.group, peers.global_ranks
            if peers.size > 1:
                group = Group.make(ranks, peers.timeout, group.process_group)
            own = self._groups[key] = replace(peers, group=group)
            self._states[own.level] = self.reducer.init([], own)
        return self._groups[key].during(peers.phase)

    def submit(self, job: Job) -> None:
        """Run ``job`` after all that was submitted before."""
        self._line.put(job)

    def settle(self) -> None:
        """Believe what a backward has brought, after all of it and unless something has failed."""
        self.submit(self._settle)

    def _settle(self) -> None:
        landed, failed = self._landed, self._failed
        self._landed, self._failed = [], False
        if not failed:
            for handle in landed:
                handle.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return what the reducer remembers, by level."""
        self._line.drain()
        return {level: state.state_dict() for level, state in self._states.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the reducer go on with what it remembered on these levels."""
        self._line.drain()
        for level, state in self._states.items():
            state.load_state_dict(state_dict.get(level, {}))

    @torch.no_grad()
    def reduce(self, buffer: torch.Tensor, peers: Peers, place: Place) -> Exception | None:
        """Reduce now, on the thread; return what went wrong."""
        try:
            if buffer.device.type != "cpu":
                torch.accelerator.synchronize(buffer.device)  # the thread has streams of its own
            if buffer.is_complex():
                # Their mean is that of their real and of their imaginary parts, and exact.
                real, at = torch.view_as_real(buffer).view(-1), Place(place.name)
                handle = self._start(real, peers, at)
            else:
                handle = self._start(buffer, peers, place)
            handle.wait()
        except Exception as error:  # whatever it is, it belongs to whoever waits
            self._failed = True
            return error
        self.traffic.add(handle.traffic)
        self._landed.append(handle)
        return None

    def _start(self, buffer: torch.Tensor, peers: Peers, place: Place) -> Handle:
        if self.reducer.takes_many(peers, buffer.dtype, buffer.device):
            # One loop without the interpreter, which the training thread needs meanwhile.
            return self.reducer.start_many([buffer], peers)
        return self.reducer.start(buffer, peers, self._states[peers.level], place)

    def close(self) -> None:
        """Finish what was asked for, end the thread and free the groups."""
        self._line.end()
        self._end.detach()
        for own in self._groups.values():
            own.group.close()
        self._groups.clear()


class _Line:
    """Jobs on a thread of their own, in the order in which they come."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        # [Note: threads and groups] in comm/group.py.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True)
        self._thread.start()

    def put(self, job: Job | None) -> None:
        """Add a job; None: there will be no more."""
        self._jobs.put(job)

    def drain(self) -> None:
        """Return when all jobs so far are done, or the thread is at its end."""
        if self._thread.is_alive():
            self._jobs.join()

    def end(self) -> None:
        """Return when all jobs are done, with the thread; safe to call twice."""
        self.put(None)
        self._thread.join()


class Shared:
    """A buffer that is being shared."""

    def __init__(self, buffer: torch.Tensor, peers: Peers) -> None:
        self.buffer, self._done, self._peers = buffer, future_of(buffer), peers
        self._arrived = threading.Event()
        self._error: Exception | None = None

    def landed(self, error: Exception | None) -> None:
        """Note that it is through, or what went wrong."""
        self._error = error
        self._done.set_result(self.buffer)
        self._arrived.set()

    def wait(self) -> torch.Tensor:
        """Return the buffer with the mean, or raise what went wrong with this very buffer."""
        await_landing(self._arrived, self._peers)
        buffer = self._done.wait()
        if self._error is not None:
            raise self._error  # with its type, of which a future would leave the text only
        return buffer


def await_landing(arrived: threading.Event, peers: Peers) -> None:
    """Return when a reduction has landed; raise ``PeerLost`` where its thread never comes back.

    Messages have the time-out each, and name who is lost; so this waits longer than any of them.
    """
    seconds = 2 * peers.seconds + SLACK_SECONDS if peers.size > 1 else None
    if not arrived.wait(seconds):
        raise peers.lost(None, f"the reduction has not ended within {seconds:g} s")


def check_complex(reducer: Reducer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise where complex gradients would be compressed."""
    if not reducer.lossy:
        return
    for parameter in parameters:
        if parameter.is_complex():
            raise NotAttachable(
                f"{reducer} compresses real gradients only, and a parameter of shape "
                f"{tuple(parameter.shape)} is {short_dtype(parameter.dtype)}; share gradients by "
                "Mean(), or keep the parameter as pairs of real numbers (torch.view_as_real)"
            )


def check_no_rooms(reducer: Reducer) -> None:
    """Say that DDP's gradients cannot live elsewhere: raise where a reducer is for nothing else."""
    if not reducer.resident:
        return
    text = (
        f"{reducer} keeps gradients in memory that a host's ranks share, and DDP keeps them in "
        "buckets of its own; attach the plain module, or leave SharedMemoryMean() away"
    )
    if reducer.lossy:
        raise NotAttachable(text)
    warn_once("resident under ddp", f"{text}. Here it does what Mean() does")


def check_gradient_reducer(reducer: Reducer) -> None:
    """Raise where this cannot share gradients, before a thread or a group is made for it."""
    check_reducer("reducer", reducer, "Int8() or ErrorFeedback(Int4())")
    check_suits_gradients(reducer)


def _work(jobs: queue.Queue[Job | None]) -> None:
    """Run jobs until there is None; knows the queue only, so that its owner can be freed."""
    while (job := jobs.get()) is not None:
        job()
        del job  # with the buffer that it holds
        jobs.task_done()


def future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for ``buffer``, on its device."""
    if buffer.device.type == "cpu":
        return torch.futures.Future()
    return torch.futures.Future(devices=[buffer.device])
