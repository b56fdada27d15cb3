"""What does not show in a mean: the way that bytes travel, and for some reducers how they are cut.

A codec's blocks, the largest of a part and what is drawn by chance still go by windows: there the
size of a window shows, and only the way must not.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from loosestep.comm.group import Group, peers_of
from loosestep.reducers import (
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    Reducer,
    ReplicaFeedback,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.sync.averager import Averager
from loosestep.sync.kept import Kept
from loosestep.testing import RankPool

BY_VALUE: dict[str, Reducer] = {
    "mean": Mean(),
    "two levels": TwoLevel(ranks_per_host=2),
    "cast": Cast(torch.bfloat16),
    "two levels, cast": TwoLevel(Cast(torch.float16), ranks_per_host=2),
}
BY_PART: dict[str, Reducer] = {
    "int8": Int8(),
    "chance": Int4(rounding="stochastic"),
    "ternary": Ternary(),
    "topk": TopK(0.03),
    "feedback": ErrorFeedback(Int2()),
    "two levels": TwoLevel(Int4(), ranks_per_host=2),
    "two levels, feedback": TwoLevel(ErrorFeedback(Int4()), ranks_per_host=2),
    "two levels, replica": TwoLevel(ReplicaFeedback(Int4()), hosts="agree", ranks_per_host=1),
}
SMALL = [(), (7,), (33, 65), (0,), (5, 3, 2)]


def means(reducer: Reducer, window_bytes: int, way: str) -> str:
    """Average twice; return a hash of all that comes out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOSESTEP_SHARED_MEMORY", "1" if way == "memory" else "0")
        peers = peers_of(Group.make(tuple(range(dist.get_world_size())), 20), timeout=20)
        averager = Averager(peers, reducer=reducer, kept=Kept(), window_bytes=window_bytes)
        generator = torch.Generator().manual_seed(dist.get_rank())
        # More than a window of memory, or than one of a few kilobytes.
        shapes = [(700_001 if window_bytes > 1 << 20 else 20_001,), *SMALL]
        tensors = [(str(shape), torch.zeros(shape)) for shape in shapes]
        for _ in range(2):
            for _, tensor in tensors:
                tensor.add_(torch.randn(tensor.shape, generator=generator))
            averager.average(tensors)
    content = hashlib.sha256()
    for _, tensor in tensors:
        content.update(tensor.numpy().tobytes())
    return content.hexdigest()


@pytest.mark.parametrize("name", BY_VALUE)
def test_neither_windows_nor_ways_show(pool: RankPool, name: str) -> None:
    """Where every value is treated by itself."""
    for cuts in (
        [(4 << 20, "memory"), (2 << 20, "network")],
        [(8_000, "memory"), (30_000, "network")],
    ):
        found = [pool.run(4, means, BY_VALUE[name], *cut) for cut in cuts]
        assert found[0] == found[1]
        assert len(set(found[0])) == 1


@pytest.mark.parametrize(
    ("name", "window_bytes"),
    [*((name, 30_000) for name in BY_PART), ("int8", 4 << 20), ("two levels", 4 << 20)],
)
def test_ways_do_not_show(pool: RankPool, name: str, window_bytes: int) -> None:
    """Through memory, whose windows are smaller, or by the network."""
    reducer = BY_PART[name]
    by_memory, by_network = (
        pool.run(4, means, reducer, window_bytes, way) for way in ("memory", "network")
    )
    assert by_memory == by_network
    assert reducer.leaves_apart or len(set(by_memory)) == 1
