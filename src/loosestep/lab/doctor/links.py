"""What was measured between ranks, as plain data: ``dataclasses.asdict`` makes JSON of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALL_REDUCE, AVERAGE = "all_reduce", "average"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ranks, measured while nobody else talked."""

    first: int  # global ranks
    second: int
    same_host: bool
    round_trip_seconds: float  # of 8 bytes; the median
    forth_bytes_per_second: float  # from the first to the second
    back_bytes_per_second: float
    clock_offset_seconds: float  # how far the second's wall clock is ahead of the first's


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How long a group's ranks took to reduce one buffer, all of them together."""

    level: str  # "host" or "world"
    method: str  # "all_reduce": the backend's; "average": this library's, in two levels
    ranks: tuple[int, ...]
    num_bytes: int  # of the buffer on each rank
    seconds: float  # of the slowest rank; the median

    @property
    def bytes_per_second(self) -> float:
        """How much of a buffer is done in a second."""
        return self.num_bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Links:
    """All that was measured."""

    backend: str
    hosts: tuple[tuple[int, ...], ...]  # global ranks
    host_names: tuple[str, ...]
    pairs: tuple[Pair, ...]
    rates: tuple[Rate, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.hosts))

    @property
    def widest(self) -> str:
        """The level that holds all ranks."""
        return "world" if len(self.hosts) > 1 else "host"

    @property
    def is_sample(self) -> bool:
        """Whether some pairs were left out."""
        return len(self.pairs) < self.num_ranks * (self.num_ranks - 1) // 2

    def seconds_for(self, level: str, method: str, num_bytes: float) -> float:
        """Return how long a buffer of a size would take, in the level's slowest group.

        By the rate of the largest buffer that was measured, and never less than the smallest took.
        """
        groups = {r.ranks for r in self.rates if (r.level, r.method) == (level, method)}
        return max((self._seconds(level, method, group, num_bytes) for group in groups), default=0)

    def _seconds(self, level: str, method: str, ranks: tuple[int, ...], num_bytes: float) -> float:
        key = (level, method, ranks)
        rates = [r for r in self.rates if (r.level, r.method, r.ranks) == key]
        least, most = min(rates, key=_size), max(rates, key=_size)
        return max(least.seconds, num_bytes / most.bytes_per_second)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Links:
        """Take back what ``dataclasses.asdict`` made, also after a trip through JSON."""
        return cls(
            backend=data["backend"],
            hosts=tuple(map(tuple, data["hosts"])),
            host_names=tuple(data["host_names"]),
            pairs=tuple(Pair(**pair) for pair in data["pairs"]),
            rates=tuple(Rate(**rate | {"ranks": tuple(rate["ranks"])}) for rate in data["rates"]),
        )


def _size(rate: Rate) -> int:
    return rate.num_bytes
