"""The held-out loss after training with gradients in few bits, under AdamW.

A byte-level transformer of 0.9M parameters, 300 steps with a falling learning rate, two emulated
hosts with two workers each, which share gradients at every step: exactly inside a host, and between
hosts by the wire that is named. Contenders see the same samples.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row
from benchmarks.training import Contender, loss_at, train
from benchmarks.training_losses import RATE, STEPS, WHOLE
from loosestep.lab.emulation import missing

MOST_SEEDS = 5
SMALL = replace(WHOLE, width=128, depth=4, heads=4)
CONTENDERS = (
    Contender("DDP", "torch-ddp", STEPS),
    Contender("4 bits + feedback", "ddp:gradient_reducer=int4+ef", STEPS),
    Contender("2 bits + feedback", "ddp:gradient_reducer=int2+ef", STEPS),
    Contender("1.6 bits", "ddp:gradient_reducer=ternary", STEPS),
)


def run(rounds: int) -> list[Row]:
    """Train with as many seeds as there are rounds, ``MOST_SEEDS`` at most."""
    if missing():
        print(f"left out: {missing()}")
        return []
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(min(rounds, MOST_SEEDS)):
            for one in CONTENDERS:
                facts = train(one, seed, Path(folder), SMALL, RATE)
                found.setdefault(one.name, []).append(loss_at(facts, STEPS))
    return [_row(name, values, found["DDP"]) for name, values in found.items()]


def _row(name: str, values: list[float], ddp: list[float]) -> Row:
    over = [mine / theirs for mine, theirs in zip(values, ddp, strict=True)]
    if name != "DDP":
        error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else 0.0
        seeds = [round(ratio, 4) for ratio in over]
        print(f"{name}, times DDP's loss, by seed: {seeds}, standard error {error:.4f}")
    ratios = {"DDP's loss": statistics.mean(over)}
    return Row("loss", name, statistics.mean(values), (min(values), max(values)), ratios, "nats")
