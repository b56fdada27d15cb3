"""Processes that are forked from one that has torch loaded: a tenth of a second in place of three.

[Note: who holds the fork server] Python has one fork server for each process that starts others.
It ends with the last holder of a pipe, of which every forked process is handed a copy too: unless
those close theirs (``let_go``), a process that outlives its parent keeps the server alive.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock


def context(preload: Sequence[str]) -> ForkServerContext:
    """Return what makes pipes and processes; the server imports ``preload`` when it starts.

    If this process has started a server before, that one serves, with what it has loaded.
    """
    made = multiprocessing.get_context("forkserver")
    # The first optimizer imports torch._dynamo, which takes as long as half of torch.
    made.set_forkserver_preload(["torch", "torch._dynamo", *preload])
    return made


def start(target: Callable[..., None], *args: Any, preload: Sequence[str]) -> ForkServerProcess:
    """Fork a process that runs ``target``, which is a module's top-level function."""
    # Not a daemon: it may itself start processes, such as a DataLoader's.
    process: ForkServerProcess = context(preload).Process(target=target, args=args)
    # OpenBLAS reads this on import; its threads would not survive the fork.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        process.start()
    return process


def let_go() -> None:
    """Let the server end without this process, which it has forked."""
    server: Any = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
