"""Codecs by themselves: C and torch agree to the bit, and errors stay within their bounds."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loosestep.comm.codecs import in_c as codec_c
from loosestep.comm.codecs import in_torch as codec_torch
from loosestep.comm.codecs.all_codecs import CODECS, codec
from loosestep.comm.codecs.blocks import Blocks
from loosestep.comm.codecs.codec import Codec, Loops
from loosestep.comm.codecs.largest import Largest
from loosestep.comm.codecs.narrow import Narrow
from loosestep.comm.codecs.rounding import Draw, draw_of, key_of, uniform
from loosestep.comm.flat.cuts import Run, Runs
from tests.support.codecs import LARGEST, SPECIAL, floats, same_bits

pytestmark = pytest.mark.fast


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Codec, Codec]:
    """Draw a codec in C and its twin in torch."""
    if draw(st.booleans()):
        density = draw(st.sampled_from([0.001, 0.01, 0.3, 0.999, 1.0]))
        chunk = draw(st.sampled_from([1, 7, 1000, 4096, 4097, 65536]))
        two = draw(st.sampled_from([None, 2]))
        one, other = (Largest(density, chunk, two, loops=way) for way in (Loops.C, Loops.TORCH))
        return one, other
    bits = draw(st.sampled_from([8, 4, 2, 1.6]))
    block = draw(st.sampled_from([1, 2, 3, 5, 64, 100, 256, 1000, 4096]))
    return Blocks(bits, block, loops=Loops.C), Blocks(bits, block, loops=Loops.TORCH)


DRAWS = st.one_of(st.none(), st.integers(0, 1000).map(draw_of))


def message(
    codec: Codec, values: torch.Tensor, draw: Draw | None = None, runs: Runs | None = None
) -> torch.Tensor:
    held = runs or Runs.of(values.numel())
    room = torch.full((codec.nbytes(held),), 77, dtype=torch.uint8)
    codec.encode(values, held, room, None if draw is None else [draw] * len(held.each))
    return room


def decoded(codec: Codec, sent: torch.Tensor, runs: Runs) -> torch.Tensor:
    out = torch.full((runs.numel,), math.nan)
    codec.decode(sent, runs, out)
    return out


def through(codec: Codec, values: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
    return decoded(codec, message(codec, values, draw), Runs.of(values.numel()))


@st.composite
def cuts(draw: st.DrawFn, numel: int) -> Runs:
    """Draw runs of one tensor or of several, empty ones among them."""
    edges = sorted(draw(st.lists(st.integers(0, numel), max_size=6)))
    pairs = itertools.pairwise([0, *edges, numel])
    offsets = st.sampled_from([0, 4096, (1 << 32) - 100, 1 << 33])
    return Runs(tuple(Run(str(i), draw(offsets), b - a) for i, (a, b) in enumerate(pairs)))


def test_there_is_a_compiler_here() -> None:
    """Otherwise all comparisons below compare torch with itself."""
    assert codec_c.available(torch.empty(1))


@given(
    values=floats(),
    pair=pairs(),
    draw=DRAWS,
    share=st.sampled_from([0.5, 1 / 3, 0.3, -1.0]),
    data=st.data(),
)
def test_c_and_torch_give_the_same_bits(
    values: torch.Tensor,
    pair: tuple[Codec, Codec],
    draw: Draw | None,
    share: float,
    data: st.DataObject,
) -> None:
    """Messages, values, sums and samples are equal, and nothing finite becomes infinite."""
    share = float(torch.tensor(share))
    runs = data.draw(cuts(values.numel()))
    in_c, in_torch = pair
    sent = message(in_c, values, draw, runs)
    assert torch.equal(sent, message(in_torch, values, draw, runs))
    there = decoded(in_c, sent, runs)
    assert same_bits(there, decoded(in_torch, sent, runs))
    assert bool(there.isfinite().all())
    sums = [torch.linspace(-1, 1, values.numel()) for _ in pair]
    for one, total in zip(pair, sums, strict=True):
        one.add(sent, runs, total, share)
    assert same_bits(*sums)
    front = runs.front(1000, in_c.block)
    for one in pair:
        part = torch.full((front,), math.nan)
        one.decode(sent, runs, part)
        assert torch.equal(part, there[:front])


@given(values=floats(), pair=pairs(), draw=DRAWS, data=st.data())
def test_runs_are_coded_by_themselves(
    values: torch.Tensor, pair: tuple[Codec, Codec], draw: Draw | None, data: st.DataObject
) -> None:
    """A tensor among others comes out as it does alone, whole or cut between its blocks."""
    one, runs = pair[0], data.draw(cuts(values.numel()))
    together = decoded(one, message(one, values, draw, runs), runs)
    cut = data.draw(st.integers(1, 5))
    for start, stop in runs.slices(cut, one.block):
        held, part = runs.part(start, stop), values[start:stop].clone()
        assert same_bits(together[start:stop], decoded(one, message(one, part, draw, held), held))


@given(values=floats(), block=st.sampled_from([1, 7, 256]), bits=st.sampled_from([8, 4]))
def test_steps_are_half_a_step_off_at_most(values: torch.Tensor, block: int, bits: int) -> None:
    """With a block's largest magnitude a: |error| <= a / 254 (or 14), or 2^-127; zeros stay."""
    result = through(Blocks(bits, block), values)
    most = (1 << (bits - 1)) - 1
    for lot, back in zip(values.split(block), result.split(block), strict=True):
        absmax = float(lot.abs().max()) if lot.numel() else 0.0
        bound = max(absmax / most / 2 * (1 + 1e-5), 2.0**-127)
        assert float((lot.double() - back.double()).abs().max()) <= bound if lot.numel() else True
        assert bool((back[lot == 0] == 0).all())


@given(values=floats(), block=st.sampled_from([7, 256]), key=st.integers(0, 100))
def test_chance_is_less_than_a_step_off(values: torch.Tensor, block: int, key: int) -> None:
    """Stochastic rounding takes one of the two neighbours."""
    result = through(Blocks(8, block), values, draw_of(key))
    for lot, back in zip(values.split(block), result.split(block), strict=True):
        bound = max(float(lot.abs().max()) / 127 * (1 + 1e-4), 2.0**-126) if lot.numel() else 0.0
        assert bool(((lot.double() - back.double()).abs() <= bound).all())


def test_int8_by_hand() -> None:
    """The largest magnitude 12.7 makes steps of 0.1: 0.25 is 2.5 steps, even 2; 0.34 is 3."""
    result = through(Blocks(8), torch.tensor([12.7, 0.25, 0.34, -0.36, 0.0]))
    expected = torch.tensor([12.7, 0.2, 0.3, -0.4, 0.0])
    assert torch.allclose(result, expected, rtol=1e-6)
    sent = message(Blocks(8), torch.tensor([127.0, 2.5, -3.5, 0.0]))
    assert sent[:4].view(torch.float32).item() == 1.0
    assert sent[4:].tolist() == [255, 130, 124, 128]  # 128 is zero: 127, 2, -4, 0


def test_int4_by_hand() -> None:
    """Steps of 1; five codes + 8 in three bytes, a plane of three and a plane of two."""
    sent = message(Blocks(4), torch.tensor([7.0, -7.0, 0.0, 2.5, -1.2]))
    assert sent[:4].view(torch.float32).item() == 1.0
    # codes 15, 1, 8 | 10, 7, and 8 to fill up
    assert sent[4:].tolist() == [15 + 16 * 10, 1 + 16 * 7, 8 + 16 * 8]


def test_int2_by_hand() -> None:
    """3, -3, 1, -1: rms sqrt(5); above 0.98 rms is 1.51 rms, below it 0.4528 rms."""
    rms = math.sqrt(5)
    result = through(Blocks(2), torch.tensor([3.0, -3.0, 1.0, -1.0]))
    expected = torch.tensor([1.51, -1.51, 0.4528, -0.4528]) * rms
    assert torch.allclose(result, expected, rtol=1e-6)
    assert through(Blocks(2), torch.zeros(300)).eq(0).all()


def test_borders_are_the_same_in_c_and_torch() -> None:
    """4000 values close to 0.9816 of an rms that the other 96 make 1."""
    near = torch.linspace(0.975, 0.99, 4000)
    rest = math.sqrt((4096 - float(near.double().square().sum())) / 96)
    values = torch.cat([near, torch.full((96,), rest)])
    pair = [Blocks(2, 4096, loops=loops) for loops in (Loops.C, Loops.TORCH)]
    assert torch.equal(*(message(one, values) for one in pair))
    border = float(near[through(pair[0], values)[:4000] > 1].min())
    assert border == pytest.approx(0.9816, abs=1e-5)


def test_int2_is_as_good_as_two_bits_can_be() -> None:
    """Max (1960): the squared error of a Gaussian in four levels is 0.1175 of its variance."""
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    error = (through(Blocks(2), values) - values).square().mean()
    assert float(error) == pytest.approx(0.1175, rel=0.02)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_chance_has_no_bias(bits: int) -> None:
    """The mean of many stochastic roundings is the value, as far as levels reach."""
    values = torch.linspace(-1.0, 1.0, 256)
    total = torch.zeros(256, dtype=torch.float64)
    for call in range(4000):
        total += through(Blocks(bits), values, draw_of("bias", call))
    rms = float(values.square().mean().sqrt())
    reach = 1.51 * rms if bits == 2 else 1.0
    clipped = values.clamp(-reach, reach)
    step = {8: 1 / 127, 4: 1 / 7, 2: 1.06 * rms}[bits]
    # A Bernoulli step has a deviation of at most step / 2; five deviations of the mean.
    assert float((total / 4000 - clipped).abs().max()) < 5 * step / 2 / math.sqrt(4000)


def test_chances_are_uniform_and_differ() -> None:
    """Sixteen bins fill evenly, and two keys give unrelated numbers."""
    cpu = torch.device("cpu")
    one, two = (uniform(1 << 16, key_of(draw_of(k), cpu)) for k in ("a", "b"))
    counts = torch.histc(one, 16, 0.0, 1.0)
    assert float(((counts - 4096).square() / 4096).sum()) < 40  # chi squared, 15 degrees: p 0.0005
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.02


@given(
    values=floats(),
    density=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    chunk=st.sampled_from([100, 4096, 5000]),
)
def test_the_largest_are_kept_exactly(values: torch.Tensor, density: float, chunk: int) -> None:
    """The first k of a stable sort of each chunk come through; everything else is zero."""
    expected = torch.zeros(values.numel())
    for start in range(0, values.numel(), chunk):
        lot = range(start, min(start + chunk, values.numel()))
        wanted = math.ceil(Fraction(str(density)) * len(lot))
        order = sorted(lot, key=lambda i: (-abs(float(values[i])), i))[:wanted]
        expected[order] = values[order]
    assert torch.equal(through(Largest(density, chunk), values), expected)


def test_places_by_hand() -> None:
    """The three largest of five; two places of 12 bits in three bytes, and one in two."""
    sent = message(Largest(0.6, 4096), torch.tensor([0.0, 4.0, 1.0, -3.0, 2.0]))
    assert sent[:12].view(torch.float32).tolist() == [4.0, -3.0, 2.0]
    assert sent[12:].tolist() == [1, 3 << 4, 0, 4, 0]
    wide = message(Largest(0.6, 5000), torch.tensor([0.0, 4.0, 1.0, -3.0, 2.0]))
    assert wide[12:].tolist() == [1, 0, 3, 0, 4, 0]


def test_density_is_meant_as_it_is_written() -> None:
    """0.1 of 30 is 3, though 0.1 * 30 is more than 3 in floats; one of few is one."""
    assert Largest(0.1).wanted(30) == 3
    assert Largest(0.001).wanted(5) == 1
    assert Largest(0.5).wanted(0) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(values=floats())
def test_narrow_values(dtype: torch.dtype, values: torch.Tensor) -> None:
    """A cast is torch's own, but what is too large becomes the largest."""
    limit = torch.finfo(dtype).max
    expected = values.clamp(-limit, limit).to(dtype).float()
    assert torch.equal(through(Narrow(dtype), values), expected)


@pytest.mark.parametrize("name", CODECS)
def test_sizes(name: str) -> None:
    """A message takes the bytes that it is said to, for every size."""
    one = codec(name)
    per_value = {"int8": 260 / 256, "int4": 132 / 256, "int2": 68 / 256}
    per_value["top 1 %"] = 41 * 5.5 / 4096  # of every chunk
    per_value["ternary"] = 56 / 256  # 52 bytes for the codes of a block
    assert one.nbytes(Runs.of(0)) == 0
    assert one.nbytes(Runs.of(40960)) == round(40960 * per_value.get(name, 2.0))
    for numel in range(0, 600, 7):
        values = torch.ones(numel)
        assert bool(through(one, values).isfinite().all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 7, 8, 31, 999])
def test_what_is_not_finite_is_found(bad: float, place: int) -> None:
    """At any place, in C and in torch; the largest float is finite."""
    values = torch.full((1000,), LARGEST)
    assert codec_c.all_finite(values)
    assert codec_torch.all_finite(values)
    values[place] = bad
    assert not codec_c.all_finite(values)
    assert not codec_torch.all_finite(values)


@pytest.mark.parametrize("block", [0, -1, 4097])
def test_blocks_have_a_size(block: int) -> None:
    """The error says the rule, the value and a way out."""
    with pytest.raises(ValueError, match=f"1..4096, got {block}; 256"):
        Blocks(8, block)


def test_two_bits_by_hand() -> None:
    """6, -1, 2 and -3 of mean size 3: 6 is above, and the others are 2 in the mean."""
    one, values = Largest(0.8, bits=2), torch.tensor([6.0, -1.0, 0.5, 2.0, -3.0])
    assert through(one, values).tolist() == [6.0, -2.0, 0.0, 2.0, -2.0]
    sent = message(one, values)
    assert sent[:8].view(torch.float32).tolist() == [2.0, 6.0]
    assert sent[8] == 1 + (2 << 2) + (0 << 4) + (2 << 6)
    assert sent.numel() == 8 + 1 + 6


def test_two_bits_of_the_largest_are_enough() -> None:
    """Of the largest 64 of 4096 Gaussian numbers a hundredth of the energy is lost at most."""
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    kept = through(Largest(1 / 64), values)
    error = (through(Largest(1 / 64, bits=2), values) - kept).square().sum()
    assert float(error / kept.square().sum()) < 0.01


@pytest.mark.parametrize("bits", [0, 4, True, 2.5])
def test_values_are_whole_or_in_two_bits(bits: int) -> None:
    """The error has the value and both choices."""
    with pytest.raises(ValueError, match="bits must be 2, or None"):
        Largest(0.5, bits=bits)


@pytest.mark.parametrize("chunk", [0, -1, 65537])
def test_chunks_have_a_size(chunk: int) -> None:
    """Places in them have 16 bits at most."""
    with pytest.raises(ValueError, match=f"1..65536, got {chunk}"):
        Largest(0.5, chunk)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, math.nan])
def test_density_is_a_share(density: float) -> None:
    """Nothing, or more than everything, cannot be sent."""
    with pytest.raises(ValueError, match="density"):
        Largest(density)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_torch_compile_gives_the_same_bits() -> None:
    """Slow (some 20 s): what accelerators run is the plain function, compiled."""
    compiled = torch.compile(codec_torch.encode_blocks, dynamic=False)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[::100] = torch.tensor(SPECIAL[:10])
    key = key_of(draw_of(1), values.device)
    # Not 4 bits with a tail: torch 2.13's C++ kernel for that writes beyond its memory (a CPU
    # never runs it: there the loops in C or plain torch do the work).
    for one, other in zip(
        compiled(values, 256, 8, key), codec_torch.encode_blocks(values, 256, 8, key), strict=True
    ):
        assert same_bits(one, other)
