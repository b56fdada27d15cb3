"""What does not show in a mean: how tensors are cut, and the way that bytes travel.

What becomes of a value depends on its tensor and on its offset there. So the size of windows and of
gradient buckets, strides, who owns which slice, and memory or network leave the result as it is, to
the bit, for every reducer.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import attach, ddp, gradient_hook
from loosestep.comm.group import Group, peers_of
from loosestep.gradients import plain, reducing
from loosestep.reducers import (
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    RandomMask,
    RanksOfHost,
    Reducer,
    ReplicaFeedback,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.sync.averager import Averager
from loosestep.sync.kept import Kept
from loosestep.testing import RankPool

REDUCERS: dict[str, Reducer] = {
    "mean": Mean(),
    "two levels": TwoLevel(ranks_per_host=2),
    "cast": Cast(torch.bfloat16),
    "cast int4": Cast(torch.bfloat16, Int4()),
    "two levels, cast": TwoLevel(Cast(torch.float16), ranks_per_host=2),
    "int8": Int8(),
    "int8 of 100": Int8(100),
    "chance": Int4(rounding="stochastic"),
    "int2": Int2(),
    "ternary": Ternary(rounding="stochastic"),
    "topk": TopK(0.03),
    "topk of 100": TopK(0.25, 100),
    "feedback": ErrorFeedback(Int2()),
    "feedback, cast": ErrorFeedback(Cast(torch.bfloat16)),
    "feedback, topk": ErrorFeedback(TopK(0.05)),
    "topk back": TopK(0.03, gather=False),
    "sparse": ErrorFeedback(TopK(64 / 4096, bits=2), decay=0.95),
    "mask": RandomMask(0.05),
    "replica": ReplicaFeedback(Int4()),
    "two levels, int4": TwoLevel(Int4(), ranks_per_host=2),
    "two levels, chance": TwoLevel(Int4(rounding="stochastic"), ranks_per_host=2),
    "two levels, feedback": TwoLevel(ErrorFeedback(Int4()), ranks_per_host=2),
    "two levels, topk": TwoLevel(ErrorFeedback(TopK(0.05)), ranks_per_host=2),
    "agree, chance": TwoLevel(Int4(rounding="stochastic"), ranks_of_host="equal", ranks_per_host=2),
    "agree, feedback": TwoLevel(ErrorFeedback(Int4()), ranks_of_host="equal", ranks_per_host=2),
    "agree, replica": TwoLevel(ReplicaFeedback(TopK(0.1)), ranks_of_host="equal", ranks_per_host=2),
}
SHAPES = [(9_001,), (), (7,), (33, 65), (0,), (5, 3, 2), (40, 30, 5)]
WINDOWS = [4 << 20, 30_000, 8_000, 1_000]
WAYS = ["memory", "network"]


def means(
    reducer: Reducer, window_bytes: int, way: str, shapes: list[tuple[int, ...]], strided: int = -1
) -> str:
    """Average three times; return a hash of all that comes out.

    Rank ``strided`` keeps what has several dimensions in another order.
    """
    rank = dist.get_rank()
    agree = isinstance(reducer, TwoLevel) and reducer.ranks_of_host is RanksOfHost.EQUAL
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOSESTEP_SHARED_MEMORY", "1" if way == "memory" else "0")
        peers = peers_of(Group.make(tuple(range(dist.get_world_size())), 20), timeout=20)
        averager = Averager(peers, reducer=reducer, kept=Kept(), window_bytes=window_bytes)
        generator = torch.Generator().manual_seed(rank // 2 if agree else rank)
        tensors = [(f"{i} {shape}", torch.zeros(shape)) for i, shape in enumerate(shapes)]
        if rank == strided:
            tensors = [(name, t.mT.contiguous().mT if t.ndim > 1 else t) for name, t in tensors]
        for _ in range(3):
            for _, tensor in tensors:
                tensor.add_(torch.randn(tensor.shape, generator=generator))
            averager.average(tensors)
    content = hashlib.sha256()
    for _, tensor in tensors:
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize("name", REDUCERS)
def test_neither_windows_nor_ways_show(pool: RankPool, name: str) -> None:
    """One hash for every size of windows, through memory and by the network."""
    reducer = REDUCERS[name]
    cuts = zip(WINDOWS, itertools.cycle(WAYS))
    found = [pool.run(4, means, reducer, *cut, SHAPES) for cut in cuts]
    found.append(pool.run(4, means, reducer, 30_000, "network", SHAPES))
    assert all(hashes == found[0] for hashes in found)
    assert reducer.leaves_apart or len(set(found[0])) == 1


@pytest.mark.parametrize("name", ["int8", "chance", "two levels, feedback", "two levels, topk"])
def test_windows_beyond_those_in_memory_do_not_show(pool: RankPool, name: str) -> None:
    """Where a host takes a window in pieces, and where it need not."""
    cuts = [(4 << 20, "memory"), (1 << 20, "network"), (2 << 20, "memory")]
    found = [pool.run(4, means, REDUCERS[name], *cut, [(700_001,), (9, 3)]) for cut in cuts]
    assert found[0] == found[1] == found[2]


def search(pool: RankPool, seed: int, num_cuts: int) -> None:
    """Compare some ways to cut random shapes, on a random number of ranks."""
    draw = random.Random(seed)
    name = draw.choice([name for name in REDUCERS if "two" not in name and "agree" not in name])
    world, reducer = draw.choice([2, 3, 4]), REDUCERS[name]
    if draw.random() < 0.4:
        world, (name, reducer) = 4, draw.choice(list(REDUCERS.items())[-7:])
    sizes = [0, 1, 2, 3, 7, 16, 31, 64, 100, 257]
    shapes = [
        tuple(draw.choice(sizes) for _ in range(draw.choice([0, 1, 1, 2, 2, 3])))
        for _ in range(draw.randint(1, 12))
    ]
    shapes = [shape for shape in shapes if torch.Size(shape).numel() < 100_000]
    shapes.append((draw.randint(1, 30_000),))
    found = {}
    for _ in range(num_cuts):
        window_bytes, way = (
            draw.choice([400, 1000, 5000, 17_000, 70_000, 4 << 20]),
            draw.choice(WAYS),
        )
        strided = draw.randrange(-1, world)
        found[window_bytes, way, strided] = pool.run(
            world, means, reducer, window_bytes, way, shapes, strided
        )
    assert len(set(map(tuple, found.values()))) == 1, (seed, name, world, shapes, found)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(pool: RankPool, seed: int) -> None:
    """Many tensors of odd shapes, some of them strided on one rank."""
    search(pool, seed, 3)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_more_random_shapes(pool: RankPool, seed: int) -> None:
    """The same for longer."""
    search(pool, seed, 5)


# Gradients.

GRADIENT_REDUCERS: dict[str, Reducer] = {
    "int8": Int8(),
    "chance": Int4(rounding="stochastic"),
    "topk": ErrorFeedback(TopK(0.05)),
    "two levels": TwoLevel(ErrorFeedback(Ternary()), ranks_per_host=2),
}


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Train a few steps; return a hash of the parameters."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()
    content = hashlib.sha256()
    for parameter in net.parameters():
        content.update(parameter.detach().numpy().tobytes())
    return content.hexdigest()


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(50, 101), torch.nn.Tanh(), torch.nn.Linear(101, 33), torch.nn.Linear(33, 7)
    )


def plainly(reducer: Reducer, bucket_bytes: int) -> str:
    """Share the gradients of a plain module in buckets of such a size."""
    net = make_net()
    patched = mock.patch.multiple(plain, SMALL_BUCKET=bucket_bytes)
    with patched, mock.patch.multiple(reducing, LOSSY_BYTES=bucket_bytes):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with attach(net, optimizer, ddp(gradient_reducer=reducer)):
            return train(net, optimizer)


def by_hook(reducer: Reducer, bucket_megabytes: float) -> str:
    """Share the gradients of a DDP module."""
    net = DistributedDataParallel(make_net(), bucket_cap_mb=bucket_megabytes)
    state, hook = gradient_hook(reducer)
    net.register_comm_hook(state, hook)
    try:
        return train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    finally:
        state.close()


@pytest.mark.parametrize("name", GRADIENT_REDUCERS)
def test_buckets_of_a_plain_module_do_not_show(pool: RankPool, name: str) -> None:
    """One parameter each, some, or all of them together."""
    sizes = [100, 10_000, 1 << 20]
    found = [pool.run(4, plainly, GRADIENT_REDUCERS[name], size) for size in sizes]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 1


@pytest.mark.parametrize("name", GRADIENT_REDUCERS)
def test_buckets_of_ddp_do_not_show(pool: RankPool, name: str) -> None:
    """Nor those that DDP makes after its first backward."""
    sizes = [0.0001, 0.01, 25.0]
    found = [pool.run(4, by_hook, GRADIENT_REDUCERS[name], size) for size in sizes]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 1
