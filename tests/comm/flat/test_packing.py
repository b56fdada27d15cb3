"""Tensors one after the other in a buffer, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.flat.packing import (
    flat_copies,
    pack_bytes,
    pack_flats,
    unpack_bytes,
    unpack_flats,
    write_back,
)

pytestmark = pytest.mark.fast

shapes = st.lists(
    st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple), min_size=1, max_size=8
)


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


@given(shapes=shapes, transpose=st.booleans())
def test_flat_copies_are_packed_unpacked_and_written_back(
    shapes: list[tuple[int, ...]], transpose: bool
) -> None:
    """What is written to flat copies reaches tensors of any strides, and autograd hears of it."""
    tensors = [torch.randn(shape) for shape in shapes]
    if transpose:
        tensors = [t.mT if t.ndim > 1 else t for t in tensors]
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    flats = flat_copies(tensors)
    buffer = pack_flats(flats, torch.empty(sum(t.numel() for t in tensors)))
    assert buffer.tolist() == [x for t in before for x in t.flatten().tolist()]
    unpack_flats(buffer + 1, [flat.detach() for flat in flats])
    write_back(tensors, flats)
    assert all(torch.equal(t, b + 1) for t, b in zip(tensors, before, strict=True))
    assert all(t._version > v for t, v in zip(tensors, versions, strict=True))


def test_nothing_is_packed_and_unpacked() -> None:
    """Without tensors the buffer stays as it is."""
    buffer = torch.zeros(0)
    assert pack_flats([], buffer) is buffer
    unpack_flats(buffer, [])
