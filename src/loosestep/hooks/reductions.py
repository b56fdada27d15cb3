"""Reductions on threads of their own, in the order in which they were asked for.

A reducer has to be waited for, and nothing may wait inside a backward or in a communication
callback. So one thread does the waiting, and what is handed out can be waited for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from loosestep.groups import free_group, own_group
from loosestep.peers import Peers, Phase
from loosestep.wire import Handle, Reducer, Traffic, check_reducer, check_suits_gradients

Job = Callable[[], None]


class Reductions:
    """Shares buffers by a reducer, one after another, on process groups of its own.

    The order of calls must be the same on all ranks. A buffer must be left alone until it was
    waited for, and holds the mean then.
    """

    def __init__(self, reducer: Reducer) -> None:
        check_gradient_reducer(reducer)
        self.reducer = reducer
        self.traffic = Traffic()  # of all that is done
        self._adding = threading.Lock()
        self._groups: dict[Peers, Peers] = {}
        # [Note: out and back] What goes with notes is launched on the first thread and awaited on
        # the second, so that a buffer leaves while those before it are still on their way. Each
        # goes in order and waits for its own like on the other ranks only: nobody can be waiting
        # for somebody who waits for him.
        self._out, self._back = _Line(), _Line()
        self._end = weakref.finalize(self, _end, self._out, self._back)

    def share(
        self, buffer: torch.Tensor, peers: Peers, slot: str, notes: torch.Tensor | None = None
    ) -> Shared:
        """Launch the mean of ``buffer`` in place; the first call with some peers is collective.

        ``notes`` are some exact numbers behind it, where ``takes_notes`` says so.
        """
        shared, own = Shared(buffer), self.own_peers(peers)
        if notes is None:
            self.submit(lambda: shared.landed(self._alone(buffer, own, slot)))
        else:
            self.submit(lambda: self._launch(shared, notes, own, slot))
        return shared

    def takes_notes(self, buffer: torch.Tensor, peers: Peers) -> bool:
        """Say whether notes can travel with a buffer; the same on all ranks."""
        takes = getattr(self.reducer, "takes_notes", None)
        return takes is not None and takes(buffer, self.own_peers(peers))

    def own_peers(self, peers: Peers) -> Peers:
        """Return the same peers on a group that nobody else uses, made at the first call."""
        # By hand and not on the thread: groups must be made in one order on all ranks.
        key = peers.during(Phase("sharing gradients"))
        if key not in self._groups:
            group = peers.process_group
            if peers.size > 1:
                group = own_group(peers.global_ranks, peers.timeout, peers.process_group)
            self._groups[key] = replace(peers, process_group=group)
        return self._groups[key].during(peers.phase)

    def submit(self, job: Job) -> None:
        """Run ``job`` after all that was submitted before."""
        self._out.put(job)

    @torch.no_grad()
    def reduce(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Exception | None:
        """Reduce now, on the thread; return what went wrong."""
        try:
            if buffer.device.type != "cpu":
                torch.accelerator.synchronize(buffer.device)  # the thread has streams of its own
            return self._land(self._start(buffer, peers, slot))
        except Exception as error:  # whatever it is, it belongs to whoever waits
            return error

    def _alone(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Exception | None:
        """Reduce when nothing is on its way: slots are then opened and freed in one order."""
        self._back.drain()
        return self.reduce(buffer, peers, slot)

    @torch.no_grad()
    def _launch(self, shared: Shared, notes: torch.Tensor, peers: Peers, slot: str) -> None:
        """Send a buffer with its notes, and let the other thread await what comes back."""
        try:
            start = getattr(self.reducer, "start_noted")  # noqa: B009
            handle: Handle = start(shared.buffer, notes, peers, slot)
            handle.advance()
        except Exception as error:
            shared.landed(error)
            return
        self._back.put(lambda: shared.landed(self._land(handle)))

    @torch.no_grad()
    def _land(self, handle: Handle) -> Exception | None:
        try:
            handle.wait()
        except Exception as error:
            return error
        with self._adding:
            self.traffic.add(handle.traffic)
        return None

    def _start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        takes_many = getattr(self.reducer, "takes_many", None)
        if takes_many is not None and takes_many(peers, buffer.dtype, buffer.device):
            # One loop without the interpreter, which the training thread needs meanwhile.
            handle: Handle = getattr(self.reducer, "start_many")([buffer], peers)  # noqa: B009
            return handle
        return self.reducer.start(buffer, peers, slot)

    def close(self) -> None:
        """Finish what was asked for, end the threads and free the groups."""
        self._out.end()  # first: what it launches is awaited on the other
        self._back.end()
        self._end.detach()
        for own in self._groups.values():
            if own.size > 1 and own.process_group is not None:
                free_group(own.process_group)
        self._groups.clear()


class _Line:
    """Jobs on a thread of their own, in the order in which they come."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), daemon=True)
        self._thread.start()

    def put(self, job: Job | None) -> None:
        """Add a job; None: there will be no more."""
        self._jobs.put(job)

    def drain(self) -> None:
        """Return when all jobs so far are done."""
        self._jobs.join()

    def end(self) -> None:
        """Return when all jobs are done, with the thread; safe to call twice."""
        self.put(None)
        self._thread.join()


class Shared:
    """A buffer that is being shared."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self._done = buffer, future_of(buffer)
        self._error: Exception | None = None

    def landed(self, error: Exception | None) -> None:
        """Note that it is through, or what went wrong."""
        self._error = error
        self._done.set_result(self.buffer)

    def wait(self) -> torch.Tensor:
        """Return the buffer with the mean, or raise what went wrong with this very buffer."""
        buffer = self._done.wait()
        if self._error is not None:
            raise self._error  # with its type, of which a future would leave the text only
        return buffer


def _end(*lines: _Line) -> None:
    for line in lines:
        line.put(None)


def check_gradient_reducer(reducer: object) -> None:
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
