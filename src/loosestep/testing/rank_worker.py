"""A rank that waits for work: the far side of ``loosestep.testing``."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from loosestep.testing import forking

_HOST = "127.0.0.1"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_PR_SET_PDEATHSIG = 1
_JOIN_TIMEOUT = timedelta(seconds=60)
_num_modules = 0  # that were loaded when the collector was last told to leave them alone


@dataclass(frozen=True)
class Job:
    """What a worker is told to do."""

    call: bytes  # pickled (body, args); opened only once `path` is in place
    path: list[str]
    name: str
    rank: int
    world_size: int
    group_timeout: float


@dataclass(frozen=True)
class Answer:
    """What a worker says of its job: a pickled result, or a traceback."""

    result: bytes = b""
    error: str | None = None


def connect_store(port: int, *, serve: bool = False) -> Any:
    """Return the store at `port`; to serve, port 0 asks for a free one."""
    # Torch exports the name, but not in a way that a type checker sees.
    return dist.TCPStore(_HOST, port, None, serve, wait_for_workers=False)  # type: ignore[attr-defined]


def work(pipe: Connection[Any, Any], store_port: int) -> None:
    """Do the jobs that come through `pipe` until it closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    store = connect_store(store_port)
    pipe.send("started")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        _do(job, pipe, store)


def _do(job: Job, pipe: Connection[Any, Any], store: Any) -> None:
    environment = dict(os.environ)
    answer = _answer(job, store)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(answer)
    if answer.error is not None:
        # The sockets close with the process, so peers that wait for this rank fail at once.
        os._exit(1)
    pipe.recv()  # All ranks are through: closing the group now disturbs nobody.
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    _collect()
    pipe.send("left")


def _collect() -> None:
    """Free what still holds the old group, now and not in the middle of the next job."""
    gc.collect()
    global _num_modules
    if len(sys.modules) != _num_modules:
        # What modules are made of stays for good, and is not worth a look after every job.
        _num_modules = len(sys.modules)
        gc.freeze()


def _answer(job: Job, store: Any) -> Answer:
    try:
        sys.path[:] = job.path
        body, args = pickle.loads(job.call)
        _join_group(job, store)
        return Answer(result=pickle.dumps(body(*args)))
    except BaseException:  # a SystemExit from the body is a failure like any other
        return Answer(error=traceback.format_exc())


def _join_group(job: Job, store: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=job.group_timeout)
    _wait_for_all(job, store)
    store.set_timeout(timeout)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(job.name, store),  # type: ignore[attr-defined] # as TCPStore
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
    )


def _wait_for_all(job: Job, store: Any) -> None:
    """Wait before the group is made: its time-out is not for ranks that start late."""
    store.set_timeout(_JOIN_TIMEOUT)
    if store.add(f"{job.name}/arrived", 1) == job.world_size:
        store.set(f"{job.name}/all arrived", "")
    store.wait([f"{job.name}/all arrived"])


def die_with_parent() -> None:
    """Arrange for this process to be killed when the one that started the pool is gone."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    if sys.platform != "linux":
        return
    # The thread cannot run while the process is stopped, so the kernel has to help: it kills
    # this process when the fork server ends. See [Note: who holds the fork server].
    forking.let_go()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
