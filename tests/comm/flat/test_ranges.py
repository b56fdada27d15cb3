"""Ranges of a flat tensor: counted, clipped, packed and written back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.flat.cuts import Range
from loosestep.comm.flat.packing import unpack_flats
from loosestep.comm.flat.ranges import clip, length, pack_ranges, views
from loosestep.comm.flat.staging import STAGING

pytestmark = pytest.mark.fast

SIZE = 30

# Ranges that may overlap, be empty and come in any order; and ones that do neither.
anywhere = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair))),
    max_size=6,
)
apart = st.lists(st.integers(0, SIZE), max_size=12, unique=True).map(
    lambda edges: list(zip(*[iter(sorted(edges))] * 2, strict=False))
)


def elements(ranges: list[Range]) -> list[int]:
    return [element for start, stop in ranges for element in range(start, stop)]


@given(anywhere)
def test_ranges_are_packed_in_their_order(ranges: list[Range]) -> None:
    """Each follows the one before it, whether they overlap or not, wherever they are packed to."""
    source = torch.arange(SIZE)
    assert length(ranges) == len(elements(ranges))
    out = torch.empty(length(ranges), dtype=source.dtype)
    assert pack_ranges(source, ranges, out) is out
    assert out.tolist() == elements(ranges)
    staged = pack_ranges(source, ranges)
    assert staged.tolist() == elements(ranges)
    STAGING.give(staged)


@given(apart)
def test_packing_and_unpacking_is_the_identity(ranges: list[Range]) -> None:
    """On the elements of the ranges; all others stay as they are."""
    source, target = torch.randn(SIZE), torch.zeros(SIZE)
    packed = pack_ranges(source, ranges, torch.empty(length(ranges)))
    unpack_flats(packed, views(target, ranges))
    held = torch.zeros(SIZE, dtype=torch.bool)
    held[elements(ranges)] = True
    assert torch.equal(target, torch.where(held, source, torch.zeros(SIZE)))


@given(anywhere, st.lists(st.integers(0, 6 * SIZE), max_size=5))
def test_clips_of_a_partition_are_the_ranges(ranges: list[Range], edges: list[int]) -> None:
    """Cut anywhere, the clips together hold what the ranges hold, in its order; none is empty."""
    inside = sorted(min(edge, length(ranges)) for edge in edges)
    bounds = list(itertools.pairwise([0, *inside, length(ranges)]))
    clips = [clip(ranges, first, last) for first, last in bounds]
    assert [length(found) for found in clips] == [last - first for first, last in bounds]
    assert elements([r for found in clips for r in found]) == elements(ranges)
    assert all(start < stop for found in clips for start, stop in found)
