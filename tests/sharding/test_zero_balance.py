"""Who owns how much: bookkeeping, without process groups."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from loosestep.sharding.ownership import UNIT_BYTES, Ownership, as_laid_out, is_dense, memory_of

pytestmark = pytest.mark.fast

WIDTH = 768


def gpt2_shapes() -> Iterator[tuple[int, ...]]:
    """Yield the shapes of GPT-2's 124 million parameters."""
    yield 50257, WIDTH
    yield 1024, WIDTH
    for _ in range(12):
        yield from [(WIDTH,)] * 4  # two LayerNorms
        yield from [(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
        yield from [(WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
    yield from [(WIDTH,)] * 2


def own(group_size: int, *, whole: bool) -> tuple[Ownership, list[torch.Tensor]]:
    parameters = [torch.empty(shape, device="meta") for shape in gpt2_shapes()]
    assert sum(p.numel() for p in parameters) == 124_439_808
    ownership = Ownership(group_size, whole=whole)
    ownership.add(parameters)
    return ownership, parameters


@pytest.mark.parametrize("group_size", [2, 4, 8, 16])
def test_slices_are_balanced(group_size: int) -> None:
    """No rank owns a thousandth more of GPT-2 than the mean."""
    ownership, parameters = own(group_size, whole=False)
    mean = sum(p.nbytes for p in parameters) / group_size
    assert sum(ownership.bytes_owned) == mean * group_size
    assert max(ownership.bytes_owned) <= 1.001 * mean


@pytest.mark.parametrize("group_size", [2, 4, 8, 16])
def test_whole_parameters_are_balanced(group_size: int) -> None:
    """The largest load is within 5 % of what any division must have: the mean or the largest."""
    ownership, parameters = own(group_size, whole=True)
    sizes = [p.nbytes for p in parameters]
    assert sum(ownership.bytes_owned) == sum(sizes)
    assert max(ownership.bytes_owned) <= 1.05 * max(sum(sizes) / group_size, max(sizes))


shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64])
parameters_given = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8)


@given(parameters_given, st.integers(1, 9), st.booleans())
def test_every_element_has_one_owner(
    described: list[tuple[tuple[int, ...], torch.dtype]], group_size: int, whole: bool
) -> None:
    """Parts follow each other without gaps, and start where a vector register would."""
    parameters = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in described]
    ownership = Ownership(group_size, whole=whole)
    ownership.add(parameters)
    for parameter in parameters:
        parts = ownership.shares[parameter]
        filled = [(start, stop) for start, stop in parts if start < stop]
        ends = [0, *(stop for _, stop in filled)]
        assert [start for start, _ in filled] == ends[:-1]
        assert ends[-1] == parameter.numel()
        assert all(start * parameter.element_size() % UNIT_BYTES == 0 for start, _ in filled)
        assert not whole or len(filled) <= 1
    owned = [
        sum((b - a) * p.element_size() for p in parameters for a, b in [ownership.shares[p][m]])
        for m in range(group_size)
    ]
    assert owned == ownership.bytes_owned


@given(parameters_given, st.integers(1, 9))
def test_slices_differ_by_little(
    described: list[tuple[tuple[int, ...], torch.dtype]], group_size: int
) -> None:
    """Whatever the shapes, two ranks differ by at most a register for every parameter."""
    ownership = Ownership(group_size, whole=False)
    ownership.add(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in described)
    assert max(ownership.bytes_owned) - min(ownership.bytes_owned) <= UNIT_BYTES * (
        1 + len(described)
    )


@given(shapes, st.randoms(use_true_random=False))
@example((5, 0), Random(0))
def test_memory_order(shape: tuple[int, ...], random: Random) -> None:
    """Permuted tensors are dense, and their memory can be read and laid out anew."""
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    permuted = tensor.permute(order)
    assert is_dense(permuted)
    assert torch.equal(memory_of(permuted), tensor.flatten())
    plain = permuted.contiguous()
    assert torch.equal(memory_of(as_laid_out(plain, permuted)), tensor.flatten())


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 1).expand(4, 3), torch.zeros(6)[::2], torch.zeros(4, 6)[:, :3]]
)
def test_gaps_and_repeats_are_seen(tensor: torch.Tensor) -> None:
    """Expanded, strided and cut tensors are not dense."""
    assert not is_dense(tensor)
