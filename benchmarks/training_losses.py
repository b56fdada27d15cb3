"""The held-out loss that contenders of ``training`` end with, after a whole training each.

The same model, data and seeds, 300 steps, a learning rate that falls to a twentieth along a cosine.
What a worker learns does not depend on how fast the link is (an average under way is applied after
so many steps, however long it took), so the link is a fast one here and DDP need not be waited for.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row
from benchmarks.training import CONTENDERS, SETTINGS, losses, train
from loosestep.lab import missing

STEPS = 300
NAMES = ("DDP", "in-tree, period 8", "loosestep, period 4")
RATE = "10gbit"
WHOLE = replace(SETTINGS, lr_warmup=10, lr_floor=0.05, eval_every=STEPS, eval_batches=64)


def run(rounds: int) -> list[Row]:
    """Train with ``min(rounds, 3)`` seeds."""
    if missing():
        print(f"left out: {missing()}")
        return []
    sharing = [replace(one, steps=STEPS) for one in CONTENDERS if one.name in NAMES]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            {one.name: train(one, seed, Path(folder), WHOLE, RATE) for one in sharing}
            for seed in range(min(rounds, 3))
        ]
    return losses(runs, STEPS)
