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
import os
import reprlib
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

VERSION = 1
INFO_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What was run."""

    name: str  # of the contender, as it is shown
    strategy: str  # as it can be given on the command line: post_local_sgd:period=8,reducer=int4
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
    known = {name: value for name, value in found.items() if name in names}
    _check_types(path, known)
    try:
        return RunInfo(**known)
    except TypeError as error:
        raise NotARun(f"{path}: {error}") from None


def _check_types(path: Path, known: dict[str, Any]) -> None:
    kinds = get_type_hints(RunInfo)
    for declared in fields(RunInfo):
        name = declared.name
        if name in known and not _fits(known[name], kinds[name]):
            raise NotARun(
                f"{path}: {name} must be {declared.type}, got {reprlib.repr(known[name])}; give a "
                "run as it was written"
            )


def _fits(value: Any, kind: Any) -> bool:
    """Say whether what JSON gave is of a type that a field is declared with."""
    outer, parts = get_origin(kind), get_args(kind)
    if outer is UnionType:
        return any(_fits(value, part) for part in parts)
    if outer is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if outer is dict:  # keys are always texts in JSON
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    return kind is Any or type(value) is kind  # true is no number, though it is an int


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


def write_whole(path: Path, text: str) -> None:
    """Write a file of results: a reader, or a full disk, has the old one or the new one, whole.

    Links are followed. A pipe or a device is written into, and never replaced by a file.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        if error.errno is not None:  # a full disk names no file, and nobody asked for a draft
            error.filename = str(path)
        raise


def _replace(place: Path, text: str) -> None:
    # In the same folder: only there is a rename atomic.
    draft = place.with_name(f".{place.name}.{os.getpid()}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        if place.exists():
            shutil.copymode(place, draft)
        os.replace(draft, place)
    except PermissionError:
        # Who may not add or rename files in a folder may still write into this one.
        if not os.access(place, os.W_OK):
            raise
        place.write_text(text, encoding="utf-8")
    finally:
        with suppress(OSError):  # it was never made
            draft.unlink()
