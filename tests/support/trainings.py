"""Some forty short trainings, one for each way to train, whose results are kept as hashes.

The model uses nothing whose result depends on the processor: products and sums of elements, and
neither matrix products nor sums over many elements in what reaches a parameter.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import loosestep as ls
from loosestep import schedules
from loosestep.reducers import (
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    RandomMask,
    ReplicaFeedback,
    SharedMemoryMean,
    Ternary,
    TopK,
    TwoLevel,
)

STEPS = 8
SPARSE = ErrorFeedback(TopK(64 / 4096, bits=2), decay=0.95)
SHAPES = {"matrix": (37, 29), "vector": (101,), "scalar": (), "cube": (5, 7, 3), "large": (3000,)}


class Elements(torch.nn.Module):
    """Parameters of odd shapes, one of them in bfloat16, and two buffers."""

    running: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.rand(shape) - 0.5))
        self.narrow = torch.nn.Parameter((torch.rand(50) - 0.5).bfloat16())
        self.register_buffer("running", torch.zeros(9))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        """Return a loss whose gradients are products of elements."""
        total = torch.zeros(())
        for parameter in self.parameters():
            inputs, wanted = torch.rand((2, *parameter.shape), generator=generator).to(
                parameter.dtype
            )
            error = parameter * inputs - wanted
            total = total + (error * error).sum().float()
        self.running.mul_(0.75).add_(torch.rand(9, generator=generator))
        self.count.add_(1)
        return total


@dataclass(frozen=True)
class Case:
    """A training: on how many ranks, by which transport, and what trains."""

    ranks: int
    train: Callable[[], torch.nn.Module]
    transport: str = "shared memory"


def result_of(name: str) -> str:
    """Train as one of the ranks of a case; return what this rank ends with, as two hashes."""
    case = CASES[name]
    if case.transport == "sockets":
        os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.LoosestepWarning)  # said of torch's names used alone
        model = case.train()
    return f"{hash_of(model.parameters())}/{hash_of(model.buffers())}"


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the hash of the tensors' bytes, in their order."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(bytes(tensor.detach().flatten().view(torch.uint8).tolist()))
    return content.hexdigest()[:12]


def step_through(model: torch.nn.Module, optimizer: torch.optim.Optimizer, after: Any = None):
    """Take the steps of a plain loop."""
    for step in range(STEPS):
        optimizer.zero_grad()
        seed = 1000 * dist.get_rank() + step
        model(torch.Generator().manual_seed(seed)).backward()
        optimizer.step()
        if after is not None:
            after()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def topology() -> ls.Topology:
    """Pairs, of which the last may be one rank alone, and the world."""
    ranks = list(range(dist.get_world_size()))
    pairs = [ranks[at : at + 2] for at in range(0, len(ranks), 2)]
    return ls.Topology({"pair": pairs, "world": [ranks]})


def attached(make: Callable[[ls.Topology], ls.Strategy]) -> Callable[[], torch.nn.Module]:
    """Train a plain module with a strategy."""

    def train() -> torch.nn.Module:
        model = Elements()
        optimizer = sgd(model)
        with ls.attach(model, optimizer, make(topology())) as run:
            step_through(model, optimizer)
            run.finalize()
        return model

    return train


def recipe(make: Callable[..., ls.Strategy], *args: Any, **options: Any) -> Any:
    """Train with a recipe."""
    return attached(lambda levels: make(*args, topology=levels, **options))


def averaged_by(reducer: Callable[[], Any], **options: Any) -> Callable[[], torch.nn.Module]:
    """Train with parameters averaged every three steps by a reducer."""
    settings = {"warmup_steps": 0, "gradients": None} | options
    return attached(
        lambda levels: ls.post_local_sgd(3, topology=levels, reducer=reducer(), **settings)
    )


def gradients_by(reducer: Callable[[], Any]) -> Callable[[], torch.nn.Module]:
    """Train with gradients shared at every step by a reducer."""
    return attached(lambda levels: ls.ddp(topology=levels, gradient_reducer=reducer()))


def state_averaged(levels: ls.Topology) -> ls.Strategy:
    return ls.Strategy(
        schedule=schedules.every(3), topology=levels, optimizer_state="average", buffers="broadcast"
    )


def gradient_hook() -> torch.nn.Module:
    model = Elements()
    wrapped = DistributedDataParallel(model)
    hook = ls.gradient_hook(ErrorFeedback(Int8()))
    wrapped.register_comm_hook(*hook)
    step_through(wrapped, sgd(model))
    return model


def zero_step() -> torch.nn.Module:
    model = Elements()
    wrapped = DistributedDataParallel(model)
    step_through(wrapped, sharded(model))
    return model


def sharded(model: torch.nn.Module, **options: Any) -> ls.ZeroRedundancyOptimizer:
    return ls.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.125, momentum=0.5, **options
    )


def zero_hook(hook: Callable[..., Any]) -> Callable[[], torch.nn.Module]:
    """Train with a sharded step inside DDP's backward."""

    def train() -> torch.nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model = Elements()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
        optimizer = sharded(model, overlap_with_ddp=True)
        wrapped.register_comm_hook(None, hook(allreduce_hook, wrapped, optimizer))
        step_through(wrapped, optimizer)
        return model

    return train


def zero_attached(period: int | None) -> Callable[[], torch.nn.Module]:
    """Train a plain module with a sharded optimizer: over the world, or over pairs."""

    def train() -> torch.nn.Module:
        levels, model = topology(), Elements()
        level = "world" if period is None else "pair"
        optimizer = sharded(model, process_group=levels.process_group(level))
        strategy = ls.zero(period, gradients=level, topology=levels)
        with ls.attach(model, optimizer, strategy) as run:
            step_through(model, optimizer)
            run.finalize()
        return model

    return train


def periodic() -> torch.nn.Module:
    model = Elements()
    averager = ls.PeriodicModelAverager(period=3, warmup_steps=1)
    step_through(model, sgd(model), lambda: averager.average_parameters(model.parameters()))
    return model


def hierarchical() -> torch.nn.Module:
    model = Elements()
    averager = ls.HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=1)
    step_through(model, sgd(model), lambda: averager.average_parameters(model.parameters()))
    return model


def post_local() -> torch.nn.Module:
    model = Elements()
    wrapped = DistributedDataParallel(model)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = ls.PostLocalSGDState(None, pairs[dist.get_rank() // 2], start_localSGD_iter=2)
    wrapped.register_comm_hook(state, ls.post_localSGD_hook)
    averager = ls.PeriodicModelAverager(period=3, warmup_steps=2)
    step_through(wrapped, ls.PostLocalSGDOptimizer(sgd(model), averager))
    return model


def free_function() -> torch.nn.Module:
    model = Elements()
    step_through(model, sgd(model), lambda: ls.average_parameters(iter(model.parameters()), None))
    return model


CASES: dict[str, Case] = {
    # Recipes
    "ddp, 2": Case(2, attached(lambda levels: ls.ddp(topology=levels))),
    "ddp, 3": Case(3, gradients_by(Mean)),
    "post_local_sgd, 4": Case(
        4,
        attached(
            lambda levels: ls.post_local_sgd(
                3,
                warmup_steps=2,
                gradients="pair",
                topology=levels,
                gradient_reducer=Mean(),
            )
        ),
    ),
    "local sgd, 2": Case(2, averaged_by(TwoLevel)),
    "local sgd, 3": Case(3, averaged_by(TwoLevel)),
    "local sgd, 3, sockets": Case(3, averaged_by(TwoLevel), "sockets"),
    "hierarchical_sgd, 4": Case(
        4, attached(lambda levels: ls.hierarchical_sgd({"pair": 2, "world": 4}, topology=levels))
    ),
    "hierarchical_sgd, 3, sockets": Case(
        3,
        attached(lambda levels: ls.hierarchical_sgd({"pair": 2, "world": 4}, topology=levels)),
        "sockets",
    ),
    "optimizer state and buffers, 2": Case(2, attached(state_averaged)),
    "diloco, 3": Case(3, recipe(ls.diloco, 3)),
    "diloco, overlapped, 2, sockets": Case(2, recipe(ls.diloco, 3, overlap_steps=2), "sockets"),
    "streaming_diloco, 2": Case(2, recipe(ls.streaming_diloco, 4, 2, overlap_steps=3)),
    "slowmo, 2": Case(2, recipe(ls.slowmo, 3)),
    "snoo, 2": Case(2, recipe(ls.snoo, 3, gradient_reducer=Mean())),
    "muloco, 3": Case(3, recipe(ls.muloco, 3, reducer=ErrorFeedback(Int2()))),
    "sparseloco, 2": Case(2, recipe(ls.sparseloco, 3, reducer=SPARSE)),
    "desloc, 2": Case(2, recipe(ls.desloc, 2, optimizer_state={"momentum_buffer": 2})),
    "noloco, 2": Case(2, recipe(ls.noloco, 3)),
    "noloco, 4, sockets": Case(4, recipe(ls.noloco, 3), "sockets"),
    "drift, 2": Case(2, recipe(ls.diloco, schedules.drift(0.05, start=3))),
    # Overlap
    "overlap, 2": Case(2, averaged_by(Mean, overlap_steps=2)),
    "overlap by int4, 4, sockets": Case(4, averaged_by(Int4, overlap_steps=1), "sockets"),
    "hierarchical overlap, 4": Case(
        4,
        attached(
            lambda levels: ls.hierarchical_sgd(
                {"pair": 2, "world": 6}, topology=levels, overlap_steps=2
            )
        ),
    ),
    # Reducers of parameters
    "mean, 4": Case(4, averaged_by(Mean)),
    "resident, 4": Case(4, averaged_by(SharedMemoryMean)),
    "cast, 2": Case(2, averaged_by(lambda: Cast(torch.bfloat16))),
    "int8, 3": Case(3, averaged_by(Int8)),
    "int4, 2": Case(2, averaged_by(Int4)),
    "int4, 4, sockets": Case(4, averaged_by(Int4), "sockets"),
    "int4, stochastic, 3": Case(3, averaged_by(lambda: Int4(rounding="stochastic"))),
    "int2, 3": Case(3, averaged_by(Int2)),
    "ternary, 2": Case(2, averaged_by(Ternary)),
    "topk, 3": Case(3, averaged_by(lambda: TopK(0.1))),
    "int4 with feedback, 4": Case(4, averaged_by(lambda: ErrorFeedback(Int4()))),
    "topk with feedback, 2": Case(2, averaged_by(lambda: ErrorFeedback(TopK(0.1)))),
    "int2 with replica feedback, 2": Case(2, averaged_by(lambda: ReplicaFeedback(Int2()))),
    "two levels, int4, 4": Case(4, averaged_by(lambda: TwoLevel(Int4(), ranks_per_host=2))),
    "two levels, int4, 4, sockets": Case(
        4, averaged_by(lambda: TwoLevel(Int4(), ranks_per_host=2)), "sockets"
    ),
    # Reducers of gradients
    "gradients by int8, 2": Case(2, gradients_by(lambda: ErrorFeedback(Int8()))),
    "gradients resident, 2": Case(2, gradients_by(SharedMemoryMean)),
    "gradients by int4, 4": Case(
        4, gradients_by(lambda: TwoLevel(ErrorFeedback(Int4()), ranks_per_host=2))
    ),
    "gradients resident, by int4, 4": Case(
        4,
        gradients_by(
            lambda: TwoLevel(ErrorFeedback(Int4()), ranks_per_host=2, inside=SharedMemoryMean())
        ),
    ),
    "gradient_hook, 2": Case(2, gradient_hook),
    # Sharded optimizers
    "ZeroRedundancyOptimizer, 3": Case(3, zero_step),
    "hook_with_zero_step, 2": Case(2, zero_hook(ls.hook_with_zero_step)),
    "hook_with_zero_step, 4": Case(4, zero_hook(ls.hook_with_zero_step)),
    "hook_with_zero_step_interleaved, 2": Case(2, zero_hook(ls.hook_with_zero_step_interleaved)),
    "hook_with_zero_step_interleaved, 4, sockets": Case(
        4, zero_hook(ls.hook_with_zero_step_interleaved), "sockets"
    ),
    "zero, 3": Case(3, zero_attached(None)),
    "RandomMask, 3": Case(3, averaged_by(lambda: RandomMask(0.1))),
    "zero with a period, 4": Case(4, zero_attached(3)),
    # Names of torch.distributed
    "PeriodicModelAverager, 3": Case(3, periodic),
    "HierarchicalModelAverager, 4": Case(4, hierarchical),
    "PostLocalSGDOptimizer, 4": Case(4, post_local),
    "average_parameters, 3": Case(3, free_function),
}
