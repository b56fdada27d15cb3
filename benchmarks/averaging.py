"""One average of a 37.8M-parameter transformer on 2, 3 and 4 ranks of one host.

``memcpy`` copies as many bytes on every rank at once. An average must read and write every
parameter once too, so its share of memcpy's speed is its share of the memory's bandwidth.
"""

from __future__ import annotations

from benchmarks.contenders import alternate, contenders, rows, transformer_shapes
from benchmarks.report import Row
from loosestep.testing import run_ranks


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 3, 4):
        seconds = run_ranks(world_size, measure, rounds, timeout=1200, group_timeout=120)[0]
        against = ["in-tree", "bare all_reduce", "memcpy"]
        result += rows(f"{world_size} ranks, 37.8M", seconds, against)
    return result


def measure(rounds: int) -> dict[str, list[float]]:
    return alternate(contenders(transformer_shapes()), rounds)
