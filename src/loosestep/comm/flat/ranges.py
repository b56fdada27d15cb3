"""Ranges of a flat tensor: some of its elements, in any order, here and there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loosestep.comm.flat.cuts import Range
from loosestep.comm.flat.packing import pack_flats
from loosestep.comm.flat.staging import STAGING

Ranges = Sequence[Range]


def length(ranges: Ranges) -> int:
    """Return how many elements the ranges hold."""
    return sum(stop - start for start, stop in ranges)


def clip(ranges: Ranges, first: int, last: int) -> list[Range]:
    """Return the part of ``ranges`` from their element ``first`` up to ``last``.

    >>> clip([(10, 14), (20, 26)], 2, 6)
    [(12, 14), (20, 22)]
    """
    found = []
    at = 0  # how many elements the ranges before have
    for start, stop in ranges:
        begin, end = max(start, start + first - at), min(stop, start + last - at)
        if begin < end:
            found.append((begin, end))
        at += stop - start
    return found


def views(tensor: torch.Tensor, ranges: Ranges) -> list[torch.Tensor]:
    """Return a view of every range."""
    return [tensor[start:stop] for start, stop in ranges]


def pack_ranges(
    source: torch.Tensor, ranges: Ranges, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy ranges one after the other to ``out``, or to a tensor of their own from STAGING.

    >>> pack_ranges(torch.arange(6), [(4, 6), (1, 2)], torch.empty(3, dtype=torch.int64))
    tensor([4, 5, 1])
    """
    if out is None:
        out = STAGING.take(length(ranges), source.dtype, source.device)
    return pack_flats(views(source, ranges), out)
