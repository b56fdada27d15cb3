"""What it costs to look for infinities and NaN before a sync: ``on_nonfinite`` "raise" and "pass".

On one host the 37.8M parameters go through shared memory, on 2 and 4 ranks; between two hosts with
two ranks each 4.2M go over 200 Mbit/s. ``looking costs`` says how much longer it takes,
``one reading is`` what a bare loop over all parameters takes of a sync that does not look: no look
can take less.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.contenders import Contender, alternate, parameters, rows, transformer_shapes
from benchmarks.link import model
from benchmarks.report import Row
from loosestep import PeriodicModelAverager
from loosestep.comm.codecs.in_c import all_finite
from loosestep.reducers import Reducer, SharedMemoryMean, TwoLevel
from loosestep.testing import run_ranks
from tests.support.netns import TwoHosts, missing

RATE = "200mbit"
ON_ONE_HOST: dict[str, Reducer | None] = {"exact": None, "resident": SharedMemoryMean()}
BETWEEN_HOSTS: dict[str, Reducer | None] = {"exact": None, "exact, two levels": TwoLevel()}
POLICIES = ("pass", "raise")
READING = "reading all parameters once"  # by a sum
IN_C = "reading them by their bits, in C"  # the largest exponent, in one loop for each tensor
COPYING = "memcpy"


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 4):
        seconds = run_ranks(world_size, on_one_host, rounds, timeout=1200, group_timeout=120)[0]
        result += _rows(f"{world_size} ranks, 37.8M", seconds, ON_ONE_HOST)
    if missing():
        print(f"no link: {missing()}")
        return result
    return result + _rows(RATE, between_hosts(rounds), BETWEEN_HOSTS)


def on_one_host(rounds: int) -> dict[str, list[float]]:
    return measure(rounds, ON_ONE_HOST, lambda: parameters(transformer_shapes()))


def between_hosts(rounds: int) -> dict[str, list[float]]:
    with TwoHosts(RATE) as hosts:
        ranks = [
            hosts.start(on_a_link, rounds, rank=rank, host=rank // 2, size=4) for rank in range(4)
        ]
        first, *_ = (rank.result(timeout=1200) for rank in ranks)
    return dict(first)


def on_a_link(rounds: int) -> dict[str, list[float]]:
    return measure(rounds, BETWEEN_HOSTS, lambda: list(model().parameters()))


def measure(
    rounds: int,
    reducers: dict[str, Reducer | None],
    make: Callable[[], list[torch.nn.Parameter]],
) -> dict[str, list[float]]:
    """Time a sync by every reducer under both policies, each with parameters of its own."""
    warnings.simplefilter("ignore")
    contenders: dict[str, Contender] = {}
    for name, reducer in reducers.items():
        for policy in POLICIES:
            averager = PeriodicModelAverager(1, reducer=reducer, on_nonfinite=policy)
            contenders[f"{name}, {policy}"] = partial(averager.average_parameters, make())
    read = [parameter.detach() for parameter in make()]
    copies = [torch.empty_like(tensor) for tensor in read]
    contenders[READING] = lambda: [tensor.sum() for tensor in read]
    contenders[IN_C] = lambda: [all_finite(tensor) for tensor in read]
    contenders[COPYING] = lambda: [
        to.copy_(tensor) for to, tensor in zip(copies, read, strict=True)
    ]
    return alternate(contenders, rounds)


def _rows(
    condition: str, seconds: dict[str, list[float]], reducers: dict[str, Reducer | None]
) -> list[Row]:
    """Return the times, and of those that were measured in one round the median ratio."""
    result = rows(condition, seconds, [])
    reading = [min(times) for times in zip(seconds[READING], seconds[IN_C], strict=True)]
    for name in reducers:
        passing, looking = (seconds[f"{name}, {policy}"] for policy in POLICIES)
        more = [ours - bare for ours, bare in zip(looking, passing, strict=True)]
        for what, part in (("looking costs", more), ("one reading is", reading)):
            share = [100 * own / bare for own, bare in zip(part, passing, strict=True)]
            low, _, high = statistics.quantiles(share, n=4)
            told = f"{name}: {what}"
            result.append(Row(condition, told, statistics.median(share), (low, high), {}, "%"))
    return result
