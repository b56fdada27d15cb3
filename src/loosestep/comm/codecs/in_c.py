"""Codecs in C, by way of ctypes: the same names as in ``codec_torch``, writing in place."""

from __future__ import annotations

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


def _loops() -> Any:
    loops = native.loops()
    assert loops is not None, "asked for with available()"
    return loops
