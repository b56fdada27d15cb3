"""Counting: one record a sync, one total a level."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loosestep.telemetry.sinks import Sink
from loosestep.telemetry.traffic import Traffic


@dataclass(frozen=True)
class SyncRecord:
    """One sync, as one rank saw it."""

    step: int
    level: str
    kind: str  # "parameters" or "gradients"
    seconds: float  # from the first byte to the last, waiting for slower ranks included
    bytes_sent: int  # handed to the network by this rank
    bytes_copied: int  # read by neighbours straight from this rank's memory
    drift: float | None  # rms distance of the replicas from their mean / rms of the mean
    seconds_waited: float | None = None  # how long training stood still; None: not known
    left_out: tuple[int, ...] = ()  # global ranks that had no say: not finite, or by a gate


@dataclass
class LevelTotals:
    """Everything that one level did since the start."""

    _step, _at_step = -1, 0  # no fields: the step of the last record, and its bytes so far

    syncs: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_copied: int = 0
    last_drift: float | None = None
    seconds_waited: float = 0.0
    peak_bytes_sent: int = 0  # for what was launched at one step
    bytes_kept: int = 0  # of memory beside the model from sync to sync: anchors, residuals, ...
    left_out: dict[int, int] = field(default_factory=dict)  # of how many syncs, by global rank

    def add(self, record: SyncRecord) -> None:
        """Count one more sync."""
        self._at_step = record.bytes_sent + (self._at_step if record.step == self._step else 0)
        self._step = record.step
        self.peak_bytes_sent = max(self.peak_bytes_sent, self._at_step)
        self.syncs += 1
        self.seconds += record.seconds
        self.bytes_sent += record.bytes_sent
        self.bytes_copied += record.bytes_copied
        self.seconds_waited += record.seconds_waited or 0.0
        for rank in record.left_out:
            self.left_out[rank] = self.left_out.get(rank, 0) + 1
        if record.drift is not None:
            self.last_drift = record.drift


@dataclass
class Telemetry:
    """Totals in memory, and every record to the sinks.

    Example::

        telemetry = Telemetry(sinks=[JsonLines("run.jsonl")])
        with attach(model, optimizer, strategy, telemetry=telemetry) as run:
            ...
        run.metrics()["parameters/world"]["bytes_sent"]
    """

    sinks: Sequence[Sink] = ()
    totals: dict[str, LevelTotals] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse sinks that cannot take a record."""
        if not isinstance(self.sinks, Sequence):
            raise TypeError(f"sinks must be a list such as [JsonLines(path)], got {self.sinks!r}")
        for sink in self.sinks:
            if isinstance(sink, type) or not isinstance(sink, Sink):
                raise TypeError(f"a sink must be one such as JsonLines(path), got {sink!r}")

    def record(self, record: SyncRecord) -> None:
        """Count a sync and hand it to the sinks."""
        self.totals.setdefault(f"{record.kind}/{record.level}", LevelTotals()).add(record)
        for sink in self.sinks:
            sink.write(asdict(record))

    def synced(
        self, step: int, level: str, began: float, traffic: Traffic, left_out: Sequence[int] = ()
    ) -> None:
        """Record an average of parameters that began at ``time.perf_counter()`` of ``began``."""
        seconds = time.perf_counter() - began
        waited = {"seconds": seconds, "seconds_waited": seconds}
        self.averaged(step, level, traffic, left_out=left_out, **waited)

    def averaged(
        self,
        step: int,
        level: str,
        traffic: Traffic,
        *,
        seconds: float,
        seconds_waited: float,
        left_out: Sequence[int] = (),
    ) -> None:
        """Record an average of parameters that training did not wait for all the time."""
        self.record(
            SyncRecord(
                step=step,
                level=level,
                kind="parameters",
                seconds=seconds,
                bytes_sent=traffic.bytes_sent,
                bytes_copied=traffic.bytes_copied,
                drift=drift(traffic),
                seconds_waited=seconds_waited,
                left_out=tuple(left_out),
            )
        )

    def kept(self, level: str, num_bytes: int) -> None:
        """Note how much memory averages of parameters on a level keep from sync to sync."""
        self.totals.setdefault(f"parameters/{level}", LevelTotals()).bytes_kept = num_bytes

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return the totals as plain data, by ``kind/level``."""
        return {name: asdict(totals) for name, totals in self.totals.items()}

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()


def drift(traffic: Traffic) -> float | None:
    """Return the replicas' rms distance from their mean, relative to the mean's rms.

    >>> drift(Traffic(deviation=1.0, magnitude=4.0, samples=8))
    0.5
    """
    if traffic.samples == 0:
        return None
    if traffic.magnitude == 0.0:
        return 0.0 if traffic.deviation == 0.0 else math.inf
    return math.sqrt(traffic.deviation / traffic.magnitude)
