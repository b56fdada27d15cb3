"""The same averages on GPUs, where there are any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    ZeroRedundancyOptimizer,
    average_,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from loosestep.reducers import AllReduce, Cast, Mean
from loosestep.testing import RankPool

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"no GPU: {torch.cuda.device_count()} of the two needed"
)


def average_on_gpus(name: str) -> tuple[float, bool]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    reducer: Any = {"mean": Mean(), "native": AllReduce(), "cast": Cast(torch.bfloat16)}[name]
    weights = [torch.full((3, 1000), float(rank), device="cuda"), torch.ones(5, device="cuda")]
    pointers = [weight.data_ptr() for weight in weights]
    average_(weights, group, reducer=reducer)
    torch.cuda.synchronize()
    return float(weights[0].mean()), pointers == [weight.data_ptr() for weight in weights]


@pytest.mark.parametrize("name", ["mean", "native", "cast"])
def test_nccl_averages_in_place(pool: RankPool, name: str) -> None:
    """Two GPUs end with the mean of 0 and 1, in the memory they had."""
    assert pool.run(2, average_on_gpus, name) == [(0.5, True)] * 2


HOOKS = {"last": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


def train_sharded(kind: str) -> torch.Tensor:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    torch.manual_seed(0)
    net = torch.nn.Linear(33, 17).to(device)
    model = DistributedDataParallel(net, device_ids=[device], process_group=group)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind != "plain":
        optimizer = sharded = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, group, overlap_with_ddp=kind in HOOKS, lr=0.1
        )
        if kind in HOOKS:
            model.register_comm_hook(group, HOOKS[kind](allreduce_hook, model, sharded))
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(5, 33, device=device)).square().mean().backward()
        optimizer.step()
    return net.weight.detach().cpu()


@pytest.mark.parametrize("kind", ["step", *HOOKS])
def test_nccl_shards_as_the_plain_optimizer_steps(pool: RankPool, kind: str) -> None:
    """On two GPUs a sharded optimizer gives what the plain one gives."""
    plain = pool.run(2, train_sharded, "plain")
    for ours, theirs in zip(pool.run(2, train_sharded, kind), plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
