"""What a worker writes while it trains: its records, scalars for TensorBoard, and a trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loosestep.lab.runs import log_file
from loosestep.telemetry import JsonLines, TensorBoard

MICROSECONDS = 1e6


@dataclass
class Journal:
    """One worker's records; also a sink of telemetry. Times count from ``begin``."""

    folder: Path
    rank: int
    tensorboard: TensorBoard | None = None
    tracing: bool = False
    began: float = field(default_factory=time.perf_counter)
    seconds_waited: float = 0.0
    drift: float | None = None
    sent: dict[str, int] = field(default_factory=dict)  # bytes by kind/level
    copied: dict[str, int] = field(default_factory=dict)
    offset: float = 0.0  # seconds of the run before it was resumed

    def __post_init__(self) -> None:
        """Open the file, which goes on where a run is resumed."""
        self._lines = JsonLines(log_file(self.folder, self.rank))
        self._spans: list[dict[str, Any]] = []
        self._step_began = self._waited_before = 0.0
        self._uplink_before = uplink_bytes()

    def inherit(self, run: Path, step: int, seconds: float) -> None:
        """Begin with what a run that is resumed has written up to a step, if it is still there."""
        self.offset = seconds
        for record in earlier(log_file(run, self.rank), step):
            self._lines.write(record)
            if record["event"] == "step":
                self.sent, self.copied = dict(record["sent"]), dict(record["copied"])
                self.seconds_waited, self.drift = record["seconds_waited"], record["drift"]

    def begin(self) -> None:
        """Start to count time; all workers do so together."""
        self.began, self._uplink_before = time.perf_counter(), uplink_bytes()

    @property
    def now(self) -> float:
        """The seconds since the run began."""
        return time.perf_counter() - self.began + self.offset

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside: time, and bytes that leave the host."""
        began, sent = time.perf_counter(), uplink_bytes()
        try:
            yield
        finally:
            self.began += time.perf_counter() - began
            self._uplink_before += uplink_bytes() - sent

    @property
    def uplink(self) -> int:
        """The bytes that have left this worker's host, by the kernel's count."""
        return uplink_bytes() - self._uplink_before

    def event(self, name: str, **values: Any) -> None:
        """Write a record."""
        self._lines.write({"event": name, "at": round(self.now, 6), **values})

    def write(self, record: dict[str, Any]) -> None:
        """Take a sync from telemetry."""
        key = f"{record['kind']}/{record['level']}"
        self.sent[key] = self.sent.get(key, 0) + record["bytes_sent"]
        self.copied[key] = self.copied.get(key, 0) + record["bytes_copied"]
        self.drift = record["drift"] if record["drift"] is not None else self.drift
        waited = record["seconds_waited"] or 0.0
        self.seconds_waited += waited
        end = self.now
        self.span("send", end - record["seconds"], end, record["step"], key)
        if waited:
            self.span("wait", end - waited, end, record["step"], key)
        self.event("sync", **record)
        if self.tensorboard is not None:
            self.tensorboard.write(record)

    def step_begins(self) -> None:
        """Note when a step begins, for the timeline."""
        self._step_began, self._waited_before = self.now, self.seconds_waited

    def step_ends(self, step: int) -> None:
        """Note what of a step was computing: all of it but the waiting."""
        waited = self.seconds_waited - self._waited_before
        end = max(self._step_began, self.now - waited)
        self.span("compute", self._step_began, end, step, "")

    def span(self, kind: str, begin: float, end: float, step: int, level: str) -> None:
        """Write a piece of the timeline."""
        times = {"begin": round(begin, 6), "end": round(end, 6)}
        self.event("span", kind=kind, **times, step=step, level=level)
        if self.tracing:
            self._spans.append({"kind": kind, **times, "step": step, "level": level})

    def scalar(self, name: str, value: float, step: int) -> None:
        """Hand a number to TensorBoard."""
        if self.tensorboard is not None:
            self.tensorboard.add(name, value, step)

    def close(self) -> None:
        """Write the trace and close all files."""
        if self.tracing:
            path = self.folder / f"trace-{self.rank}.json"
            path.write_text(json.dumps(chrome_trace(self._spans, self.rank)), encoding="utf-8")
        self._lines.close()
        if self.tensorboard is not None:
            self.tensorboard.close()


def earlier(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a file up to those of a step, but not of saving or of the run's end."""
    pending: list[dict[str, Any]] = []  # what a step has written before it was done
    for record in _records(path):
        if record["event"] in ("end", "save"):
            continue
        pending.append(record)
        if record["event"] in ("step", "eval"):
            if record["step"] > step:
                return
            yield from pending
            pending.clear()


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # the last line of a run that was killed
            yield json.loads(line)


LANES = {"compute": 0, "wait": 0, "send": 1}  # waiting is what the computing thread does too


def chrome_trace(spans: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return spans as Chrome's trace events, which Perfetto opens too.

    >>> span = {"kind": "send", "begin": 1.0, "end": 1.5, "step": 3, "level": "parameters/world"}
    >>> chrome_trace([span], 0)["traceEvents"][-1]["dur"]
    500000.0
    """
    names: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "training"}},
        {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "network"}},
    ]
    events = [
        {
            "ph": "X",
            "pid": rank,
            "tid": LANES[span["kind"]],
            "name": f"{span['kind']} {span['level']}".strip(),
            "ts": span["begin"] * MICROSECONDS,
            "dur": (span["end"] - span["begin"]) * MICROSECONDS,
            "args": {"step": span["step"]},
        }
        for span in spans
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def uplink_bytes() -> int:
    """Return the bytes that this host has sent, but for the loopback; 0: not known."""
    try:
        lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    except OSError:
        return 0
    columns = [line.partition(":") for line in lines]
    return sum(int(counts.split()[8]) for name, _, counts in columns if name.strip() != "lo")
