"""The held-out loss that contenders of ``training`` end with, after a whole training each.

The same model and data, 300 steps, a learning rate that falls to a twentieth along a cosine.
What a worker learns does not depend on how fast the link is (an average under way is applied after
so many steps, however long it took), so the link is a fast one here and DDP need not be waited for.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row
from benchmarks.training import CONTENDERS, SETTINGS, loss_at, losses, train
from loosestep.lab.emulation import missing
from loosestep.lab.report.facts import Facts

STEPS = 300
SEEDS = {  # one says little
    "DDP": 10,
    "loosestep, period 4": 10,
    "loosestep, every step": 5,
    "in-tree, period 8": 3,
}
RATE = "10gbit"
CONTEXT = 128  # somewhat more than in ``training``: time does not count here
WHOLE = replace(
    SETTINGS, context=CONTEXT, lr_warmup=10, lr_floor=0.05, eval_every=STEPS, eval_batches=64
)


def run(rounds: int) -> list[Row]:
    """Train with as many seeds as there are rounds, and as ``SEEDS`` has at most."""
    if missing():
        print(f"left out: {missing()}")
        return []
    by_name = {one.name: replace(one, steps=STEPS) for one in CONTENDERS}
    found: dict[str, list[Facts]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, seeds in SEEDS.items():
            for seed in range(min(rounds, seeds)):
                facts = train(by_name[name], seed, Path(folder), WHOLE, RATE)
                found.setdefault(name, []).append(facts)
                print(f"{name}, seed {seed}: {loss_at(facts, STEPS):.4f} nats", flush=True)
    return [row for name in found for row in _against_ddp(name, found)]


def _against_ddp(name: str, found: dict[str, list[Facts]]) -> list[Row]:
    pairs = zip(found["DDP"], found[name], strict=False)  # those of the same seed
    rows = losses([{"DDP": ddp, name: facts} for ddp, facts in pairs], STEPS)
    return [row for row in rows if row.contender == name]
