"""Ranks that are struck by a fault."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

Fault = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(600)


def bug() -> None:
    raise ZeroDivisionError("a bug in the user's code")


FAULTS: dict[str, Fault] = {"kill": kill, "stop": stop, "sleep": sleep, "bug": bug}


def use(transport: str) -> None:
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0" if transport == "network" else "1"
