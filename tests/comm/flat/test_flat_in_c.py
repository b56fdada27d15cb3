"""Small tensors that one call in C packs, writes back and looks through: as plain torch does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from loosestep.comm import native
from loosestep.comm.flat.packing import Addresses
from loosestep.comm.flat.windows import pack, unpack, windows
from loosestep.sync.finite import EXPONENTS, batches, first_nonfinite

pytestmark = pytest.mark.fast
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def tensors(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = [(3,), (1,), (2, 5), (), (7, 1, 2), (64,)]
    return [(f"t{i}", (torch.randn(size) * 3).to(dtype)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_and_written_back_as_by_torch(dtype: torch.dtype) -> None:
    """Both give the same buffer and the same tensors, and autograd hears of the write."""
    named = tensors(dtype)
    (window,) = windows(named)
    assert (window.addresses is None) == (native.loops() is None)
    packed = pack(window, torch.empty(window.numel, dtype=dtype))
    with mock.patch("loosestep.comm.native.loops", return_value=None):
        (plain,) = windows(named)
        assert torch.equal(pack(plain, torch.empty(plain.numel, dtype=dtype)), packed)
    versions = [tensor._version for _, tensor in named]
    unpack(window, packed.flip(0))
    assert torch.equal(torch.cat([t.flatten() for _, t in named]), packed.flip(0))
    assert all(t._version > before for (_, t), before in zip(named, versions, strict=True))


def test_other_strides_and_signs_are_left_to_torch() -> None:
    """A transposed tensor and one whose sign is a flag are no plain bytes."""
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert Addresses.of([torch.randn(2, 3).t()]) is None
    assert Addresses.of([torch._neg_view(torch.randn(3))]) is None


@pytest.mark.parametrize("dtype", list(EXPONENTS))
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_the_first_that_is_not_finite_is_named(dtype: torch.dtype, bad: float) -> None:
    """Also the last value of a tensor counts, and the largest finite one does not."""
    named = tensors(dtype)
    named[0][1][0] = torch.finfo(dtype).max
    assert first_nonfinite(batches(named), encoded=False) == ""
    named[4][1].view(-1)[-1] = named[5][1][0] = bad
    assert first_nonfinite(batches(named), encoded=False) == "t4"
    with mock.patch("loosestep.comm.native.loops", return_value=None):
        assert first_nonfinite(batches(named), encoded=False) == "t4"
