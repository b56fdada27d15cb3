"""Workers on this machine: started together, watched, and ended together.

A worker that fails ends the others; Ctrl-C is handed on once, so that they can save, and ends them
at the second time. Workers end by themselves should this process be killed: they read a pipe of
which it holds the other end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Protocol

from loosestep.trainer.mistakes import BadInput
from loosestep.trainer.orders import Orders
from loosestep.trainer.ranks import Rank

GRACE_SECONDS = 10.0  # for the others to end by themselves once one has failed
POLL_SECONDS = 0.1
ORDERS_VARIABLE = "LOOSESTEP_ORDERS"


class Place(Protocol):
    """A host that workers are started on."""

    def inside(self, host: int) -> list[str]:
        """Return what a command on that host begins with."""

    def address(self, host: int) -> str:
        """Return where others reach it."""

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that workers there need."""


class ThisMachine:
    """All workers on this machine, talking by the loopback."""

    def inside(self, host: int) -> list[str]:
        """Return nothing: they are here."""
        return []

    def address(self, host: int) -> str:
        """Return the loopback's."""
        return "127.0.0.1"

    def environment(self, host: int) -> dict[str, str]:
        """Keep Gloo to the loopback."""
        return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {}


@dataclass
class Outcome:
    """How a run ended."""

    code: int  # 0: finished; 130: interrupted
    message: str = ""  # what the first worker that failed said


@dataclass
class Team:
    """The workers of one run."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)  # on stderr, by rank
    interrupts: int = 0

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start one more worker, in a session of its own: the terminal's Ctrl-C is handed on."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        self.said.append([])
        reader = threading.Thread(target=_read, args=(process.stderr, self.said[-1]), daemon=True)
        reader.start()

    def interrupt(self) -> None:
        """Ask all to save and end; the second time end them at once."""
        self.interrupts += 1
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT if self.interrupts == 1 else signal.SIGKILL)

    def wait(self, watch: Callable[[], None]) -> Outcome:
        """Return when all have ended; ``watch`` is called now and then."""
        failed: int | None = None
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            time.sleep(POLL_SECONDS)
            watch()
            if failed is None and (failed := self._failed()) is not None:
                deadline = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > deadline:
                self.kill()
        watch()
        return self._outcome(self._failed() if failed is None else failed)

    def kill(self) -> None:
        """End all that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _failed(self) -> int | None:
        codes = [process.poll() for process in self.processes]
        return next((r for r, c in enumerate(codes) if c not in (None, 0, 130)), None)

    def _outcome(self, failed: int | None) -> Outcome:
        if self.interrupts > 1:
            return Outcome(130, "ended at once; nothing was saved")
        if failed is None:
            codes = {process.returncode for process in self.processes}
            return Outcome(130 if 130 in codes else 0)
        code = self.processes[failed].returncode
        lines = [line for line in self.said[failed] if line.strip()]
        own = [line for line in lines if line.startswith("loosestep: ")]
        if own:
            return Outcome(max(code, 1), own[-1].removeprefix("loosestep: "))
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"failed with code {code}"
        last = f": {lines[-1]}" if lines else ""
        return Outcome(1, f"worker {failed} {how}{last}")


def run_here(
    orders: Orders, num_hosts: int, num_workers: int, place: Place, watch: Callable[[], None]
) -> Outcome:
    """Run all workers of a run and wait for them."""
    team = Team()
    port = free_port(place)
    try:
        with handing_on(team):
            for rank in range(num_workers):
                host = rank * num_hosts // num_workers
                who = Rank(rank, num_workers, place.address(0), port, rank)
                command = [*place.inside(host), sys.executable, "-m", "loosestep.trainer.start"]
                team.start(command, _environment(orders, who, place.environment(host)))
            return team.wait(watch)
    finally:
        team.kill()


def _environment(orders: Orders, rank: Rank, here: dict[str, str]) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": str(orders.settings.threads), ORDERS_VARIABLE: orders.to_json()}
    return {**os.environ, **own, **here, **rank.environment()}


def free_port(place: Place) -> int:
    """Return a port that nobody uses now; in a namespace of its own any will do."""
    if not isinstance(place, ThisMachine):
        return 29_500
    asked = os.environ.get("MASTER_PORT")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(asked or 0)))
        except (OSError, ValueError, OverflowError):
            raise BadInput(f"port {asked} (MASTER_PORT) is in use; set another, or none") from None
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def handing_on(team: Team) -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM on to the workers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, lambda *_: team.interrupt()) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(stream: IO[str] | None, lines: list[str]) -> None:
    assert stream is not None
    for line in stream:
        lines.append(line.rstrip("\n"))
        del lines[:-200]
