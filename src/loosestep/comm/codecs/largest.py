"""The largest magnitudes of a part, with their places; the rest counts as zero."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.codecs.codec import Loops, on_device
from loosestep.comm.codecs.rounding import Draw
from loosestep.errors import is_number

SAMPLE = 4096


class Largest:
    """The codec that keeps ``density`` of the values, at least one: eight bytes for each."""

    def __init__(self, density: float, *, loops: Loops = Loops.BEST) -> None:
        if not (is_number(density) and 0.0 < density <= 1.0):
            raise ValueError(
                f"density must lie in (0, 1], got {density!r}; 0.01 sends one value in a hundred"
            )
        self._density, self._loops = Fraction(str(density)), loops  # 0.1 of 30 is 3, not 4

    def wanted(self, numel: int) -> int:
        """Return how many of ``numel`` values are kept."""
        return math.ceil(self._density * numel)

    def nbytes(self, numel: int) -> int:
        """Return four bytes for the place and four for the value of each."""
        return 8 * self.wanted(numel)

    def encode(self, values: torch.Tensor, message: torch.Tensor, draw: Draw | None) -> None:
        """Write places, then values; of equal magnitudes the first are taken."""
        if values.numel() == 0:
            return
        wanted = self.wanted(values.numel())
        indices, chosen = self._cut(message, values.numel())
        if self._loops.in_c(values):
            codec_c.encode_topk(values, wanted, indices, chosen)
            return
        function = on_device(codec_torch.encode_topk, values)
        for place, part in zip((indices, chosen), function(values, wanted), strict=True):
            place.copy_(part)

    def decode(
        self, message: torch.Tensor, numel: int, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write zeros and the values times the share."""
        if out.numel() == numel:
            self.add(message, out.zero_(), share)
            return
        indices, values = self._cut(message, numel)
        front = indices < out.numel()
        out.zero_()[indices[front].long()] = values[front] * share

    def add(self, message: torch.Tensor, total: torch.Tensor, share: float) -> None:
        """Add the values times the share at their places."""
        if total.numel() == 0:
            return
        indices, values = self._cut(message, total.numel())
        loops = codec_c if self._loops.in_c(total) else codec_torch
        loops.add_topk(indices, values, total, share)

    def sample(self, numel: int) -> int:
        """Return as many as make a fair sample."""
        return min(numel, SAMPLE)

    def _cut(self, message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge = 4 * self.wanted(numel)
        kept = message[: 2 * edge]
        return kept[:edge].view(torch.int32), kept[edge:].view(torch.float32)
