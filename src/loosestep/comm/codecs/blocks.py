"""Blocks of 8, 4, 2 or 1.6 bits with a float32 scale each.

    8 and 4 bits:  step = max |x| / 127 (or 7),  code = round(x / step)
    2 bits:        x becomes the nearest of -1.510, -0.4528, 0.4528 and 1.510 times the block's rms
    1.6 bits:      the same with -1.224, 0 and 1.224; five of them fit into a byte

Such levels are those with the least squared error for a Gaussian (Lloyd 1957, Max 1960).
Steps are at least 2^-126, so values below 2^-127 come out as zero, whatever the processor does
with denormal numbers. An error is at most half a step with 8 and 4 bits.
"""

from __future__ import annotations

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.codecs.codec import Loops, on_device
from loosestep.comm.codecs.in_torch import row_bytes
from loosestep.comm.codecs.rounding import Draw, key_of
from loosestep.comm.native import CONSTANTS

LARGEST_BLOCK = CONSTANTS["LARGEST_BLOCK"]
SAMPLE = 4096


class Blocks:
    """The codec of ``bits`` bits a value and a scale for every ``block`` values."""

    def __init__(self, bits: float, block: int = 256, *, loops: Loops = Loops.BEST) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= LARGEST_BLOCK:
            raise ValueError(
                f"block must be a whole number in 1..{LARGEST_BLOCK}, got {block!r}; 256 values a "
                "scale is a fair deal between bytes and precision"
            )
        self.bits, self.block, self._loops = bits, block, loops

    def nbytes(self, numel: int) -> int:
        """Return four bytes a block, and the rows."""
        whole, rest = divmod(numel, self.block)
        return (
            4 * self._scales(numel)
            + whole * row_bytes(self.block, self.bits)
            + row_bytes(rest, self.bits)
        )

    def encode(self, values: torch.Tensor, message: torch.Tensor, draw: Draw | None) -> None:
        """Write scales and codes."""
        if values.numel() == 0:
            return
        out = self.cut(message, values.numel())
        if self._loops.in_c(values):
            codec_c.encode_blocks(values, self.block, self.bits, draw, out)
            return
        key = None if draw is None else key_of(draw, values.device)
        function = on_device(codec_torch.encode_blocks, values)
        for place, part in zip(out, function(values, self.block, self.bits, key), strict=True):
            place.copy_(part)

    def decode(
        self, message: torch.Tensor, numel: int, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write codes times scales times the share."""
        if out.numel() == 0:
            return
        scales, rows = self.cut(message, numel)
        if self._loops.in_c(out):
            codec_c.decode_blocks(scales, rows, self.block, self.bits, out, share)
        else:
            torch.mul(self._values(scales, rows, out.numel()), share, out=out)

    def add(self, message: torch.Tensor, total: torch.Tensor, share: float) -> None:
        """Add codes times scales times the share."""
        if total.numel() == 0:
            return
        scales, rows = self.cut(message, total.numel())
        if self._loops.in_c(total):
            codec_c.add_blocks(scales, rows, self.block, self.bits, total, share)
        else:
            total.add_(self._values(scales, rows, total.numel()).mul_(share))

    def sample(self, numel: int) -> int:
        """Return whole blocks."""
        return min(numel, SAMPLE // self.block * self.block)

    def _values(self, scales: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        whole, rest = divmod(count, self.block)
        size = whole * row_bytes(self.block, self.bits) + row_bytes(rest, self.bits)
        function = on_device(codec_torch.decode_blocks, scales)
        return function(scales[: self._scales(count)], rows[:size], count, self.block, self.bits)

    def _scales(self, numel: int) -> int:
        return -(-numel // self.block)

    def cut(self, message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a message's scales and its rows."""
        edge = 4 * self._scales(numel)
        return message[:edge].view(torch.float32), message[edge : self.nbytes(numel)]
