"""Between hosts: a sharded step inside backward sends as many bytes as DDP alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep.sharding.hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from loosestep.sharding.optimizer import ZeroRedundancyOptimizer
from tests.support.netns import TwoHosts, missing, sent

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

WIDTH, NUM_LAYERS = 512, 6  # 6 MB in 6 layers
NUM_STEPS = 5


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts and a cable between them, for one test."""
    with TwoHosts() as pair:
        yield pair


def make(way: str, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    """Return an optimizer that steps the model in one of four ways."""
    if way == "ddp":
        return torch.optim.AdamW(ddp.parameters())
    overlap = way != "at step"
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=overlap)
    if overlap:
        hook = hook_with_zero_step if way == "last" else hook_with_zero_step_interleaved
        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero))
    return zero


def bytes_an_iteration(way: str, **options: Any) -> float:
    """Return what this host sends in an iteration, as the kernel counts it, in model sizes."""
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1, **options)
    optimizer = make(way, ddp)
    for step in range(2 + NUM_STEPS):
        if step == 2:  # groups are made and buckets are rebuilt
            dist.barrier()
            before = sent()
        optimizer.zero_grad()
        ddp(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    dist.barrier()
    after = sent()
    again = after.again - before.again
    size = sum(parameter.nbytes for parameter in ddp.parameters())
    return (after.in_all - before.in_all - again) / NUM_STEPS / size


def count_all() -> dict[str, float]:
    ways = {way: bytes_an_iteration(way) for way in ("ddp", "last", "interleaved", "at step")}
    unused = bytes_an_iteration("interleaved", find_unused_parameters=True)
    return ways | {"unused": unused}


def test_a_sharded_step_sends_what_ddp_sends(hosts: TwoHosts) -> None:
    """Gradients to their owners and parameters back are an all-reduce; whole gradients are more."""
    ranks = [hosts.start(count_all, rank=r, host=r, size=2) for r in (0, 1)]
    for rank in ranks:
        counted = rank.result(timeout=60)
        print(counted)
        # 2 (n - 1) / n of the model for n = 2 hosts is the model.
        assert counted["ddp"] == pytest.approx(1.0, rel=0.03)
        for way in ("last", "interleaved", "unused"):
            assert counted[way] <= 1.03 * counted["ddp"]
        assert counted["at step"] == pytest.approx(1.5 * counted["ddp"], rel=0.03)
