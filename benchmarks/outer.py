"""A sync of ``diloco`` beside a plain one and one pass of its outer optimizer.

37.8M parameters on 2 and 4 ranks of one host. The pass is ``torch.optim.SGD`` with Nesterov
momentum over as many float32 values on every rank at once, from gradients that are there: a sync
with an outer optimizer has to do that besides, and also has to take the differences and to write
the result back. ``of both together`` says what it takes of the plain sync and the pass.
"""

from __future__ import annotations

import statistics
import warnings

import torch

from benchmarks.contenders import Contender, alternate, parameters, rows, transformer_shapes
from benchmarks.report import Row
from loosestep import Strategy, attach, diloco, post_local_sgd
from loosestep.testing import run_ranks

PLAIN, OUTER, PASS = "plain mean", "diloco", "one pass of SGD with Nesterov momentum"


def run(rounds: int) -> list[Row]:
    result: list[Row] = []
    for world_size in (2, 4):
        seconds = run_ranks(world_size, measure, rounds, timeout=1200, group_timeout=120)[0]
        condition = f"{world_size} ranks, 37.8M"
        result += rows(condition, seconds, [])
        times = zip(seconds[OUTER], seconds[PLAIN], seconds[PASS], strict=True)
        shares = [100 * outer / (plain + once) for outer, plain, once in times]
        low, _, high = statistics.quantiles(shares, n=4)
        middle = statistics.median(shares)
        result.append(Row(condition, f"{OUTER}: of both together", middle, (low, high), {}, "%"))
    return result


def measure(rounds: int) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    plain, outer = post_local_sgd(1, gradients=None), diloco(1)
    return alternate({PLAIN: syncing(plain), OUTER: syncing(outer), PASS: stepping()}, rounds)


def syncing(strategy: Strategy) -> Contender:
    """Return a step that is a sync and nothing else: no parameter has a gradient."""
    model = torch.nn.ParameterList(parameters(transformer_shapes()))
    optimizer = torch.optim.SGD(model.parameters())
    attach(model, optimizer, strategy)
    return optimizer.step


def stepping() -> Contender:
    anchors = parameters(transformer_shapes())
    for anchor in anchors:
        anchor.grad = torch.randn_like(anchor)
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True).step
