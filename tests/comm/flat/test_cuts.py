"""Bounds of slices and pieces: between blocks, the more even the smaller the blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.flat.cuts import (
    Bounds,
    Run,
    Runs,
    cut,
    following,
    pieces,
    round_up,
    slice_of,
    slices,
    together,
)

pytestmark = pytest.mark.fast

sizes = st.lists(st.integers(0, 40), max_size=8)
blocks = st.sampled_from([1, 2, 7, 16, 100])


@given(numel=st.integers(0, 1000), parts=st.integers(1, 17))
def test_slices_cover_without_overlap(numel: int, parts: int) -> None:
    """Slices follow each other, cover everything and differ in length by at most one."""
    bounds = slices(numel, parts)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1
    assert bounds == [slice_of(numel, parts, index) for index in range(parts)]


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


@given(numel=st.integers(0, 500), most=st.integers(0, 90), multiple=st.integers(1, 9))
def test_pieces_cover_in_multiples(numel: int, most: int, multiple: int) -> None:
    """They follow each other, none is longer than it may be, and all but the last are multiples.

    So slices of all of them hold together as many elements as slices of the whole.
    """
    bounds = pieces(numel, most, multiple)
    assert (bounds[0][0], bounds[-1][1]) == (0, numel)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) <= max(most, multiple)
    assert all(size % multiple == 0 for size in sizes[:-1])
    assert sizes == [0] if numel == 0 else min(sizes) > 0
    for whole, *parts in zip(*(slices(n, multiple) for n in (numel, *sizes)), strict=True):
        assert whole[1] - whole[0] == sum(stop - start for start, stop in parts)
    buffer = torch.arange(numel, dtype=torch.int32)
    views = list(cut(buffer, 4 * most, multiple))
    assert [view.numel() for view in views] == sizes
    assert torch.equal(torch.cat(views), buffer)
    assert Runs.of(numel).pieces(most, 1, multiple) == bounds


@given(sizes=sizes)
def test_parts_follow_each_other(sizes: list[int]) -> None:
    """Each begins where the one before it ends, and is as long as was said; so are runs."""
    bounds = following(sizes)
    assert [stop - start for start, stop in bounds] == sizes
    assert [start for start, _ in bounds] == [sum(sizes[:i]) for i in range(len(sizes))]
    runs = named(sizes)
    assert (runs.bounds, runs.starts) == (bounds, [start for start, _ in bounds])


@given(sizes=sizes, most=st.integers(1, 60))
def test_neighbours_go_together_as_far_as_they_fit(sizes: list[int], most: int) -> None:
    """All do once, in order; too large is one alone only; none could have gone with those before.

    What is left is told before each group.
    """
    told = []

    def room(left: int) -> int:
        told.append(left)
        return most

    groups = together(sizes, room)
    assert [size for first, last in groups for size in sizes[first:last]] == sizes
    assert all(last - first <= 1 or sum(sizes[first:last]) <= most for first, last in groups)
    assert all(sum(sizes[a[0] : b[0] + 1]) > most for a, b in itertools.pairwise(groups))
    assert told == [sum(sizes[first:]) for first, _ in groups]


@given(size=st.integers(0, 1000), unit=st.integers(1, 90))
def test_sizes_are_rounded_up(size: int, unit: int) -> None:
    """To the first multiple that has room."""
    assert round_up(size, unit) % unit == 0
    assert 0 <= round_up(size, unit) - size < unit


def test_parts_know_where_they_are() -> None:
    """The last 4 of 10 elements and the first 2 of 3; and whole blocks at the front."""
    runs = Runs((Run("a", 0, 10), Run("b", 64, 3)))
    assert runs.part(6, 12).each == (Run("a", 6, 4), Run("b", 64, 2))
    assert [runs.front(most, 4) for most in (1, 5, 11, 99)] == [4, 4, 10, 13]
