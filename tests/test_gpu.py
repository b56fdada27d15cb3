"""The same averages on GPUs, where there are any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import Cast, Mean, Native, average_
from loosestep.testing import RankPool

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"no GPU: {torch.cuda.device_count()} of the two needed"
)


def average_on_gpus(name: str) -> tuple[float, bool]:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    reducer: Any = {"mean": Mean(), "native": Native(), "cast": Cast(torch.bfloat16)}[name]
    weights = [torch.full((3, 1000), float(rank), device="cuda"), torch.ones(5, device="cuda")]
    pointers = [weight.data_ptr() for weight in weights]
    average_(weights, group, reducer=reducer)
    torch.cuda.synchronize()
    return float(weights[0].mean()), pointers == [weight.data_ptr() for weight in weights]


@pytest.mark.parametrize("name", ["mean", "native", "cast"])
def test_nccl_averages_in_place(pool: RankPool, name: str) -> None:
    """Two GPUs end with the mean of 0 and 1, in the memory they had."""
    assert pool.run(2, average_on_gpus, name) == [(0.5, True)] * 2
