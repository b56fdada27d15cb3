"""Cutting, packing and writing back, for any shapes and sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.cuts import slices
from loosestep.comm.flat import (
    Pool,
    gather_bytes,
    pack,
    pack_bytes,
    unpack,
    unpack_bytes,
    windows,
)

pytestmark = pytest.mark.fast


@given(numel=st.integers(0, 1000), parts=st.integers(1, 17))
def test_slices_cover_without_overlap(numel: int, parts: int) -> None:
    """Slices follow each other, cover everything and differ in length by at most one."""
    cut = slices(numel, parts)
    assert cut[0][0] == 0
    assert cut[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    lengths = [stop - start for start, stop in cut]
    assert max(lengths) - min(lengths) <= 1


shapes = st.lists(
    st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple), min_size=1, max_size=8
)


blocks = st.sampled_from([1, 1, 2, 3, 10, 100])


@given(shapes=shapes, window_bytes=st.integers(1, 400), transpose=st.booleans(), block=blocks)
def test_windows_hold_every_element_once(
    shapes: list[tuple[int, ...]], window_bytes: int, transpose: bool, block: int
) -> None:
    """Packing and unpacking through windows of any size is the identity on every element.

    Tensors are cut between their blocks only.
    """
    dtypes = [torch.float32, torch.float64]
    tensors = [torch.randn(shape).to(dtypes[i % 2]) for i, shape in enumerate(shapes)]
    if transpose:
        tensors = [t.mT if t.ndim > 1 else t for t in tensors]
    cut = windows([(str(i), t) for i, t in enumerate(tensors)], window_bytes, block=block)
    assert sum(window.numel for window in cut) == sum(t.numel() for t in tensors)
    for window in cut:
        room = max(window_bytes, block * window.dtype.itemsize)
        assert window.numel * window.dtype.itemsize <= room
        assert sum(run.numel for run in window.runs) == window.numel
        for run in window.runs:
            whole = tensors[int(run.tensor)].numel()
            end = run.offset + run.numel
            assert run.offset % block == 0
            assert end == whole or end % block == 0
            values = tensors[int(run.tensor)].reshape(-1)[run.offset : end]
            at = pack(window, torch.empty(window.numel, dtype=window.dtype))
            first = sum(r.numel for r in window.runs[: window.runs.index(run)])
            assert torch.equal(at[first : first + run.numel], values)
    before = [t.clone() for t in tensors]
    for window in cut:
        buffer = pack(window, torch.empty(window.numel, dtype=window.dtype))
        unpack(window, buffer + 1)
    assert all(torch.equal(t, b + 1) for t, b in zip(tensors, before, strict=True))


@given(shapes=shapes, window_bytes=st.integers(1, 400), block=blocks)
def test_the_cut_depends_on_shapes_only(
    shapes: list[tuple[int, ...]], window_bytes: int, block: int
) -> None:
    """Two ranks with other strides and addresses cut alike."""
    dense = [(str(i), torch.randn(shape)) for i, shape in enumerate(shapes)]
    strided = [(n, t.mT.contiguous().mT if t.ndim > 1 else t.clone()) for n, t in dense]
    runs = [window.runs for window in windows(dense, window_bytes, block=block)]
    assert runs == [window.runs for window in windows(strided, window_bytes, block=block)]


def test_a_pool_gives_the_same_memory_again() -> None:
    """What was given back is taken again, also as another dtype."""
    pool = Pool()
    first = pool.take(100, torch.float32, torch.device("cpu"))
    address = first.data_ptr()
    pool.give(first)
    second = pool.take(50, torch.float64, torch.device("cpu"))
    assert second.data_ptr() == address
    assert second.numel() == 50


@given(shapes=shapes)
def test_bytes_are_packed_and_unpacked(shapes: list[tuple[int, ...]]) -> None:
    """Tensors of any shape, dtype and stride come back from memory as they went in."""
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    tensors = [torch.randn(s).to(dtypes[i % 3]) for i, s in enumerate(shapes)]
    memory = torch.zeros(sum(t.nbytes for t in tensors) + 3, dtype=torch.uint8)
    pack_bytes([t.mT if t.ndim > 1 else t for t in tensors], memory)
    back = [torch.empty((t.mT if t.ndim > 1 else t).shape, dtype=t.dtype) for t in tensors]
    unpack_bytes(memory, back)
    assert all(
        torch.equal(t.mT if t.ndim > 1 else t, b) for t, b in zip(tensors, back, strict=True)
    )
    assert memory[-3:].tolist() == [0, 0, 0]


@given(spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=6))
def test_ranges_of_bytes_are_gathered(spans: list[tuple[int, int]]) -> None:
    """Each range follows the one before it, whether they overlap or not."""
    memory = torch.arange(30, dtype=torch.uint8)
    out = torch.empty(sum(length for _, length in spans), dtype=torch.uint8)
    expected = [i for start, length in spans for i in range(start, start + length)]
    assert gather_bytes(memory, spans, out).tolist() == expected
