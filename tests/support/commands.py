"""The command line as a user has it: in this process where that is quicker, or in its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from loosestep.lab.cli import main
from loosestep.lab.runs import log_file, read_run

TINY = (
    *("--width", "32", "--heads", "2", "--depth", "1", "--context", "32"),
    *("--batch", "2", "--data-bytes", "60000"),
)
MODULE = (sys.executable, "-m", "loosestep")


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def refused(self) -> str:
        """Return the one line that was said about bad input; raise if it was not one line."""
        assert self.code not in (0, None), self
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("loosestep: "), self.err
        return lines[0]


def call(*arguments: str | Path) -> Done:
    """Run a command in this process; its workers are processes all the same."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def call_as_worker(port: int, *arguments: str | Path) -> Done:
    """Run a command as a worker that torchrun has started; for the ranks of a pool."""
    be_worker(port)
    return call(*arguments)


def be_worker(port: int) -> None:
    """Turn a rank of a pool into what torchrun starts: told who it is, and in no group yet."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # who leaves at once would hang up on those that still connect
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command(*arguments: str | Path, timeout: float = 90, **options: Any) -> Done:
    """Run a command in a process of its own."""
    with begun(*arguments, **options) as process:
        out, err = process.communicate(timeout=timeout)
    return Done(process.returncode, out, err)


@contextlib.contextmanager
def begun(
    *arguments: str | Path,
    environment: dict[str, str] | None = None,
    start: tuple[str, ...] = MODULE,
    **options: Any,
) -> Iterator[subprocess.Popen[str]]:
    """Hold a command that runs; it and its workers are ended with it."""
    process = subprocess.Popen(
        [*start, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(met: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something, but not for ever."""
    limit = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.02)


def steps_in(folder: Path, rank: int = 0) -> int:
    """Return how many steps a run that still goes on has written."""
    path = log_file(folder, rank)
    return path.read_text().count('"event": "step"') if path.exists() else 0


def workers_of(parent: int) -> list[int]:
    """Return the workers of a command, by rank: what its fork server has forked."""
    helpers = children_file(parent).read_text().split()
    return [int(w) for helper in helpers for w in children_file(int(helper)).read_text().split()]


def children_file(process: int) -> Path:
    """Return where the kernel lists a process's children."""
    return Path(f"/proc/{process}/task/{process}/children")


def alive(process: int) -> bool:
    """Say whether a process still runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    """Return a run's training losses by step."""
    return {record["step"]: record["loss"] for record in read_run(folder).of("step", rank)}


def final_loss(folder: Path) -> float:
    """Return a run's last loss on held-out data."""
    loss: float = read_run(folder).of("eval")[-1]["loss"]
    return loss


def reasons(folder: Path) -> list[str]:
    """Return why every worker ended."""
    run = read_run(folder)
    return [run.of("end", rank)[-1]["reason"] for rank in sorted(run.records)]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text())
