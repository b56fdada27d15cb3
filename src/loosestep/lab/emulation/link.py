"""The rate of an emulated link, as a user writes it and as the kernel takes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST, FASTEST = 10_000, 100 * 10**9  # bits per second; the kernel's clock bounds both
LEAST_BURST_BYTES = 32_000  # some 20 frames, else the link never reaches its rate
LEAST_QUEUE_BYTES = 64_000  # a whole message that TCP hands over in one go
# A timer that comes late must not cost rate. At 100 Mbit/s this is 72 kB, what TCP hands over in
# one go, with headers: less, and the kernel cuts that into frames, each of which costs the workers'
# processors some time, as with no network card that offloads them.
BURST_SECONDS = 0.00576
QUEUE_SECONDS = 0.05  # what a switch holds back before it drops frames


@dataclass(frozen=True)
class Link:
    """A link that carries ``rate`` in each direction.

    >>> Link("2.5gbit").bits_per_second
    2500000000
    """

    rate: str  # a number and a unit: 100mbit

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        if not SLOWEST <= self.bits_per_second <= FASTEST:
            raise ValueError(
                f"a link's rate must lie between 10kbit and 100gbit per second, got {self.rate!r}; "
                "give for example 100mbit"
            )

    @property
    def bits_per_second(self) -> int:
        """The rate as a number."""
        parts = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})", str(self.rate).lower())
        if parts is None:
            raise ValueError(
                "a link's rate must be a number and one of the units kbit, mbit and gbit (bits per "
                f"second), got {self.rate!r}; give for example 100mbit or 2.5gbit"
            )
        return int(Decimal(parts[1]) * UNITS[parts[2]])

    @property
    def bytes_per_second(self) -> float:
        """The rate in bytes, headers included."""
        return self.bits_per_second / 8

    @property
    def token_bucket(self) -> list[str]:
        """The arguments of ``tc qdisc add ... tbf`` for one end of the link."""
        burst = max(LEAST_BURST_BYTES, round(self.bytes_per_second * BURST_SECONDS))
        queue = max(LEAST_QUEUE_BYTES, round(self.bytes_per_second * QUEUE_SECONDS))
        # Bare numbers after burst and limit are bytes.
        return f"tbf rate {self.bits_per_second}bit burst {burst} limit {queue}".split()

    def __str__(self) -> str:
        return self.rate
