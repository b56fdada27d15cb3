"""Values in a narrower floating dtype."""

from __future__ import annotations

import torch

from loosestep.comm.codecs.rounding import Draw

SAMPLE = 4096


def narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` as ``dtype``; what is finite stays so, infinities stay infinite."""
    limit = torch.finfo(dtype).max
    clipped = values.clamp(-limit, limit)
    return torch.where(values.isfinite(), clipped, values).to(dtype)


class Narrow:
    """The codec that rounds to ``dtype``: torch's own loops do it in one instruction."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def nbytes(self, numel: int) -> int:
        """Return the size of ``numel`` narrow values."""
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, message: torch.Tensor, draw: Draw | None) -> None:
        """Write the rounded values; what is too large becomes the largest that fits."""
        limit = torch.finfo(self.dtype).max
        self._view(message, values.numel()).copy_(values.clamp(-limit, limit))

    def decode(
        self, message: torch.Tensor, numel: int, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Widen and multiply."""
        out.copy_(self._view(message, out.numel()))
        if share != 1.0:
            out.mul_(share)

    def add(self, message: torch.Tensor, total: torch.Tensor, share: float) -> None:
        """Widen, multiply and add."""
        total.add_(self._view(message, total.numel()).to(torch.float32).mul_(share))

    def sample(self, numel: int) -> int:
        """Return as many as make a fair sample."""
        return min(numel, SAMPLE)

    def _view(self, message: torch.Tensor, numel: int) -> torch.Tensor:
        return message[: self.nbytes(numel)].view(self.dtype)
