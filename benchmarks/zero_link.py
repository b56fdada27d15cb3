"""Training steps with a sharded optimizer between two hosts at 1 Gbit/s, one rank each.

The bound is what no method can beat that moves DDP's bytes and begins to move them when backward
begins: forward, and then backward and half of AdamW, or the wire at the rate that a bare all_reduce
of as many bytes reaches in the same run, whichever takes longer.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from benchmarks.contenders import alternate, rows
from benchmarks.report import Row
from benchmarks.zero import BATCHES, WIDTH, contenders, model
from tests.support.netns import TwoHosts, missing

RATE = "1gbit"


def measure(batch: list[int], rounds: int) -> dict[str, list[float]]:
    """Time all contenders and the wire; return seconds, the bound among them."""
    everything = contenders((batch[0], batch[1]))
    net, inputs = model(), torch.randn(*batch, WIDTH)
    flat = torch.ones(sum(p.numel() for p in net.parameters()))
    everything["forward alone"] = lambda: net(inputs)
    everything["bare all_reduce"] = lambda: dist.all_reduce(flat)
    seconds = alternate(everything, rounds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    behind = median["compute alone"] - median["forward alone"] + median["AdamW alone"] / 2
    bound = median["forward alone"] + max(behind, median["bare all_reduce"])
    return {"bound": [bound] * rounds, **seconds}


def run(rounds: int) -> list[Row]:
    if missing():
        print(f"left out: {missing()}")
        return []
    result: list[Row] = []
    for batch in BATCHES:
        with TwoHosts(RATE) as hosts:
            ranks = [hosts.start(measure, batch, rounds, rank=r, host=r, size=2) for r in (0, 1)]
            seconds, _ = (rank.result(timeout=1200) for rank in ranks)
        condition = f"{RATE}, {batch[0]}x{batch[1]} tokens"
        result += rows(condition, seconds, ["bound", "DDP", "torch ZeRO"])
    return result
