"""A worker that is forked from a process with torch loaded; what a team needs of ``Popen``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any, TypeAlias

from loosestep.testing import forking

Pipe: TypeAlias = "Connection[Any, Any]"
PRELOAD = ("loosestep.lab.trainer.start",)


class Forked:
    """One worker, with pipes to its stdin and from its stderr; ``entry`` takes it to its host."""

    def __init__(self, environment: dict[str, str], entry: Callable[[], None] | None) -> None:
        made = forking.context(PRELOAD)
        (orders, to_worker), (from_worker, errors) = made.Pipe(False), made.Pipe(False)
        self.stdin: IO[str] = _as_file(to_worker, "w")
        self.stderr: IO[str] = _as_file(from_worker, "r")
        self._process = forking.start(_be, orders, errors, environment, entry, preload=PRELOAD)
        orders.close()
        errors.close()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs; below 0: the signal that ended it."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.join()

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def _as_file(end: Pipe, mode: str) -> IO[str]:
    with end:
        return os.fdopen(os.dup(end.fileno()), mode)


def _be(
    orders: Connection[Any, Any],
    errors: Connection[Any, Any],
    environment: dict[str, str],
    entry: Callable[[], None] | None,
) -> None:
    """Be a worker: in a session of its own, with that stdin, stderr, environment and host."""
    from loosestep.lab.trainer.start import main

    forking.let_go()
    os.setsid()
    for end, number in ((orders, 0), (errors, 2)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if entry is not None:
        entry()
    main()
