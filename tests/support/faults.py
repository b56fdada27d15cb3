"""Ranks that are struck by a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

Fault = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def pause(seconds: float) -> None:
    """Stop this process, and let it go on later, as a debugger or a full memory does."""
    command = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)
    stop()


def sleep() -> None:
    time.sleep(600)


def bug() -> None:
    raise ZeroDivisionError("a bug in the user's code")


FAULTS: dict[str, Fault] = {"kill": kill, "stop": stop, "sleep": sleep, "bug": bug}


def use(transport: str) -> None:
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0" if transport == "network" else "1"


def settle() -> None:
    """Load what torch loads with the first optimizer, and meet: no short time-out is for that."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    dist.barrier()
