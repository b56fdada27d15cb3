"""Codecs in C, by way of ctypes: the same names as in ``codec_torch``, writing in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from loosestep.comm import native
from loosestep.comm.codecs.in_torch import codes_per_byte
from loosestep.comm.codecs.rounding import Draw

Parts = tuple[torch.Tensor, torch.Tensor]  # of a message: the scales, and the rows of bytes


def available(tensor: torch.Tensor) -> bool:
    """Say whether there are C loops for this tensor."""
    return tensor.device.type == "cpu" and native.loops() is not None


def all_finite(values: torch.Tensor) -> bool:
    """Say whether there is neither an infinity nor a NaN."""
    return bool(_loops().all_finite(values.data_ptr(), values.numel()))


def encode_blocks(
    values: torch.Tensor,
    block: int,
    bits: float,
    draw: Draw | None,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write one float32 for every block, and the rows of bytes."""
    key = (0, 0, 0) if draw is None else (1, *draw)
    places = (part.data_ptr() for part in out)
    planes, count = codes_per_byte(bits), values.numel()
    _loops().encode_blocks(planes, values.data_ptr(), count, block, *key, *places)


def decode_blocks(
    scales: torch.Tensor,
    rows: torch.Tensor,
    block: int,
    bits: float,
    out: torch.Tensor,
    share: float,
) -> None:
    """Write ``share`` times the values."""
    message = (scales.data_ptr(), rows.data_ptr())
    planes, count = codes_per_byte(bits), out.numel()
    _loops().decode_blocks(planes, *message, count, block, share, out.data_ptr())


def add_blocks(
    scales: torch.Tensor,
    rows: torch.Tensor,
    block: int,
    bits: float,
    total: torch.Tensor,
    share: float,
) -> None:
    """Add ``share`` times the values to ``total``."""
    message = (scales.data_ptr(), rows.data_ptr())
    planes, count = codes_per_byte(bits), total.numel()
    _loops().add_blocks(planes, *message, count, block, share, total.data_ptr())


def encode_topk(
    values: torch.Tensor, wanted: int, indices: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Write indices and values of the largest magnitudes, the first of equals, in order."""
    places = (indices.data_ptr(), chosen.data_ptr())
    _loops().encode_topk(values.data_ptr(), values.numel(), wanted, *places)


def add_topk(
    indices: torch.Tensor, values: torch.Tensor, total: torch.Tensor, share: float
) -> None:
    """Add ``share`` times the values to their places."""
    places = (indices.data_ptr(), values.data_ptr())
    _loops().add_topk(*places, indices.numel(), share, total.data_ptr())


def to_units(values: torch.Tensor, squares: torch.Tensor, least: float, out: torch.Tensor) -> None:
    """Write values in units of their own: the roots of mean squares, but at least ``least``."""
    places = (values.data_ptr(), squares.data_ptr())
    _loops().to_units(*places, values.numel(), least, out.data_ptr())


def from_units(values: torch.Tensor, squares: torch.Tensor, least: float, keep: float) -> float:
    """Undo it in place, keep that much of the mean squares, and return the largest of the new."""
    places = (values.data_ptr(), squares.data_ptr())
    return float(_loops().from_units(*places, values.numel(), least, keep))


def pack_host(
    replicas: Sequence[torch.Tensor],
    units: tuple[torch.Tensor, float] | None,
    block: int,
    bits: float,
    out: Parts,
) -> bool:
    """Write the mean of the replicas as a message, in units (squares, and the least one) if given.

    Return whether it is finite; where it is not, what was written means nothing.
    """
    squares, least = (None, 0.0) if units is None else (units[0].data_ptr(), units[1])
    places = (part.data_ptr() for part in out)
    planes, count = codes_per_byte(bits), replicas[0].numel()
    given = (_table(replicas), len(replicas), squares, least)
    return bool(_loops().pack_host(planes, *given, count, block, *places))


def unpack_pair(
    messages: Sequence[Parts],
    units: tuple[torch.Tensor, float, float] | None,
    block: int,
    bits: float,
    outs: Sequence[torch.Tensor],
) -> float:
    """Write the mean of two messages to all of ``outs``; units are squares, the least, and keep.

    Return the largest of the new squares.
    """
    squares, least, keep = (None, 0.0, 0.0)
    if units is not None:
        squares, least, keep = units[0].data_ptr(), units[1], units[2]
    scales, rows = (_table(parts) for parts in zip(*messages, strict=True))
    planes, count, places = codes_per_byte(bits), outs[0].numel(), (_table(outs), len(outs))
    given = (scales, rows, squares, least, keep)
    return float(_loops().unpack_pair(planes, *given, count, block, *places))


def _table(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _loops() -> Any:
    loops = native.loops()
    assert loops is not None, "asked for with available()"
    return loops
