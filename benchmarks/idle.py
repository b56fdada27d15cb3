"""What a call costs at a step when nothing is due."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed.algorithms.model_averaging.averagers as in_tree
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager as in_tree_levels

import loosestep
from benchmarks.contenders import parameters, rows, transformer_shapes
from benchmarks.report import Row
from loosestep.testing import run_ranks

CALLS = 10_000
NEVER = 10**9


def run(rounds: int) -> list[Row]:
    seconds = run_ranks(2, measure, rounds, timeout=600)[0]
    return rows("2 ranks, a call, nothing due", seconds, ["in-tree periodic"])


def measure(rounds: int) -> dict[str, list[float]]:
    held = parameters(transformer_shapes(1, 64))
    levels = OrderedDict([(NEVER, 1), (NEVER + 1, 2)])
    averagers: dict[str, Any] = {
        "in-tree periodic": in_tree.PeriodicModelAverager(NEVER, NEVER),
        "periodic": loosestep.PeriodicModelAverager(NEVER, NEVER),
        "in-tree hierarchical": in_tree_levels.HierarchicalModelAverager(levels, NEVER),  # type: ignore[no-untyped-call]
        "hierarchical": loosestep.HierarchicalModelAverager(levels, NEVER),
    }
    seconds: dict[str, list[float]] = {name: [] for name in averagers}
    for averager in averagers.values():
        averager.average_parameters(held)
    for _ in range(rounds):
        for name, averager in averagers.items():
            seconds[name].append(_seconds_a_call(averager, held))
    return seconds


def _seconds_a_call(averager: Any, held: list[torch.nn.Parameter]) -> float:
    call = averager.average_parameters
    began = time.perf_counter()
    for _ in range(CALLS):
        call(held)
    return (time.perf_counter() - began) / CALLS
