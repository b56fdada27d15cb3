"""The largest magnitudes of every chunk, with their places in it; the rest counts as zero."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.codecs.codec import Loops, on_device
from loosestep.comm.codecs.in_torch import place_bytes
from loosestep.comm.codecs.rounding import Draw
from loosestep.comm.cuts import Runs
from loosestep.comm.native import CONSTANTS
from loosestep.errors import is_number

LARGEST_CHUNK = CONSTANTS["LARGEST_CHUNK"]


class Largest:
    """The codec that keeps ``density`` of the values of every chunk, at least one.

    A value takes four bytes, and its place 12 bits, or 16 in chunks of more than 4096 values.
    """

    def __init__(self, density: float, chunk: int = 4096, *, loops: Loops = Loops.BEST) -> None:
        if not (is_number(density) and 0.0 < density <= 1.0):
            raise ValueError(
                f"density must lie in (0, 1], got {density!r}; 0.01 sends one value in a hundred"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= LARGEST_CHUNK:
            raise ValueError(
                f"chunk must be a whole number in 1..{LARGEST_CHUNK}, got {chunk!r}; places in up "
                "to 4096 values take 12 bits each"
            )
        self._density = Fraction(str(density))  # 0.1 of 30 is 3, not 4
        self.block, self._loops = chunk, loops

    def wanted(self, length: int) -> int:
        """Return how many values of a chunk are kept."""
        return math.ceil(self._density * length)

    def nbytes(self, runs: Runs) -> int:
        """Return four bytes for each value that is kept, and the places."""
        kept = self._kept(runs)
        return 4 * kept + place_bytes(kept, self.block)

    def encode(
        self, values: torch.Tensor, runs: Runs, message: torch.Tensor, draws: Sequence[Draw] | None
    ) -> None:
        """Write values, then places; of equal magnitudes the first are taken."""
        if values.numel() == 0:
            return
        out = self._cut(message, runs)
        if self._loops.in_c(values):
            codec_c.encode_topk(values, runs, self.block, self._table, out)
            return
        parts = []
        for run, start in zip(runs.each, runs.starts, strict=True):
            if run.numel:
                lot = values[start : start + run.numel]
                counts = self.wanted(self.block), self.wanted(run.numel % self.block)
                parts.append(on_device(codec_torch.encode_topk, lot)(lot, self.block, counts))
        chosen, places = (torch.cat(some) for some in zip(*parts, strict=True))
        out[0].copy_(chosen)
        out[1].copy_(codec_torch.pack_places(places, self.block))

    def decode(
        self, message: torch.Tensor, runs: Runs, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write zeros and the values times the share."""
        self.add(message, runs, out.zero_(), share)

    def add(self, message: torch.Tensor, runs: Runs, total: torch.Tensor, share: float) -> None:
        """Add the values times the share at their places."""
        if total.numel() == 0:
            return
        if self._loops.in_c(total):
            parts = self._cut(message, runs)
            codec_c.add_topk(parts, runs, self.block, self._table, total, share)
            return
        values, packed = self._cut(message, runs)
        places = codec_torch.unpack_places(packed, values.numel(), self.block)
        front = runs.part(0, total.numel())
        starts = torch.tensor(list(self._starts(front)), device=places.device)
        indices = places[: starts.numel()] + starts
        codec_torch.add_topk(indices, values[: starts.numel()], total, share)

    def _starts(self, runs: Runs) -> Iterator[int]:
        """Yield for every value that is kept where its chunk begins in the buffer."""
        for run, begin in zip(runs.each, runs.starts, strict=True):
            for start in range(0, run.numel, self.block):
                length = min(self.block, run.numel - start)
                yield from [begin + start] * self.wanted(length)

    @cached_property
    def _table(self) -> ctypes.Array[ctypes.c_int32]:
        """How many values are kept of chunks of every length, as C reads it."""
        return (ctypes.c_int32 * (self.block + 1))(*map(self.wanted, range(self.block + 1)))

    def _kept(self, runs: Runs) -> int:
        return sum(num * self.wanted(length) for length, num in runs.blocks(self.block).items())

    def _cut(self, message: torch.Tensor, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        edge = 4 * self._kept(runs)
        return message[:edge].view(torch.float32), message[edge : self.nbytes(runs)]
