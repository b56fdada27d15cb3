"""What a training run leaves in its folder, written by workers and read by displays and reports.

    run.json        what was run: strategy, settings, data, environment, topology
    rank-0.jsonl    what every worker did, one record a line, flushed at once
    rank-1.jsonl    ...

Every record has ``event`` and ``at``, the seconds since all workers began together:

    step    step, loss, lr, tokens (of all workers, so far), seconds_waited (so far), next_sync
            (or null), sent and copied (bytes by ``kind/level``, so far)
    sync    as ``telemetry.SyncRecord``: step, level, kind, seconds, bytes_sent, bytes_copied, drift
    span    kind ("compute", "send" or "wait"), begin, end, step, level: for the timeline
    eval    step, loss (on held-out data, of the average of all workers; rank 0 only)
    save    step, path
    end     step, reason ("finished", "interrupted" or an error's first line), uplink (bytes that
            left this worker's host by the kernel's count, or null)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

VERSION = 1
INFO_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What was run."""

    name: str  # of the contender, as it is shown
    strategy: str  # as it can be given on the command line: post_local_sgd:period=8,wire=int4
    started: str  # date and time, ISO 8601
    command: list[str]
    num_workers: int
    topology: dict[str, list[list[int]]]  # ranks by level and group, narrow levels first
    num_parameters: int
    tokens_per_step: int  # of all workers together; samples, for images
    steps: int | None  # how many were asked for
    config: dict[str, Any]  # all settings
    data: dict[str, Any]  # name, bytes, sha256
    environment: dict[str, Any]  # versions, machine
    link: dict[str, Any] | None = None  # emulated: rate, hosts, workers_per_host
    version: int = VERSION

    def write(self, folder: Path) -> None:
        """Write it into a run's folder, which must exist."""
        text = json.dumps(asdict(self), indent=2)
        with open(folder / INFO_FILE, "x", encoding="utf-8") as file:  # never over another run
            file.write(text + "\n")


@dataclass
class Run:
    """A run as it was read: what was run, and every worker's records in order."""

    folder: Path
    info: RunInfo
    records: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # by rank

    def of(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.records.get(rank, []) if record["event"] == event]


class NotARun(ValueError):
    """A folder that holds no run, or a broken one."""


def log_file(folder: Path, rank: int) -> Path:
    """Return where a worker writes its records."""
    return folder / f"rank-{rank}.jsonl"


def read_run(folder: str | Path) -> Run:
    """Read a run's folder; raise ``NotARun`` with the reason where it is none."""
    folder = Path(folder)
    info = read_info(folder)
    ranks = (r for r in range(info.num_workers) if log_file(folder, r).exists())
    run = Run(folder, info, {rank: list(_records(log_file(folder, rank))) for rank in ranks})
    if not run.records.get(0):
        raise NotARun(f"{folder}: no records of worker 0; has the run begun to train?")
    return run


def read_info(folder: Path) -> RunInfo:
    """Read what was run; raise ``NotARun`` with the reason where a folder holds no run."""
    path = folder / INFO_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotARun(f"{folder}: no {INFO_FILE} in it; give the folder of a run") from None
    except (OSError, ValueError) as error:
        raise NotARun(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise NotARun(f"{path}: not of version {VERSION}")
    names = {f.name for f in fields(RunInfo)}
    try:
        return RunInfo(**{name: value for name, value in found.items() if name in names})
    except TypeError as error:
        raise NotARun(f"{path}: {error}") from None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                return  # the run still writes it, or was killed while it did
            raise NotARun(f"{path}, line {number}: not JSON") from None
        if isinstance(record, dict) and "event" in record:
            yield record
