"""Codecs in C, by way of ctypes: the same names as in ``in_torch``, writing in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from loosestep.comm import native
from loosestep.comm.codecs.in_torch import codes_per_byte
from loosestep.comm.codecs.rounding import Draw
from loosestep.comm.flat.cuts import Runs

Parts = tuple[torch.Tensor, torch.Tensor]  # of a message: numbers in float32, and bytes

_Chance = native.STRUCTURES["Chance"]


def available(tensor: torch.Tensor) -> bool:
    """Say whether there are C loops for this tensor."""
    return tensor.device.type == "cpu" and native.loops() is not None


def all_finite(values: torch.Tensor) -> bool:
    """Say whether there is neither an infinity nor a NaN."""
    return bool(_loops().all_finite(values.data_ptr(), values.numel()))


def encode_blocks(
    values: torch.Tensor,
    runs: Runs,
    block: int,
    bits: float,
    draws: Sequence[Draw] | None,
    out: Parts,
) -> None:
    """Write one float32 for every block, and the rows of bytes."""
    what = (values.data_ptr(), runs.lengths, len(runs.each), block)
    places = (part.data_ptr() for part in out)
    _loops().encode_blocks(codes_per_byte(bits), *what, _chances(runs, draws), *places)


def decode_blocks(
    message: Parts, runs: Runs, block: int, bits: float, out: torch.Tensor, share: float
) -> None:
    """Write ``share`` times the values."""
    what = (*(part.data_ptr() for part in message), runs.lengths, len(runs.each), out.numel())
    _loops().decode_blocks(codes_per_byte(bits), *what, block, share, out.data_ptr())


def add_blocks(
    message: Parts, runs: Runs, block: int, bits: float, total: torch.Tensor, share: float
) -> None:
    """Add ``share`` times the values to ``total``."""
    what = (*(part.data_ptr() for part in message), runs.lengths, len(runs.each), total.numel())
    _loops().add_blocks(codes_per_byte(bits), *what, block, share, total.data_ptr())


def encode_topk(
    values: torch.Tensor, runs: Runs, chunk: int, kept: ctypes.Array[ctypes.c_int32], out: Parts
) -> None:
    """Write values and places of each chunk's largest magnitudes, the first of equals, in order."""
    what = (values.data_ptr(), runs.lengths, len(runs.each), chunk, kept)
    _loops().encode_topk(*what, *(part.data_ptr() for part in out))


def add_topk(
    message: Parts,
    runs: Runs,
    chunk: int,
    kept: ctypes.Array[ctypes.c_int32],
    total: torch.Tensor,
    share: float,
) -> None:
    """Add ``share`` times the values to their places."""
    what = (*(part.data_ptr() for part in message), runs.lengths, len(runs.each), total.numel())
    _loops().add_topk(*what, chunk, kept, share, total.data_ptr())


def _chances(runs: Runs, draws: Sequence[Draw] | None) -> Any:
    if draws is None:
        return None
    pairs = zip(runs.each, draws, strict=True)
    chances = [_Chance(*draw, run.offset & 0xFFFFFFFF) for run, draw in pairs]
    return (_Chance * len(draws))(*chances)


def _loops() -> Any:
    loops = native.loops()
    assert loops is not None, "asked for with available()"
    return loops
