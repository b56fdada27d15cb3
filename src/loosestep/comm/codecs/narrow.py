"""Values in a narrower floating dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loosestep.comm.codecs.rounding import Draw
from loosestep.comm.flat.cuts import Runs


def narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` as ``dtype``; what is finite stays so, infinities stay infinite."""
    limit = torch.finfo(dtype).max
    clipped = values.clamp(-limit, limit)
    return torch.where(values.isfinite(), clipped, values).to(dtype)


class Narrow:
    """The codec that rounds to ``dtype``: torch's own loops do it in one instruction."""

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def nbytes(self, runs: Runs) -> int:
        """Return the size of the narrow values."""
        return runs.numel * self.dtype.itemsize

    def encode(
        self, values: torch.Tensor, runs: Runs, message: torch.Tensor, draws: Sequence[Draw] | None
    ) -> None:
        """Write the rounded values; what is too large becomes the largest that fits."""
        limit = torch.finfo(self.dtype).max
        self._view(message, values.numel()).copy_(values.clamp(-limit, limit))

    def decode(
        self, message: torch.Tensor, runs: Runs, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Widen and multiply."""
        out.copy_(self._view(message, out.numel()))
        if share != 1.0:
            out.mul_(share)

    def add(self, message: torch.Tensor, runs: Runs, total: torch.Tensor, share: float) -> None:
        """Widen, multiply and add."""
        total.add_(self._view(message, total.numel()).to(torch.float32).mul_(share))

    def _view(self, message: torch.Tensor, numel: int) -> torch.Tensor:
        return message[: numel * self.dtype.itemsize].view(self.dtype)
