"""The largest magnitudes of every chunk, with their places in it; the rest counts as zero.

As they are, or in 2 bits: a sign, and which of two magnitudes of its chunk

    high = mean of the magnitudes above their mean,  low = mean of the others

(Two levels with the least squared error for the tail that is left of a chunk would take some rounds
to find; one such round is close. Those of ``Int2`` are for values around zero, and there are none.)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.codecs.codec import Loops, on_device
from loosestep.comm.codecs.in_torch import place_bytes
from loosestep.comm.codecs.rounding import Draw
from loosestep.comm.flat.cuts import Runs
from loosestep.comm.native import CONSTANTS
from loosestep.errors import is_number

LARGEST_CHUNK = CONSTANTS["LARGEST_CHUNK"]


class Largest:
    """The codec that keeps ``density`` of the values of every chunk, at least one.

    A place takes 12 bits, or 16 in chunks of more than 4096 values; a value four bytes, or two bits
    and its share of the chunk's eight bytes.
    """

    def __init__(
        self,
        density: float,
        chunk: int = 4096,
        bits: int | None = None,
        *,
        loops: Loops = Loops.BEST,
    ) -> None:
        if not (is_number(density) and 0.0 < density <= 1.0):
            raise ValueError(
                f"density must lie in (0, 1], got {density!r}; 0.01 sends one value in a hundred"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= LARGEST_CHUNK:
            raise ValueError(
                f"chunk must be a whole number in 1..{LARGEST_CHUNK}, got {chunk!r}; places in up "
                "to 4096 values take 12 bits each"
            )
        if bits is not None and not (type(bits) is int and bits == 2):
            raise ValueError(f"bits must be 2, or None to send values as they are, got {bits!r}")
        self._density = Fraction(str(density))  # 0.1 of 30 is 3, not 4
        self.block, self._bits, self._loops = chunk, bits, loops

    def wanted(self, length: int) -> int:
        """Return how many values of a chunk are kept."""
        return math.ceil(self._density * length)

    def nbytes(self, runs: Runs) -> int:
        """Return the bytes of the values that are kept, and of their places."""
        return self._edge(runs) + place_bytes(self.kept(runs), self.block)

    def kept(self, runs: Runs) -> int:
        """Return how many values are kept of all chunks."""
        return sum(num * self.wanted(length) for length, num in runs.blocks(self.block).items())

    def select(self, values: torch.Tensor, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values that are kept, and the bytes of their places."""
        count = self.kept(runs)
        if self._loops.in_c(values):
            chosen = values.new_empty(count)
            places = values.new_empty(place_bytes(count, self.block), dtype=torch.uint8)
            codec_c.encode_topk(values, runs, self.block, self._table, (chosen, places))
            return chosen, places
        parts = []
        for run, (start, stop) in zip(runs.each, runs.bounds, strict=True):
            if run.numel:
                lot = values[start:stop]
                counts = self.wanted(self.block), self.wanted(run.numel % self.block)
                parts.append(on_device(codec_torch.encode_topk, lot)(lot, self.block, counts))
        chosen, found = (torch.cat(some) for some in zip(*parts, strict=True))
        return chosen, codec_torch.pack_places(found, self.block)

    def indices(self, places: torch.Tensor, runs: Runs, count: int) -> torch.Tensor:
        """Return where in the buffer the first ``count`` values lie that were kept."""
        found = codec_torch.unpack_places(places, self.kept(runs), self.block)[:count]
        starts, lengths = self._chunks(runs)
        begins = torch.repeat_interleave(torch.tensor(starts), torch.tensor(lengths))[:count]
        return found + begins.to(found.device)

    def encode(
        self, values: torch.Tensor, runs: Runs, message: torch.Tensor, draws: Sequence[Draw] | None
    ) -> None:
        """Write values, then places; of equal magnitudes the first are taken."""
        if values.numel() == 0:
            return
        numbers, places = self._cut(message, runs)
        if self._bits is None and self._loops.in_c(values):
            out = numbers.view(torch.float32), places
            codec_c.encode_topk(values, runs, self.block, self._table, out)
            return
        chosen, found = self.select(values, runs)
        if self._bits is None:
            numbers.view(torch.float32).copy_(chosen)
        else:
            levels, codes = codec_torch.encode_signs(chosen, self._chunks(runs)[1])
            edge = 4 * levels.numel()
            numbers[:edge].view(torch.float32).copy_(levels.flatten())
            numbers[edge:].copy_(codes)
        places.copy_(found)

    def decode(
        self, message: torch.Tensor, runs: Runs, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write zeros and the values times the share."""
        self.add(message, runs, out.zero_(), share)

    def add(self, message: torch.Tensor, runs: Runs, total: torch.Tensor, share: float) -> None:
        """Add the values times the share at their places."""
        if total.numel() == 0:
            return
        values, places = self._values(message, runs)
        if self._loops.in_c(total):
            parts = values, places
            codec_c.add_topk(parts, runs, self.block, self._table, total, share)
            return
        count = self.kept(runs.part(0, total.numel()))
        indices = self.indices(places, runs, count)
        codec_torch.add_topk(indices, values[:count], total, share)

    def _values(self, message: torch.Tensor, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a message's values and its places."""
        numbers, places = self._cut(message, runs)
        if self._bits is None:
            return numbers.view(torch.float32), places
        lengths = self._chunks(runs)[1]
        edge = 8 * len(lengths)
        levels = numbers[:edge].view(torch.float32).view(-1, 2)
        return codec_torch.decode_signs(levels, numbers[edge:], lengths), places

    def _chunks(self, runs: Runs) -> tuple[list[int], list[int]]:
        """Return where every chunk begins in the buffer, and how many of its values are kept."""
        starts, kept, table = [], [], self._table
        for run, begin in zip(runs.each, runs.starts, strict=True):
            for start in range(0, run.numel, self.block):
                starts.append(begin + start)
                kept.append(table[min(self.block, run.numel - start)])
        return starts, kept

    @cached_property
    def _table(self) -> ctypes.Array[ctypes.c_int32]:
        """How many values are kept of chunks of every length, as C reads it."""
        return (ctypes.c_int32 * (self.block + 1))(*map(self.wanted, range(self.block + 1)))

    def _edge(self, runs: Runs) -> int:
        """Return how many bytes the values take."""
        if self._bits is None:
            return 4 * self.kept(runs)
        chunks = sum(num for length, num in runs.blocks(self.block).items() if length)
        return 8 * chunks + -(-self.kept(runs) // 4)

    def _cut(self, message: torch.Tensor, runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
        edge = self._edge(runs)
        return message[:edge], message[edge : self.nbytes(runs)]
