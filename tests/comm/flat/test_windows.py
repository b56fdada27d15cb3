"""Windows of any size hold tensors of any shape: cut, packed and written back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.flat.windows import pack, unpack, windows

pytestmark = pytest.mark.fast


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
