"""Means of values near the end of a dtype's range are finite, whatever their sum is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from loosestep import average_
from loosestep.comm.reducers import mean_into
from loosestep.comm.reducers.mean import reduce_into
from loosestep.reducers import Cast, ErrorFeedback, Mean, Reducer, TwoLevel
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.bfloat16).max
# Value by value: three large ones, the largest there are, some that cancel, small ones, and what
# is not finite.
REPLICAS = torch.tensor(
    [
        [1.5e38, LARGEST, 3e38, 1.0, INF, NAN, INF],
        [1.5e38, LARGEST, 3e38, 2.0, 1e38, 1.0, -INF],
        [1.5e38, LARGEST, -3e38, 3.0, 1e38, 1.0, 1.0],
    ]
).bfloat16()
MEANS = torch.tensor([1.5e38, LARGEST, 1e38, 2.0, INF, NAN, NAN]).bfloat16()
REDUCERS: list[Reducer] = [
    Mean(),
    Cast(torch.bfloat16),
    ErrorFeedback(Cast(torch.bfloat16)),
    TwoLevel(),
    TwoLevel(Cast(torch.bfloat16)),
]


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 1.0], [1e30, 1e30, 1e30]])
def test_means_of_bfloat16_are_finite_where_their_sum_is_not(weights: list[float] | None) -> None:
    """A sum beyond float32 is taken anew, in C as in plain torch."""
    plain, fused = torch.empty(7).bfloat16(), torch.empty(7).bfloat16()
    mean_into(plain, list(REPLICAS), weights)
    reduce_into([fused], list(REPLICAS), weights)
    torch.testing.assert_close(plain, MEANS, rtol=0.01, atol=0.0, equal_nan=True)
    torch.testing.assert_close(fused, plain, rtol=0.0, atol=0.0, equal_nan=True)


def average_large_values() -> list[list[float]]:
    results = []
    for reducer in REDUCERS:
        for dtype in (torch.float32, torch.bfloat16):
            value = REPLICAS[dist.get_rank(), :4].to(dtype, copy=True)
            average_([value], reducer=reducer)
            results.append(value.tolist())
    return results


def test_every_reducer_leaves_large_values_finite(pool: RankPool) -> None:
    """Three ranks near 1e38 get their mean by every reducer that keeps the range of float32."""
    expected = MEANS[:4].tolist()
    for results in pool.run(3, average_large_values):
        for result in results:
            assert result == pytest.approx(expected, rel=0.01)
