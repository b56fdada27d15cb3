"""A group: how long it takes to reduce buffers of some sizes, by the backend and by us."""

from __future__ import annotations

import statistics
import struct
import time

import torch

from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers import AllReduce, Place, Reducer, TwoLevel
from loosestep.lab.doctor.links import ALL_REDUCE, AVERAGE, Rate

FIRST_BYTES = 4_096  # to estimate the others by
SIZES = (64_000, 1_000_000, 16_000_000)
MOST_REPEATS = 5
WORTH_IT = 2  # a size that had to shrink is measured if it still is so many times the last


def measure_level(peers: Peers, seconds: float) -> list[Rate]:
    """Measure a group's reductions, none of which should take longer than ``seconds``."""
    methods: dict[str, Reducer] = {ALL_REDUCE: AllReduce(), AVERAGE: TwoLevel()}
    return [
        Rate(
            level=peers.level,
            method=method,
            ranks=peers.global_ranks,
            num_bytes=num_bytes,
            seconds=took,
        )
        for method, reducer in methods.items()
        for num_bytes, took in _measure(peers, reducer, seconds)
    ]


def _measure(peers: Peers, reducer: Reducer, seconds: float) -> list[tuple[int, float]]:
    """Return sizes and what they took, up to what takes ``seconds``."""
    peers = peers.during(Phase(f"measuring level {peers.level!r}"))
    _time_once(peers, reducer, FIRST_BYTES)  # connections and windows are made now
    last, took = FIRST_BYTES, _time_once(peers, reducer, FIRST_BYTES)
    found: list[tuple[int, float]] = []
    for size in SIZES:
        num_bytes = affordable(size, last, took, seconds)
        if found and num_bytes < WORTH_IT * last:
            break
        took = _time(peers, reducer, num_bytes, seconds)
        found.append((num_bytes, took))
        last = num_bytes
    return found


def affordable(wanted: int, last: int, took: float, seconds: float) -> int:
    """Return ``wanted`` bytes, or what takes ``seconds`` at the rate of the last measurement.

    >>> affordable(16_000_000, last=1_000_000, took=0.5, seconds=2.0)
    4000000
    """
    fits = int(last * seconds / max(took, 1e-9)) // 4 * 4
    return max(4, min(wanted, fits))


def _time(peers: Peers, reducer: Reducer, num_bytes: int, seconds: float) -> float:
    """Return the median of a few tries, fewer where one takes long."""
    tries = [_time_once(peers, reducer, num_bytes)]
    repeats = min(MOST_REPEATS, int(seconds / 2 / tries[0]))
    tries += [_time_once(peers, reducer, num_bytes) for _ in range(repeats)]
    return statistics.median(tries)


def _time_once(peers: Peers, reducer: Reducer, num_bytes: int) -> float:
    """Return how long the slowest member took, which all of them hear."""
    buffer = torch.ones(num_bytes // 4, device=peers.device_for(torch.device("cpu")))
    peers.exchange_fixed(b"+")  # begin together
    began = time.perf_counter()
    reducer.start(buffer, peers, reducer.init([], peers), Place("measured")).wait()
    if buffer.device.type != "cpu":
        torch.accelerator.synchronize()
    took = time.perf_counter() - began
    told = peers.exchange_fixed(struct.pack("<d", took))
    return max(float(struct.unpack("<d", each)[0]) for each in told)
