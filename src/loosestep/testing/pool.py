"""Run a function on real ranks: one process each, joined by Gloo on this machine.

    def body(scale: float) -> float:
        total = torch.ones(1) * scale
        torch.distributed.all_reduce(total)
        return total.item()

    if __name__ == "__main__":
        assert run_ranks(4, body, 0.5) == [2.0, 2.0, 2.0, 2.0]

`run_ranks` starts processes for one call; a `RankPool` keeps them for many, which
saves a test suite the start-up. Both raise `RanksFailed` with the traceback of every
rank that failed, and neither waits longer than its timeout.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, TypeVar

from loosestep.errors import check_whole
from loosestep.testing import forking
from loosestep.testing.rank_worker import Answer, Job, connect_store, work

T = TypeVar("T")

_START_SECONDS = 120.0  # the first start imports torch, on a busy machine slowly
_GRACE_SECONDS = 5.0  # for the other ranks to fail too, once one has


class RanksFailed(RuntimeError):
    """One or more ranks raised, died or did not answer in time.

    `failures` maps each such rank to its traceback or to a line that says what became of it,
    the first to fail first: what the others say is often only that they lost it.
    """

    def __init__(self, world_size: int, failures: dict[int, str]) -> None:
        self.failures = failures
        ranks = ", ".join(map(str, failures))
        head = f"{len(failures)} of {world_size} ranks failed, in this order: {ranks}"
        parts = [f"rank {rank}: {text.rstrip()}" for rank, text in failures.items()]
        super().__init__("\n\n".join([head, *parts]))


def run_ranks(
    world_size: int,
    body: Callable[..., T],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
) -> list[T]:
    """Return what `body(*args)` returns on each of `world_size` new ranks, by rank.

    On every rank the default process group is up, with Gloo and `group_timeout` seconds per
    collective. See `RankPool.run` for what a body may be and how failures are told.
    """
    with RankPool(world_size) as pool:
        return pool.run(world_size, body, *args, timeout=timeout, group_timeout=group_timeout)


class RankPool:
    """Up to `size` processes that run one body after another, each on a new process group.

    Processes start when they are first needed. A run that does not end well on every rank
    costs its processes their life; the next run gets new ones.

        with RankPool(4) as pool:
            assert pool.run(4, torch.distributed.get_rank) == [0, 1, 2, 3]
            assert pool.run(2, torch.distributed.get_world_size) == [2, 2]
    """

    def __init__(self, size: int) -> None:
        self.size = check_whole("the size of a pool", size, 1)
        self._workers: list[_Worker] = []
        self._num_runs = 0
        self._store: Any = None
        self._entered = False

    def __enter__(self) -> RankPool:
        """Open the pool; no process is started yet."""
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process of the pool."""
        self._entered = False
        self._drop(list(self._workers))
        self._store = None

    def run(
        self,
        world_size: int,
        body: Callable[..., T],
        *args: Any,
        timeout: float = 60.0,
        group_timeout: float = 30.0,
        allow_dead: Collection[int] = (),
    ) -> list[T]:
        """Return what `body(*args)` returns on each of `world_size` ranks, by rank.

        `body` is found by name in the worker, so it has to be a module's top-level function;
        arguments and results are pickled. Every rank starts with one torch thread, the
        same seed and the environment its process started with.

        `timeout` is in seconds for the whole run. The ranks in `allow_dead` are expected to die
        or to hang: they are killed once all others have answered, and their result is None.
        An exception that such a rank raises still fails the run.
        """
        self._check(world_size, allow_dead)
        call = _pickle_call(body, args)
        workers = self._ready(world_size)
        try:
            self._num_runs += 1
            name = f"run{self._num_runs}"
            for rank, worker in enumerate(workers):
                worker.send(Job(call, sys.path, name, rank, world_size, group_timeout))
            answers = _Answers(workers, timeout, frozenset(allow_dead))
            results = answers.collect()
            clean = answers.complete and _leave_together(workers)
        except BaseException:
            self._drop(workers)
            raise
        if not clean:
            self._drop(workers)
        return results

    def _check(self, world_size: int, allow_dead: Collection[int]) -> None:
        if not self._entered:
            raise RuntimeError("a RankPool runs only while open; use `with RankPool(...) as pool:`")
        if not check_whole("world_size", world_size, 1) <= self.size:
            raise ValueError(
                f"world_size must lie in 1..{self.size}, the pool's size, got {world_size}"
            )
        strange = sorted(rank for rank in set(allow_dead) if rank not in range(world_size))
        if strange:
            raise ValueError(f"allow_dead has ranks {strange} outside 0..{world_size - 1}")

    def _ready(self, count: int) -> list[_Worker]:
        """Return `count` idle workers, starting those that are missing."""
        self._drop([worker for worker in self._workers if not worker.alive])
        if self._store is None:
            # It lives here and not on rank 0, so that rank 0 too may die. It serves all runs,
            # each under its own prefix: to connect, torch looks the address up, and where the
            # name server loses a packet that takes five seconds.
            self._store = connect_store(0, serve=True)
        fresh = [_Worker(self._store.port) for _ in range(count - len(self._workers))]
        self._workers += fresh
        try:
            for worker in fresh:
                worker.wait_started()
        except BaseException:
            self._drop(fresh)
            raise
        return self._workers[:count]

    def _drop(self, workers: Iterable[_Worker]) -> None:
        """Kill `workers` and forget them."""
        gone = list(workers)
        self._workers = [worker for worker in self._workers if worker not in gone]
        for worker in gone:
            worker.kill()
        for worker in gone:
            worker.reap()


class _Worker:
    """A process of the pool and the pipe to it."""

    def __init__(self, store_port: int) -> None:
        preload = (work.__module__,)
        self.pipe, far_end = forking.context(preload).Pipe()
        self._process = forking.start(work, far_end, store_port, preload=preload)
        far_end.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def sentinel(self) -> int:
        return self._process.sentinel

    def wait_started(self) -> None:
        if not self.pipe.poll(_START_SECONDS):
            raise RuntimeError(f"a worker did not start within {_START_SECONDS:g} s")
        try:
            self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"a worker {self.epitaph()} while starting") from None

    def send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except BrokenPipeError:
            pass  # It has died; whoever waits for its answer will see that.

    def epitaph(self) -> str:
        """Say how the process ended."""
        self._process.join(_GRACE_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"died with exit code {code}"

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> None:
        self._process.join()
        self._process.close()
        self.pipe.close()


@dataclass
class _Answers:
    """Waits for the answers to one job and sorts them."""

    workers: list[_Worker]
    timeout: float
    allow_dead: frozenset[int]
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    buried: set[int] = field(default_factory=set)  # died as allowed

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self.workers)

    def collect(self) -> list[Any]:
        """Return the results by rank, or raise RanksFailed."""
        deadline = time.monotonic() + self.timeout
        complaint = f"did not answer within {self.timeout:g} s and was killed"
        while self._awaited() and time.monotonic() < deadline:
            self._take(deadline - time.monotonic())
            grace_ends = time.monotonic() + _GRACE_SECONDS
            if self.failures and grace_ends < deadline:
                deadline = grace_ends
                first = next(iter(self.failures))
                complaint = (
                    f"did not answer within {_GRACE_SECONDS:g} s "
                    f"after rank {first} had failed and was killed"
                )
        self.failures |= dict.fromkeys(self._awaited(), complaint)
        if self.failures:
            raise RanksFailed(len(self.workers), self.failures)
        return [self.results.get(rank) for rank in range(len(self.workers))]

    def _open(self) -> set[int]:
        """Return the ranks nothing has been heard of."""
        heard = self.results.keys() | self.failures.keys() | self.buried
        return set(range(len(self.workers))) - heard

    def _awaited(self) -> set[int]:
        """Return the open ranks that have to answer."""
        return self._open() - self.allow_dead

    def _take(self, seconds: float) -> None:
        """Wait until some rank answers or dies, and note what it said."""
        ranks = self._open()
        watched: list[Connection[Any, Any] | int] = []
        for rank in ranks:
            watched += [self.workers[rank].pipe, self.workers[rank].sentinel]
        wait(watched, max(seconds, 0.0))
        for rank in ranks:
            self._hear(rank)

    def _hear(self, rank: int) -> None:
        worker = self.workers[rank]
        try:
            if worker.pipe.poll():
                self._note(rank, worker.pipe.recv())
            elif not worker.alive:
                self._bury(rank)
        except (EOFError, ConnectionResetError):
            self._bury(rank)

    def _note(self, rank: int, answer: Answer) -> None:
        if answer.error is not None:
            self.failures[rank] = answer.error
        else:
            self.results[rank] = pickle.loads(answer.result)

    def _bury(self, rank: int) -> None:
        if rank in self.allow_dead:
            self.buried.add(rank)
        else:
            self.failures[rank] = self.workers[rank].epitaph()


def _leave_together(workers: list[_Worker]) -> bool:
    """Let all ranks close their groups; return whether all of them could."""
    for worker in workers:
        worker.send(None)
    deadline = time.monotonic() + _GRACE_SECONDS
    return all(_has_left(worker, deadline) for worker in workers)


def _has_left(worker: _Worker, deadline: float) -> bool:
    if not worker.pipe.poll(max(deadline - time.monotonic(), 0.0)):
        return False
    try:
        worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        return False
    return True


def _pickle_call(body: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if not callable(body):
        raise TypeError(f"body must be a function, got {body!r}")
    _pickle_or_refuse(body, "body must be a top-level function of a module", "move it there")
    _pickle_or_refuse(args, "the arguments of body must pickle", "build them inside body")
    return pickle.dumps((body, args))


def _pickle_or_refuse(value: object, rule: str, way_out: str) -> None:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{rule}, got {value!r}; {way_out} ({error})") from error
