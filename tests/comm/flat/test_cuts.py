"""Bounds of slices and pieces: between blocks, the more even the smaller the blocks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.flat.cuts import Bounds, Run, Runs, slices

pytestmark = pytest.mark.fast

sizes = st.lists(st.integers(0, 40), max_size=8)
blocks = st.sampled_from([1, 2, 7, 16, 100])


@given(numel=st.integers(0, 1000), parts=st.integers(1, 17))
def test_slices_cover_without_overlap(numel: int, parts: int) -> None:
    """Slices follow each other, cover everything and differ in length by at most one."""
    cut = slices(numel, parts)
    assert cut[0][0] == 0
    assert cut[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    lengths = [stop - start for start, stop in cut]
    assert max(lengths) - min(lengths) <= 1


def check(runs: Runs, bounds: Bounds, block: int) -> None:
    """Check that ranges cover everything, and that none ends inside a block."""
    assert bounds[0][0] == 0
    assert bounds[-1][1] == runs.numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    held = [run for start, stop in bounds for run in runs.part(start, stop).each]
    for run in held:
        end = run.offset + run.numel
        assert run.offset % block == 0
        assert end % block == 0 or end == runs.each[int(run.tensor)].numel
    assert sum(run.numel for run in held) == runs.numel


def named(sizes: list[int]) -> Runs:
    return Runs(tuple(Run(str(i), 0, size) for i, size in enumerate(sizes)))


@given(sizes=sizes, parts=st.integers(1, 9), block=blocks)
def test_slices_are_of_whole_blocks(sizes: list[int], parts: int, block: int) -> None:
    """Each edge is at most half a block from where even slices have it."""
    runs = named(sizes)
    bounds = runs.slices(parts, block)
    check(runs, bounds, block)
    even = slices(runs.numel, parts)
    for (start, stop), (first, last) in zip(bounds, even, strict=True):
        assert abs(start - first) <= block / 2
        assert abs(stop - last) <= block / 2
    assert block > 1 or bounds == even


@given(sizes=sizes, most=st.integers(1, 60), block=blocks)
def test_pieces_are_of_whole_blocks(sizes: list[int], most: int, block: int) -> None:
    """None is longer than it may be, or than a block."""
    runs = named(sizes)
    bounds = runs.pieces(most, block)
    check(runs, bounds, block)
    assert max(stop - start for start, stop in bounds) <= max(most, block)
    assert runs.numel == 0 or all(start < stop for start, stop in bounds)


@given(sizes=sizes, block=blocks)
def test_blocks_are_counted(sizes: list[int], block: int) -> None:
    """Each tensor has blocks of its own, of which the last may be shorter."""
    lengths = [min(block, size - at) for size in sizes for at in range(0, size, block)]
    counted = {length: num for length, num in named(sizes).blocks(block).items() if num}
    assert counted == {length: lengths.count(length) for length in set(lengths)}


def test_parts_know_where_they_are() -> None:
    """The last 4 of 10 elements and the first 2 of 3; and whole blocks at the front."""
    runs = Runs((Run("a", 0, 10), Run("b", 64, 3)))
    assert runs.part(6, 12).each == (Run("a", 6, 4), Run("b", 64, 2))
    assert [runs.front(most, 4) for most in (1, 5, 11, 99)] == [4, 4, 10, 13]
