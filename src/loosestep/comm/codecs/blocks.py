"""Blocks of 8, 4, 2 or 1.6 bits with a float32 scale each.

    8 and 4 bits:  step = max |x| / 127 (or 7),  code = round(x / step)
    2 bits:        x becomes the nearest of -1.510, -0.4528, 0.4528 and 1.510 times the block's rms
    1.6 bits:      the same with -1.224, 0 and 1.224; five of them fit into a byte

Such levels are those with the least squared error for a Gaussian (Lloyd 1957, Max 1960).
Steps are at least 2^-126, so values below 2^-127 come out as zero, whatever the processor does
with denormal numbers. An error is at most half a step with 8 and 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.codecs.codec import Loops, on_device
from loosestep.comm.codecs.in_torch import row_bytes
from loosestep.comm.codecs.rounding import Draw, key_of
from loosestep.comm.flat.cuts import Runs
from loosestep.comm.native import CONSTANTS

LARGEST_BLOCK = CONSTANTS["LARGEST_BLOCK"]


class Blocks:
    """The codec of ``bits`` bits a value and a scale for every ``block`` values."""

    def __init__(self, bits: float, block: int = 256, *, loops: Loops = Loops.BEST) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= LARGEST_BLOCK:
            raise ValueError(
                f"block must be a whole number in 1..{LARGEST_BLOCK}, got {block!r}; 256 values a "
                "scale is a fair deal between bytes and precision"
            )
        self.bits, self.block, self._loops = bits, block, loops

    def nbytes(self, runs: Runs) -> int:
        """Return four bytes a block, and the rows."""
        sizes = runs.blocks(self.block).items()
        return sum(num * (4 + row_bytes(length, self.bits)) for length, num in sizes)

    def encode(
        self, values: torch.Tensor, runs: Runs, message: torch.Tensor, draws: Sequence[Draw] | None
    ) -> None:
        """Write scales and codes."""
        if values.numel() == 0:
            return
        out = self.cut(message, runs)
        if self._loops.in_c(values):
            codec_c.encode_blocks(values, runs, self.block, self.bits, draws, out)
            return
        parts = []
        for index, (run, (start, stop)) in enumerate(zip(runs.each, runs.bounds, strict=True)):
            if run.numel:
                lot = values[start:stop]
                key = None if draws is None else key_of(draws[index], values.device)
                function = on_device(codec_torch.encode_blocks, lot)
                parts.append(function(lot, self.block, self.bits, key, run.offset))
        for place, coded in zip(out, zip(*parts, strict=True), strict=True):
            torch.cat(coded, out=place)

    def decode(
        self, message: torch.Tensor, runs: Runs, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write codes times scales times the share."""
        if out.numel() == 0:
            return
        if self._loops.in_c(out):
            parts = self.cut(message, runs)
            codec_c.decode_blocks(parts, runs, self.block, self.bits, out, share)
        else:
            torch.mul(self._values(message, runs, out.numel()), share, out=out)

    def add(self, message: torch.Tensor, runs: Runs, total: torch.Tensor, share: float) -> None:
        """Add codes times scales times the share."""
        if total.numel() == 0:
            return
        if self._loops.in_c(total):
            parts = self.cut(message, runs)
            codec_c.add_blocks(parts, runs, self.block, self.bits, total, share)
        else:
            total.add_(self._values(message, runs, total.numel()).mul_(share))

    def _values(self, message: torch.Tensor, runs: Runs, count: int) -> torch.Tensor:
        """Return the first values of a message."""
        scales, rows = self.cut(message, runs)
        values, block, bits = [], self.block, self.bits
        scale = row = 0
        for run in runs.part(0, count).each:
            whole, rest = divmod(run.numel, block)
            num, size = (
                -(-run.numel // block),
                whole * row_bytes(block, bits) + row_bytes(rest, bits),
            )
            if num:
                parts = scales[scale : scale + num], rows[row : row + size]
                function = on_device(codec_torch.decode_blocks, parts[0])
                values.append(function(*parts, run.numel, block, bits))
            scale, row = scale + num, row + size
        return torch.cat(values)

    def cut(self, message: torch.Tensor, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a message's scales and its rows."""
        edge = 4 * sum(num for length, num in runs.blocks(self.block).items() if length)
        return message[:edge].view(torch.float32), message[edge : self.nbytes(runs)]
