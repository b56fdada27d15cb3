"""Tensors one after the other in a flat buffer, as values or as bytes, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from loosestep.comm import native
from loosestep.comm.flat.cuts import Bounds, following


@dataclass(frozen=True)
class Addresses:
    """Where contiguous tensors lie and how many bytes they have, as C reads it.

    Whoever keeps one looks before every use whether the tensors still lie there.
    """

    starts: ctypes.Array[ctypes.c_void_p]
    sizes: ctypes.Array[ctypes.c_int64]
    num: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Addresses | None:
        """Return them; None: C cannot read all of the tensors, or there are no loops in C."""
        num = len(tensors)
        if native.loops() is None or not all(map(_is_plain, tensors)):
            return None
        starts = (ctypes.c_void_p * num)(*(tensor.data_ptr() for tensor in tensors))
        return cls(starts, (ctypes.c_int64 * num)(*(tensor.nbytes for tensor in tensors)), num)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether the bytes of a tensor, in their order, are its values."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()


def pack_flats(flats: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Copy flat tensors to one that has room for exactly them, and return it."""
    if flats:
        torch.cat(list(flats), out=out)  # one call: many small tensors cost a call each
    return out


def unpack_flats(
    buffer: torch.Tensor, flats: Sequence[torch.Tensor], sizes: list[int] | None = None
) -> None:
    """Copy back what ``pack_flats`` has put one after the other; who knows the sizes gives them."""
    if flats:
        sizes = [flat.numel() for flat in flats] if sizes is None else sizes
        torch._foreach_copy_(list(flats), list(torch.split(buffer, sizes)))


def flat_copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as flat ones, in logical order: views, or copies where there are none."""
    return [tensor.contiguous().view(-1) for tensor in tensors]


def write_back(tensors: Iterable[torch.Tensor], flats: Iterable[torch.Tensor]) -> None:
    """Take in what somebody has written to ``flat_copies``, to memory where they are views."""
    written = []
    for tensor, flat in zip(tensors, flats, strict=True):
        if tensor.is_contiguous():
            written.append(tensor)
        else:
            tensor.copy_(flat.view(tensor.shape))
    tell_autograd(written)


def tell_autograd(tensors: Iterable[torch.Tensor]) -> None:
    """Note that memory was written by others than torch: values saved for backward are stale."""
    increment_version(tensors)


def pack_bytes(tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Copy tensors to the front of some bytes, one after the other.

    >>> memory = torch.zeros(5, dtype=torch.uint8)
    >>> pack_bytes([torch.tensor([1.0]), torch.tensor([True])], memory)
    >>> memory.tolist()
    [0, 0, 128, 63, 1]
    """
    for tensor, (start, stop) in zip(tensors, _byte_bounds(tensors), strict=True):
        memory[start:stop].copy_(tensor.reshape(-1).view(torch.uint8))


def unpack_bytes(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy back to contiguous tensors what ``pack_bytes`` has put one after the other."""
    for tensor, (start, stop) in zip(tensors, _byte_bounds(tensors), strict=True):
        tensor.view(-1).view(torch.uint8).copy_(memory[start:stop])


def _byte_bounds(tensors: Sequence[torch.Tensor]) -> Bounds:
    return following(tensor.nbytes for tensor in tensors)
