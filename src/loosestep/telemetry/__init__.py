"""What was moved, how long it took and how far the replicas were apart, per level."""

from loosestep.telemetry.record import LevelTotals, SyncRecord, Telemetry
from loosestep.telemetry.sinks import JsonLines, Sink, TensorBoard
from loosestep.telemetry.traffic import Traffic

__all__ = ["JsonLines", "LevelTotals", "Sink", "SyncRecord", "Telemetry", "TensorBoard", "Traffic"]
