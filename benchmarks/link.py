"""One average between two hosts with two ranks each, at 200 and 50 Mbit/s, and hidden behind steps.

The hosts are network namespaces, the link a token bucket in each direction. Every contender
averages the same 4.2M float32 parameters. ``blocked`` is how long the training thread stands still
for an overlapped average; ``step`` is a training step without communication, and one while an
average is under way. ``copy and add`` is the least that an overlapped average must block for: a
snapshot at launch and a sum at landing, by bare torch.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.utils as in_tree

from benchmarks.contenders import alternate, rows
from benchmarks.report import Row
from loosestep import PeriodicModelAverager
from loosestep.comm.group import world_group
from loosestep.reducers import Cast, Int4, Int8, Mean, Reducer, TwoLevel
from tests.support.netns import TwoHosts, missing

RATES = ("200mbit", "50mbit")
LAYERS, WIDTH, BATCH = 16, 512, 192
STEPS = 12  # of training while one average is under way

REDUCERS: dict[str, Reducer] = {
    "exact, all ranks": Mean(),
    "exact, two levels": TwoLevel(),
    "bf16": TwoLevel(Cast(torch.bfloat16)),
    "int8": TwoLevel(Int8()),
    "int4": TwoLevel(Int4()),
}


def run(rounds: int) -> list[Row]:
    if missing():
        print(f"left out: {missing()}")
        return []
    result: list[Row] = []
    for rate in RATES:
        seconds = between_hosts(rate, "averages", min(rounds, 5))
        result += rows(rate, seconds, ["in-tree", "bare all_reduce"])
        hidden = between_hosts(rate, "overlap", min(rounds, 5))
        result += _hidden_rows(rate, hidden, seconds)
    return result


def between_hosts(rate: str, what: str, rounds: int) -> dict[str, list[float]]:
    with TwoHosts(rate) as hosts:
        ranks = [
            hosts.start(measure, what, rounds, rank=rank, host=rank // 2, size=4)
            for rank in range(4)
        ]
        first: dict[str, list[float]]
        first, *_ = (rank.result(timeout=1800) for rank in ranks)
    return first


def measure(what: str, rounds: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    return averages(rounds) if what == "averages" else overlap(rounds)


def model() -> torch.nn.Sequential:
    torch.manual_seed(dist.get_rank())
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def averages(rounds: int) -> dict[str, list[float]]:
    """Time one blocking average by every contender."""
    theirs = model()
    flat = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    contenders: dict[str, Callable[[], object]] = {
        "in-tree": lambda: in_tree.average_parameters(theirs.parameters(), world_group()),
        "bare all_reduce": lambda: dist.all_reduce(flat),
    }
    for name, reducer in REDUCERS.items():
        contenders[name] = average_by(reducer)
    return alternate(contenders, rounds)


def average_by(reducer: Reducer) -> Callable[[], object]:
    """Return an average of parameters that move a little between two averages."""
    net, averager = model(), PeriodicModelAverager(1, reducer=reducer)
    parameters, noise = (
        list(net.parameters()),
        [1e-3 * torch.randn_like(p) for p in net.parameters()],
    )
    averager.average_parameters(parameters)  # the first one is exact
    torch._foreach_add_([p.data for p in parameters], noise)
    return lambda: averager.average_parameters(parameters)


def overlap(rounds: int) -> dict[str, list[float]]:
    """Time steps without communication, steps during an average, and what it blocks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    averager = PeriodicModelAverager(
        STEPS, reducer=TwoLevel(Int4()), overlap_steps=STEPS - 1, module=net
    )
    copies = [torch.zeros_like(p) for p in net.parameters()]
    found: dict[str, list[float]] = {
        name: [] for name in ("step, alone", "step, overlapped", "blocked", "copy and add")
    }
    for round_number in range(rounds + 1):
        dist.barrier()
        alone = [_step(net, optimizer) for _ in range(STEPS)]
        dist.barrier()
        during, blocked = [], 0.0
        for _ in range(STEPS):  # launched at the first, applied at the last
            during.append(_step(net, optimizer))
            began = time.perf_counter()
            averager.average_parameters(net.parameters())
            blocked += time.perf_counter() - began
        if round_number:
            found["step, alone"].append(statistics.mean(alone))
            found["step, overlapped"].append(statistics.mean(during[1:]))
            found["blocked"].append(blocked)
            found["copy and add"].append(_copy_and_add(net, copies))
    return found


@torch.no_grad()
def _copy_and_add(net: torch.nn.Module, copies: list[torch.Tensor]) -> float:
    parameters: list[torch.Tensor] = list(net.parameters())
    dist.barrier()
    began = time.perf_counter()
    torch._foreach_copy_(copies, parameters)
    torch._foreach_add_(parameters, copies)
    elapsed = time.perf_counter() - began
    torch._foreach_sub_(parameters, copies)
    return elapsed


def _step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    optimizer.zero_grad()
    net(torch.ones(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - began


def _hidden_rows(
    rate: str, hidden: dict[str, list[float]], seconds: dict[str, list[float]]
) -> list[Row]:
    alone, during, blocked = (
        hidden[name] for name in ("step, alone", "step, overlapped", "blocked")
    )
    slower = 100 * (statistics.median(during) / statistics.median(alone) - 1)
    shares = {
        f"blocked : {name}": 100 * statistics.median(blocked) / statistics.median(seconds[name])
        for name in ("in-tree", "exact, two levels", "int4")
    }
    return [
        *rows(f"{rate}, int4 + overlap", hidden, []),
        *(Row(rate, name, share, (share, share), {}, "%") for name, share in shares.items()),
        Row(rate, "steps slower by", slower, (slower, slower), {}, "%"),
    ]
