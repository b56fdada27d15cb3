"""Many iterations with ranks that are late at random: no hang, and all ranks the same."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep.testing import RankPool
from tests.support.zero_hooks import Overlapped, Setup, both
from tests.support.zero_models import WIDTH

WORLD_SIZE = 4
LATE_EVERY = 20  # steps, on average
LATE_SECONDS = 0.003  # at most


class Lateness:
    """One rank, another one each time, sleeps before forward or in the middle of backward."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._in_backward = 0.0

    def before_forward(self) -> None:
        rank = self._chance.randrange(LATE_EVERY * WORLD_SIZE)
        seconds, inside = self._chance.uniform(0.0, LATE_SECONDS), self._chance.random() < 0.5
        if rank == dist.get_rank():
            time.sleep(0.0 if inside else seconds)
            self._in_backward = seconds if inside else 0.0

    def in_backward(self, *_: Any) -> None:
        time.sleep(self._in_backward)
        self._in_backward = 0.0


def train_for_long(hook: str, seed: int, num_steps: int) -> tuple[bool, int, int]:
    """Return whether parameters are finite, how many buckets there are, and a sum of all bits."""
    setup = Setup("layers", "SGD", {"bucket_cap_mb": 0.01}, zero_grad="never", calls_step=False)
    side, lateness = Overlapped(setup, None, hook), Lateness(seed)
    middle: Any = side.model.layers[2]  # type: ignore[index]
    middle.register_full_backward_pre_hook(lateness.in_backward)
    noise = torch.Generator().manual_seed(seed * WORLD_SIZE + dist.get_rank())
    for step in range(num_steps):
        lateness.before_forward()
        side.iterate([torch.randn(1, WIDTH, generator=noise)], step)
    facts: Any = side.ddp._get_ddp_logging_data()
    weights = torch.nn.utils.parameters_to_vector(side.ddp.parameters()).detach()
    bits = int(weights.view(torch.int32).long().sum())
    return bool(weights.isfinite().all()), len(facts["rebuilt_bucket_sizes"].split(",")), bits


@both
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_thousand_iterations(pool: RankPool, hook: str, seed: int) -> None:
    """Ranks that are late at random steps change nothing: all end with the same parameters."""
    check(pool.run(WORLD_SIZE, train_for_long, hook, seed, 1000, timeout=350.0))


@both
def test_a_hundred_iterations(pool: RankPool, hook: str) -> None:
    """The same, for a start."""
    check(pool.run(WORLD_SIZE, train_for_long, hook, 4, 100))


def check(seen: list[tuple[bool, int, int]]) -> None:
    finite, num_buckets, bits = seen[0]
    assert finite
    assert num_buckets >= 3
    assert [other[2] for other in seen] == [bits] * WORLD_SIZE
