"""What was moved, how long it took and how far the replicas were apart, per level."""

from loosestep.telemetry.record import LevelTotals, SyncRecord, Telemetry
from loosestep.telemetry.sinks import JsonLines, Sink, TensorBoard

__all__ = ["JsonLines", "LevelTotals", "Sink", "SyncRecord", "Telemetry", "TensorBoard"]
