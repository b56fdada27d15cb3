"""What one rank moved, and how far apart the replicas were."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What one rank moved for one buffer, and how far apart the replicas were.

    ``deviation`` and ``magnitude`` are sums of squares over a sample of the elements: of
    (replica - mean) over all replicas, and of the mean.
    """

    bytes_sent: int = 0  # handed to the network
    bytes_copied: int = 0  # read straight from a neighbour's memory
    deviation: float = 0.0
    magnitude: float = 0.0
    samples: int = 0

    def add(self, other: Traffic) -> None:
        """Add another buffer's figures to these."""
        self.bytes_sent += other.bytes_sent
        self.bytes_copied += other.bytes_copied
        self.deviation += other.deviation
        self.magnitude += other.magnitude
        self.samples += other.samples
