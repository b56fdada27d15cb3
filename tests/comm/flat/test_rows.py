"""Tensors divided between rows: parts are disjoint, cover all, and are about alike."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.flat.rows import origin, shares, whole_name

pytestmark = pytest.mark.fast

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=6)
blocks = st.sampled_from([1, 2, 3, 16])


@given(shapes, st.integers(1, 5), blocks)
def test_shares_hold_every_element_once(shapes: list[list[int]], count: int, block: int) -> None:
    """All elements are in one part each, of whole blocks, and no part is larger than it must be."""
    named = [(str(index), torch.zeros(shape)) for index, shape in enumerate(shapes)]
    parts = shares(named, count, block)
    assert len(parts) == count
    for part in parts:
        for name, view in part:
            view.add_(1.0)
            assert origin(name, view)[1] % block == 0
    assert all(bool((tensor == 1.0).all()) for _, tensor in named)
    rows = [t.numel() // t.shape[0] if t.dim() else 1 for _, t in named if t.numel()]
    rows = [math.lcm(row, block) for row in rows]
    total = sum(tensor.numel() for _, tensor in named)
    sizes = [sum(view.numel() for _, view in part) for part in parts]
    assert max(sizes) <= math.ceil(total / count) + max(rows, default=0)
    assert len({name for part in parts for name, _ in part}) == sum(map(len, parts))


@given(shapes, st.integers(1, 5), blocks)
def test_rows_are_those_of_the_tensor_that_their_name_says(
    shapes: list[list[int]], count: int, block: int
) -> None:
    """A part's elements follow each other in one tensor, from ``origin`` on, in order of parts."""
    named, at = [], 0
    for index, shape in enumerate(shapes):
        numel = math.prod(shape)
        named.append((str(index), torch.arange(at, at + numel).view(shape)))
        at += numel
    found = []
    for part in shares(named, count, block):
        for name, view in part:
            whole, first = origin(name, view)
            assert whole == whole_name(name)
            tensor = named[int(whole)][1].flatten()
            assert torch.equal(view.flatten(), tensor[first : first + view.numel()])
            assert view.dim() == named[int(whole)][1].dim()
            found += view.flatten().tolist()
    assert found == list(range(at))
