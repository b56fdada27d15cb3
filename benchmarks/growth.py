"""How an average grows with the number of parameters: 1M, 10M and 100M on 2 and 4 ranks."""

from __future__ import annotations

from benchmarks.contenders import alternate, contenders, rows, transformer_shapes
from benchmarks.report import Row
from loosestep.testing import run_ranks

SIZES = {"1M": (5, 128), "10M": (13, 256), "100M": (32, 512)}  # layers, width


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 4):
        for label, (layers, width) in SIZES.items():
            few = rounds if label != "100M" else max(3, rounds // 3)
            seconds = run_ranks(
                world_size, measure, layers, width, few, timeout=1200, group_timeout=120
            )[0]
            condition = f"{world_size} ranks, {label}"
            result += rows(condition, seconds, ["in-tree", "bare all_reduce"])
    return result


def measure(layers: int, width: int, rounds: int) -> dict[str, list[float]]:
    return alternate(contenders(transformer_shapes(layers, width)), rounds)
