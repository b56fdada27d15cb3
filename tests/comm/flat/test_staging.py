"""Buffers that are used again."""

from __future__ import annotations

import pytest
import torch

from loosestep.comm.flat.staging import Pool

pytestmark = pytest.mark.fast


def test_a_pool_gives_the_same_memory_again() -> None:
    """What was given back is taken again, also as another dtype."""
    pool = Pool()
    first = pool.take(100, torch.float32, torch.device("cpu"))
    address = first.data_ptr()
    pool.give(first)
    second = pool.take(50, torch.float64, torch.device("cpu"))
    assert second.data_ptr() == address
    assert second.numel() == 50
