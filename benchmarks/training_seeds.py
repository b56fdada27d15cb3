"""The held-out loss after the steps of ``training``, with more seeds than a slow link allows.

The same model, data, steps and constant learning rate, with a context of 128, over a fast link:
what a worker learns does not depend on it. One seed says little about 1 %, and three not much more.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row
from benchmarks.training import CONTENDERS, SETTINGS, STEPS, loss_at, losses, train
from benchmarks.training_losses import CONTEXT, RATE
from loosestep.lab.emulation import missing

SEEDS_A_ROUND = 2
NAMES = ("DDP", "loosestep, period 4")


def run(rounds: int) -> list[Row]:
    """Train with twice as many seeds as there are rounds."""
    if missing():
        print(f"left out: {missing()}")
        return []
    settings = replace(SETTINGS, context=CONTEXT, eval_every=STEPS)
    sharing = [replace(one, steps=STEPS) for one in CONTENDERS if one.name in NAMES]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            {one.name: train(one, seed, Path(folder), settings, RATE) for one in sharing}
            for seed in range(SEEDS_A_ROUND * rounds)
        ]
    ddp, ours = ([loss_at(one[name], STEPS) for one in runs] for name in NAMES)
    over = [mine / theirs for mine, theirs in zip(ours, ddp, strict=True)]
    if len(over) > 1:
        error = statistics.stdev(over) / len(over) ** 0.5
        print(f"{statistics.mean(over):.4f} times DDP's loss, standard error {error:.4f}")
    return losses(runs)
