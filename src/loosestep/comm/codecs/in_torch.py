"""Codecs in plain torch: what codecs.c computes, to the bit, on any device.

Everything here can be traced by ``torch.compile``, which makes one kernel of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loosestep.comm.codecs.rounding import uniform
from loosestep.comm.native import CONSTANTS

INNER, BORDER, OUTER = 0.4528, 0.9816, 1.510  # Lloyd and Max's levels for a Gaussian
SIGN_BORDER, SIGN_OUTER = 0.612, 1.224  # the same with three levels
TRITS = 5  # digits to base 3 in a byte
SHORT_CHUNK = CONSTANTS["SHORT_CHUNK"]  # elements of which a place takes 12 bits
LARGEST = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-126  # a smaller one might be flushed to zero, and divide by it
# One float below LARGEST / most, so that ``most`` times the scale is finite.
LARGEST_SCALE = {7: float.fromhex("0x1.249246p+125"), 127: float.fromhex("0x1.020406p+121")}


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Say whether there is neither an infinity nor a NaN, as a tensor of one."""
    return values.isfinite().all()


def encode_blocks(
    values: torch.Tensor, block: int, bits: float, key: torch.Tensor | None, index: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one float32 for every block of one run, and the rows of bytes."""
    chance = None if key is None else uniform(values.numel(), key, index)
    whole = values.numel() // block * block
    scales, rows = [], []
    for start, stop, width in ((0, whole, block), (whole, values.numel(), values.numel() - whole)):
        if start < stop:
            lot = values[start:stop].view(-1, width)
            luck = None if chance is None else chance[start:stop].view(-1, width)
            scale, codes = _coded(lot, bits, luck)
            scales.append(scale.flatten())
            rows.append(_pack(codes, bits).flatten())
    return torch.cat(scales), torch.cat(rows)


def decode_blocks(
    scales: torch.Tensor, rows: torch.Tensor, numel: int, block: int, bits: float
) -> torch.Tensor:
    """Return the values."""
    whole, rest = divmod(numel, block)
    edge = whole * row_bytes(block, bits)
    parts = []
    if whole:
        parts.append(_values(scales[:whole, None], rows[:edge].view(whole, -1), block, bits))
    if rest:
        parts.append(_values(scales[whole:, None], rows[edge:].view(1, -1), rest, bits))
    return torch.cat(parts)


def codes_per_byte(bits: float) -> int:
    """Return how many codes share a byte.

    >>> [codes_per_byte(bits) for bits in (8, 4, 2, 1.6)]
    [1, 2, 4, 5]
    """
    return int(8 / bits)


def row_bytes(count: int, bits: float) -> int:
    """Return how many bytes the codes of ``count`` values take."""
    return -(-count // codes_per_byte(bits))


def _coded(
    lot: torch.Tensor, bits: float, luck: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if codes_per_byte(bits) == TRITS:
        return _signs(lot, luck)
    return _levels(lot, luck) if bits == 2 else _steps(lot, int(bits), luck)


def _steps(
    lot: torch.Tensor, bits: int, luck: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    most = (1 << (bits - 1)) - 1
    scale = lot.abs().amax(1, keepdim=True) / float(most)
    scale = scale.clamp(min=SMALLEST_SCALE, max=LARGEST_SCALE[most])
    ratio = lot / scale
    whole = ratio.round() if luck is None else (ratio + luck).floor()
    return scale, (whole.clamp(-most, most) + float(most + 1)).to(torch.uint8)


def _levels(lot: torch.Tensor, luck: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rms = _rms(lot)
    inner, outer, border = rms * INNER, (rms * OUTER).clamp(max=LARGEST), rms * BORDER
    if luck is None:
        below = 1 - (lot < -border).to(torch.uint8)
        above = 2 + (lot > border).to(torch.uint8)
        return rms, torch.where(lot < 0.0, below, above)
    base = (lot >= -inner).to(torch.uint8) + (lot >= inner).to(torch.uint8)
    low = torch.where(base == 0, -outer, torch.where(base == 1, -inner, inner))
    width = torch.where(base == 1, inner * 2.0, outer - inner)
    return rms, base + (luck * width < lot - low).to(torch.uint8)


def _signs(lot: torch.Tensor, luck: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rms = _rms(lot)
    outer, border = (rms * SIGN_OUTER).clamp(max=LARGEST), rms * SIGN_BORDER
    if luck is None:
        return rms, 1 + (lot > border).to(torch.uint8) - (lot < -border).to(torch.uint8)
    base = (lot >= 0.0).to(torch.uint8)
    low = torch.where(base == 0, -outer, 0.0)
    return rms, base + (luck * outer < lot - low).to(torch.uint8)


def _rms(lot: torch.Tensor) -> torch.Tensor:
    """Return root mean squares."""
    squares = _sums(lot.to(torch.float64).square())
    return (squares / float(lot.shape[1])).sqrt().to(torch.float32)


def _sums(lot: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows, added in halves: an order that shapes leave alone, and C shares."""
    width = 1 << max(0, lot.shape[1] - 1).bit_length()
    sums = torch.nn.functional.pad(lot, (0, width - lot.shape[1]))
    while width > 1:
        width //= 2
        sums = sums[:, :width] + sums[:, width:]
    return sums


def _pack(codes: torch.Tensor, bits: float) -> torch.Tensor:
    planes, count = codes_per_byte(bits), codes.shape[1]
    width = row_bytes(count, bits)
    zero = 1 if planes == TRITS else 1 << (int(bits) - 1)
    cut = torch.nn.functional.pad(codes, (0, width * planes - count), value=zero)
    cut = cut.view(-1, planes, width)
    row = cut[:, 0]
    for plane in range(1, planes):
        row = row + cut[:, plane] * (3**plane if planes == TRITS else 1 << plane * int(bits))
    return row


def _digits(rows: torch.Tensor, bits: float) -> list[torch.Tensor]:
    """Return the codes of every plane."""
    planes = codes_per_byte(bits)
    if planes == TRITS:
        return [rows // 3**plane % 3 for plane in range(planes)]
    return [(rows >> (plane * int(bits))) & ((1 << int(bits)) - 1) for plane in range(planes)]


def _values(scale: torch.Tensor, rows: torch.Tensor, count: int, bits: float) -> torch.Tensor:
    codes = torch.cat(_digits(rows, bits), dim=1)[:, :count]
    if codes_per_byte(bits) == TRITS:
        outer = (scale * SIGN_OUTER).clamp(max=LARGEST)
        return torch.where(codes == 1, 0.0, torch.where(codes == 0, -outer, outer)).flatten()
    if bits != 2:
        return ((codes.to(torch.float32) - float(1 << (int(bits) - 1))) * scale).flatten()
    inner, outer = scale * INNER, (scale * OUTER).clamp(max=LARGEST)
    size = torch.where((codes == 1) | (codes == 2), inner, outer)
    return torch.where(codes < 2, -size, size).flatten()


def encode_topk(
    values: torch.Tensor, chunk: int, kept: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and places of the largest magnitudes of the chunks of one run.

    The first of equals, in order. ``kept`` are as many of a whole chunk, and of what is left.
    """
    whole = values.numel() // chunk * chunk
    chosen, places = [], []
    for lots, wanted in (
        (values[:whole].view(-1, chunk), kept[0]),
        (values[None, whole:], kept[1]),
    ):
        if lots.numel():
            place = _largest(lots, wanted)
            chosen.append(lots.gather(1, place).flatten())
            places.append(place.flatten())
    return torch.cat(chosen), torch.cat(places)


def _largest(lots: torch.Tensor, wanted: int) -> torch.Tensor:
    """Return the places of the ``wanted`` largest magnitudes of every row."""
    magnitude = lots.abs().view(torch.int32).to(torch.int64)
    place = torch.arange(lots.shape[1], dtype=torch.int64, device=lots.device)
    # Of equal magnitudes the earlier place is the larger key, and no two keys are equal.
    keys = (magnitude << 32) | (0x7FFFFFFF - place)
    chosen = 0x7FFFFFFF - (keys.topk(wanted, dim=1, sorted=False).values & 0x7FFFFFFF)
    return chosen.sort(dim=1).values


def pack_places(places: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the bytes of places in chunks: 12 bits each, or 16 in long chunks."""
    if chunk > SHORT_CHUNK:
        return torch.stack([places & 255, places >> 8], dim=1).flatten().to(torch.uint8)
    pairs = torch.nn.functional.pad(places, (0, places.numel() % 2)).view(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    three = [first & 255, first >> 8 | (second & 15) << 4, second >> 4]
    return torch.stack(three, dim=1).flatten()[: place_bytes(places.numel(), chunk)].to(torch.uint8)


def unpack_places(packed: torch.Tensor, count: int, chunk: int) -> torch.Tensor:
    """Return the places."""
    wide = packed.to(torch.int64)
    if chunk > SHORT_CHUNK:
        low, high = wide.view(-1, 2).unbind(1)
        return low | high << 8
    low, middle, high = torch.nn.functional.pad(wide, (0, count % 2)).view(-1, 3).unbind(1)
    both = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=1)
    return both.flatten()[:count]


def place_bytes(count: int, chunk: int) -> int:
    """Return how many bytes so many places take.

    >>> [place_bytes(3, chunk) for chunk in (4096, 65536)]
    [5, 6]
    """
    return -(-count * (16 if chunk > SHORT_CHUNK else 12) // 8)


def encode_signs(values: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two magnitudes for every chunk of such lengths, and the bytes of 2-bit codes.

    A code is 2 for what is negative, and 1 for the larger of the magnitudes.
    """
    inside = _inside(lengths, values.device)
    sizes = torch.zeros(inside.shape, dtype=torch.float64, device=values.device)
    sizes[inside] = values.abs().to(torch.float64)
    counts = inside.sum(1, keepdim=True)
    above = sizes > _sums(sizes) / counts
    num_above = above.sum(1, keepdim=True)
    low = _sums(sizes.masked_fill(above, 0.0)) / (counts - num_above).clamp(min=1)
    high = _sums(sizes * above) / num_above.clamp(min=1)
    levels = torch.cat([low, high], dim=1).to(torch.float32).clamp(max=LARGEST)
    codes = above[inside].to(torch.uint8) + 2 * (values < 0).to(torch.uint8)
    quads = torch.nn.functional.pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    first, second, third, fourth = quads.unbind(1)
    return levels, first | second << 2 | third << 4 | fourth << 6


def decode_signs(
    levels: torch.Tensor, packed: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """Return the values."""
    count = sum(lengths)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    codes = (packed[:, None] >> shifts & 3).flatten()[:count]
    counts = torch.tensor(lengths, device=packed.device)
    low, high = torch.repeat_interleave(levels, counts, dim=0, output_size=count).unbind(1)
    sizes = torch.where(codes % 2 == 1, high, low)
    return torch.where(codes >= 2, -sizes, sizes)


def _inside(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return which places of rows of the largest length lie within each row's own."""
    places = torch.arange(max(lengths, default=0), device=device)
    return places[None] < torch.tensor(lengths, device=device)[:, None]


def add_topk(
    indices: torch.Tensor, values: torch.Tensor, total: torch.Tensor, share: float
) -> None:
    """Add ``share`` times the values to their places."""
    total.index_add_(0, indices, values * share)
