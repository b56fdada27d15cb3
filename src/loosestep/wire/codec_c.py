"""Codecs in C, by way of ctypes: the same names as in ``codec_torch``, writing in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from loosestep.wire.codec_torch import codes_per_byte
from loosestep.wire.fused import library
from loosestep.wire.rounding import Draw

_POINTER, _COUNT, _INT, _WORD, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_float,
)
_BLOCK_CALLS: dict[str, list[Any]] = {
    "encode": [_POINTER, _COUNT, _COUNT, _INT, _WORD, _WORD, _POINTER, _POINTER],
    "decode": [_POINTER, _POINTER, _COUNT, _COUNT, _FLOAT, _POINTER],
    "add": [_POINTER, _POINTER, _COUNT, _COUNT, _FLOAT, _POINTER],
    "pack_host": [_POINTER, _COUNT, _POINTER, _FLOAT, _COUNT, _COUNT, _POINTER, _POINTER],
    "unpack_pair": [
        *(_POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT, _COUNT, _COUNT),
        *(_POINTER, _COUNT),
    ],
}
_SIGNATURES = {
    "all_finite": [_POINTER, _COUNT],
    "encode_topk": [_POINTER, _COUNT, _COUNT, _POINTER, _POINTER],
    "add_topk": [_POINTER, _POINTER, _COUNT, _FLOAT, _POINTER],
    "to_units": [_POINTER, _POINTER, _COUNT, _FLOAT, _POINTER],
    "from_units": [_POINTER, _POINTER, _COUNT, _FLOAT, _FLOAT],
} | {f"{verb}{codes}": types for verb, types in _BLOCK_CALLS.items() for codes in (1, 2, 4, 5)}
_RESULTS: dict[str, Any] = {"all_finite": _INT, "from_units": _FLOAT}
_RESULTS |= {f"pack_host{codes}": _INT for codes in (1, 2, 4, 5)}
_RESULTS |= {f"unpack_pair{codes}": _FLOAT for codes in (1, 2, 4, 5)}

Parts = tuple[torch.Tensor, torch.Tensor]  # of a message: the scales, and the rows of bytes


def available(tensor: torch.Tensor) -> bool:
    """Say whether there are C loops for this tensor."""
    return tensor.device.type == "cpu" and library("codecs") is not None


def all_finite(values: torch.Tensor) -> bool:
    """Say whether there is neither an infinity nor a NaN."""
    return bool(_call("all_finite")(values.data_ptr(), values.numel()))


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
    _call(f"encode{codes_per_byte(bits)}")(values.data_ptr(), values.numel(), block, *key, *places)


def decode_blocks(
    scales: torch.Tensor,
    rows: torch.Tensor,
    block: int,
    bits: float,
    out: torch.Tensor,
    share: float,
) -> None:
    """Write ``share`` times the values."""
    _call(f"decode{codes_per_byte(bits)}")(
        scales.data_ptr(), rows.data_ptr(), out.numel(), block, share, out.data_ptr()
    )


def add_blocks(
    scales: torch.Tensor,
    rows: torch.Tensor,
    block: int,
    bits: float,
    total: torch.Tensor,
    share: float,
) -> None:
    """Add ``share`` times the values to ``total``."""
    _call(f"add{codes_per_byte(bits)}")(
        scales.data_ptr(), rows.data_ptr(), total.numel(), block, share, total.data_ptr()
    )


def encode_topk(
    values: torch.Tensor, wanted: int, indices: torch.Tensor, chosen: torch.Tensor
) -> None:
    """Write indices and values of the largest magnitudes, the first of equals, in order."""
    places = (indices.data_ptr(), chosen.data_ptr())
    _call("encode_topk")(values.data_ptr(), values.numel(), wanted, *places)


def add_topk(
    indices: torch.Tensor, values: torch.Tensor, total: torch.Tensor, share: float
) -> None:
    """Add ``share`` times the values to their places."""
    places = (indices.data_ptr(), values.data_ptr())
    _call("add_topk")(*places, indices.numel(), share, total.data_ptr())


def to_units(values: torch.Tensor, squares: torch.Tensor, least: float, out: torch.Tensor) -> None:
    """Write values in units of their own: the roots of mean squares, but at least ``least``."""
    places = (values.data_ptr(), squares.data_ptr())
    _call("to_units")(*places, values.numel(), least, out.data_ptr())


def from_units(values: torch.Tensor, squares: torch.Tensor, least: float, keep: float) -> float:
    """Undo it in place, keep that much of the mean squares, and return the largest of the new."""
    places = (values.data_ptr(), squares.data_ptr())
    return float(_call("from_units")(*places, values.numel(), least, keep))


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
    count = replicas[0].numel()
    call = _call(f"pack_host{codes_per_byte(bits)}")
    return bool(call(_table(replicas), len(replicas), squares, least, count, block, *places))


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
    count, call = outs[0].numel(), _call(f"unpack_pair{codes_per_byte(bits)}")
    places = (_table(outs), len(outs))
    return float(call(scales, rows, squares, least, keep, count, block, *places))


def _table(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


@cache
def _call(name: str) -> Callable[..., Any]:
    loops = library("codecs")
    assert loops is not None, "asked for with available()"
    function: Any = loops[name]
    function.argtypes = _SIGNATURES[name]
    function.restype = _RESULTS.get(name)
    return function  # type: ignore[no-any-return]
