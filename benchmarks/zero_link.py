"""Training steps with a sharded optimizer between two hosts at 1 Gbit/s, one rank each.

The bound is what no method can beat that moves DDP's bytes: forward, backward and half of AdamW,
or the wire at the rate that a plain exchange reaches in the same run, whichever takes longer.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from benchmarks.contenders import alternate, rows
from benchmarks.report import Row
from benchmarks.zero import BATCHES, contenders
from tests.netns import TwoHosts, missing

RATE = "1gbit"
PROBE_NUMBERS = 4 << 20  # float32, each way


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send and receive at once, as both phases of a sharded step do."""
    other = 1 - dist.get_rank()
    works = [dist.isend(outgoing, other), dist.irecv(incoming, other)]
    for work in works:
        assert work is not None
        work.wait()


def measure(batch: list[int], rounds: int) -> dict[str, list[float]]:
    """Time all contenders and the wire; return seconds, the bound among them."""
    everything = contenders((batch[0], batch[1]))
    outgoing, incoming = torch.ones(PROBE_NUMBERS), torch.ones(PROBE_NUMBERS)
    everything["the wire"] = lambda: exchange(outgoing, incoming)
    seconds = alternate(everything, rounds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    numbers = 10_646_784  # gradients there and parameters back, half of each from either rank
    wire = median.pop("the wire") / PROBE_NUMBERS * numbers
    bound = max(median["compute alone"] + median["AdamW alone"] / 2, wire)
    seconds["the wire"] = [wire] * rounds
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
