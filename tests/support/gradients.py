"""Trainings whose gradients a reducer shares."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import Strategy, Topology, attach
from loosestep.reducers import (
    ErrorFeedback,
    Int4,
    Int8,
    Mean,
    Reducer,
    SharedMemoryMean,
    Ternary,
    TwoLevel,
)
from loosestep.schedules import after, always, every
from tests.support.oracle import loss_of, make_net, sgd, snapshot

STEPS = 9


REDUCERS: dict[str, Reducer] = {
    "mean": Mean(),
    "resident": SharedMemoryMean(),
    "int8": Int8(),
    "int4 + feedback": ErrorFeedback(Int4()),
    "between hosts": TwoLevel(Ternary(), ranks_per_host=1),
    "in rooms": TwoLevel(Ternary(), inside=SharedMemoryMean(), ranks_per_host=2),
}


def strategy_of(reducer: str, ranks: list[int]) -> Strategy:
    """Share gradients with all for three steps, then inside pairs, and average at times."""
    pairs = [ranks[i : i + 2] for i in range(0, len(ranks), 2)]
    return Strategy(
        schedule=after(3, every(4, "world", gradients="pair"), always(gradients="world")),
        topology=Topology({"pair": pairs, "world": [ranks]}, timeout=20),
        gradient_reducer=REDUCERS[reducer],
    )


def train(
    reducer: str, kind: str, ranks: list[int], stop: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train, and if asked stop after some steps, save, and go on in a new run."""
    if dist.get_rank() not in ranks:
        return {}, {}
    saved: Any = None
    bounds = [(0, STEPS)] if stop is None else [(0, stop), (stop, STEPS)]
    for first, last in bounds:
        net: torch.nn.Module = make_net()
        net = DistributedDataParallel(net) if kind == "ddp" else net
        optimizer = sgd(net)
        with attach(net, optimizer, strategy_of(reducer, ranks)) as run:
            if saved is not None:
                saved.seek(0)
                state = torch.load(saved, weights_only=True)
                net.load_state_dict(state["net"])
                optimizer.load_state_dict(state["optimizer"])
                run.load_state_dict(state["run"])
            for step in range(first, last):
                optimizer.zero_grad()
                loss_of(net, dist.get_rank(), step).backward()
                optimizer.step()
            saved = io.BytesIO()
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "run": run.state_dict()}, saved)
            metrics = run.metrics()
    return snapshot(getattr(net, "module", net)), metrics


def parameters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in state.items() if "running" not in n and "num_batches" not in n}
