"""Values that differ by rank."""

from __future__ import annotations

import torch


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + numel)
    return torch.randn(numel, generator=generator).to(dtype)
