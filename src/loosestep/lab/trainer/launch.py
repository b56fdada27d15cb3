"""Workers on this machine: started together, watched, and ended together.

A worker that fails ends the others; Ctrl-C is handed on once, so that they can save, and ends them
at the second time. A worker is told what to do by a pipe, which stays open: should this process be
killed, the pipe closes and the worker ends.
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

from loosestep.errors import LoosestepWarning
from loosestep.lab.trainer.forked import Forked
from loosestep.lab.trainer.mistakes import FAILED, LOST, STOPPED, USER_ERROR, BadInput
from loosestep.lab.trainer.orders import Orders
from loosestep.lab.trainer.ranks import Rank

GRACE_SECONDS = 10.0  # for the others to end by themselves once one has ended too early
POLL_SECONDS = 0.1
READ_SECONDS = 5.0  # for the last words of a worker that has ended


class Place(Protocol):
    """A host that workers are started on."""

    def entry(self, host: int) -> Callable[[], None] | None:
        """Return what a worker must call first to be there; None: it is there already."""

    def address(self, host: int) -> str:
        """Return where others reach it."""

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that workers there need."""


class ThisMachine:
    """All workers on this machine, talking by the loopback."""

    def entry(self, host: int) -> None:
        """Return nothing: they are here."""

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
    message: str = ""  # what the worker that failed said
    warnings: list[str] = field(default_factory=list)  # of the library, each once


@dataclass
class Team:
    """The workers of one run."""

    processes: list[subprocess.Popen[str] | Forked] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)  # on stderr, by rank
    interrupts: int = 0
    killed: set[int] = field(default_factory=set)  # ranks that were ended from here
    readers: list[threading.Thread] = field(default_factory=list)

    def add(self, process: subprocess.Popen[str] | Forked, orders: str) -> None:
        """Watch one more worker, and tell it what to do."""
        self.processes.append(process)
        self.said.append([])
        # In a thread: long orders do not fit into the pipe before the worker reads.
        threading.Thread(target=_tell, args=(process.stdin, orders), daemon=True).start()
        reader = threading.Thread(target=_read, args=(process.stderr, self.said[-1]), daemon=True)
        reader.start()
        self.readers.append(reader)

    def interrupt(self) -> None:
        """Ask all to save and end; the second time end them at once."""
        self.interrupts += 1
        # SIGTERM, since a shell's background jobs start out with SIGINT ignored.
        number = signal.SIGTERM if self.interrupts == 1 else signal.SIGKILL
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    def wait(self, watch: Callable[[], None]) -> Outcome:
        """Return when all have ended; ``watch`` is called now and then."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            time.sleep(POLL_SECONDS)
            watch()
            # Somebody has ended without whom the others cannot finish.
            if deadline == float("inf") and any(code != 0 for code in self._codes().values()):
                deadline = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > deadline:
                self.kill()
        watch()
        for reader in self.readers:
            reader.join(READ_SECONDS)
        return self._outcome()

    def kill(self) -> None:
        """End all that still run."""
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.killed.add(rank)
                process.kill()
        for process in self.processes:
            process.wait()

    def _codes(self) -> dict[int, int]:
        """Return the exit codes of those that ended by themselves, by rank."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {r: c for r, c in codes.items() if c is not None and r not in self.killed}

    def _outcome(self) -> Outcome:
        if self.interrupts > 1:
            return Outcome(STOPPED, "ended at once; nothing more was saved")
        stops = (0, STOPPED, -signal.SIGTERM) if self.interrupts else (0, STOPPED)
        codes = self._codes()
        failed = {rank: code for rank, code in codes.items() if code not in stops}
        if not failed:
            finished = set(codes.values()) == {0} and not self.killed
            return Outcome(0 if finished else STOPPED, warnings=self._warnings())
        # What explains the others' failures comes first: a user's error, a signal.
        rank = min(failed, key=lambda r: (_weight(failed[r]), r))
        code = USER_ERROR if failed[rank] == USER_ERROR else FAILED
        return Outcome(code, self._story(rank, failed[rank]))

    def _warnings(self) -> list[str]:
        said = (line.partition(f"{LoosestepWarning.__name__}: ") for w in self.said for line in w)
        return list(dict.fromkeys(text for _, found, text in said if found))

    def _story(self, rank: int, code: int) -> str:
        lines = [line for line in self.said[rank] if line.strip()]
        own = [line for line in lines if line.startswith("loosestep: ")]
        if own:
            return own[-1].removeprefix("loosestep: ")
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"failed with code {code}"
        last = f": {lines[-1]}" if lines else ""
        return f"worker {rank} {how}{last}"


def _weight(code: int) -> int:
    return 1 if code < 0 else {USER_ERROR: 0, LOST: 3}.get(code, 2)


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
                here = _environment(orders, who, place.environment(host))
                team.add(Forked(here, place.entry(host)), orders.to_json())
            return team.wait(watch)
    finally:
        team.kill()


def _environment(orders: Orders, rank: Rank, here: dict[str, str]) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(orders.settings.threads)}
    return {**os.environ, **threads, **here, **rank.environment()}


def free_port(place: Place) -> int:
    """Return a port that nobody uses now; in a namespace of its own any will do."""
    if place.entry(0) is not None:
        return 29_500
    asked = os.environ.get("MASTER_PORT", "0")
    if not asked.isdecimal() or int(asked) > 65_535:
        raise BadInput(f"MASTER_PORT must be a port, from 0 to 65535, got {asked!r}")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(asked)))
        except OSError as error:
            raise BadInput(
                f"port {asked} (MASTER_PORT) cannot be had: {error.strerror}; set another, or none"
            ) from None
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


def _tell(stream: IO[str] | None, orders: str) -> None:
    assert stream is not None
    with suppress(OSError, ValueError):  # the worker is gone; its exit code says why
        stream.write(orders + "\n")
        stream.flush()
