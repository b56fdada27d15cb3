"""The course of a run: its losses over steps, seconds and bytes, as plain numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loosestep.lab.runs import NotARun, Run, log_file

Record = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A loss, and what it had cost until then."""

    step: int
    seconds: float
    sent: float | None  # bytes per worker, mean of all workers; None: not recorded
    loss: float | None  # None: not a finite number


@dataclass(frozen=True)
class Course:
    """Training losses (mean of all workers) and losses on held-out data, in order."""

    train: list[Point]
    evals: list[Point]


def number(record: Record, key: str) -> float | None:
    """Return a finite number, or None for what is absent, null, NaN or infinite."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def needed(run: Run, rank: int, record: Record, key: str) -> float:
    """Return a number without which a record says nothing."""
    value = number(record, key)
    if value is None:
        path, event = log_file(run.folder, rank), record["event"]
        raise NotARun(f"{path}: {key!r} of a {event!r} record is {record.get(key)!r}, not a number")
    return value


def course(run: Run) -> Course:
    """Return the course of a run."""
    losses = _means(run, lambda record: number(record, "loss"))
    sent = _means(run, lambda record: total(record, "sent"))

    def point(record: Record) -> Point:
        step = int(needed(run, 0, record, "step"))
        return Point(step, needed(run, 0, record, "at"), sent[step], losses[step])

    train = [point(record) for record in run.of("step")]
    if not train:
        raise NotARun(f"{run.folder}: worker 0 has not finished a step; wait for the first one")
    return Course(train, [_evaluation(run, record, train) for record in run.of("eval")])


def total(record: Record, key: str) -> float | None:
    """Return the sum of bytes by kind and level, or None where they were not recorded."""
    found = record.get(key)
    if not isinstance(found, dict):
        return None
    return sum(number(found, name) or 0.0 for name in found)


def _means(run: Run, value: Callable[[Record], float | None]) -> dict[int, float | None]:
    found: dict[int, list[float | None]] = defaultdict(list)
    for rank in run.records:
        for record in run.of("step", rank):
            found[int(needed(run, rank, record, "step"))].append(value(record))
    return {step: _mean(values) for step, values in found.items()}


def _mean(values: list[float | None]) -> float | None:
    # One worker's NaN is the run's: a mean of the others would hide it.
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _evaluation(run: Run, record: Record, train: list[Point]) -> Point:
    step = int(needed(run, 0, record, "step"))
    before = bisect_right(train, step, key=lambda point: point.step) - 1
    sent = train[before].sent if before >= 0 else 0.0
    return Point(step, needed(run, 0, record, "at"), sent, number(record, "loss"))
