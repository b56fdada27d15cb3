"""Rounding to the nearest, or by chance: unbiased, reproducible, and the same in C and torch.

Chance is a hash of (seed, level, tensor, call, rank, offset in the tensor): no generator has to be
kept, a run that is resumed draws what it would have drawn, however tensors are cut, and no two
ranks of a group round alike.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from loosestep.comm.flat.cuts import Runs

_SPREAD, _MIX, _LAST = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


class Rounding(enum.Enum):
    """What becomes of a value between two that can be sent."""

    NEAREST = "nearest"  # the smallest error of one value
    STOCHASTIC = "stochastic"  # up or down by chance, so that errors cancel in sums


class Draw(NamedTuple):
    """The key of the chances of one tensor in one message."""

    first: int
    second: int


def draw_of(*origin: object) -> Draw:
    """Return a key that depends on all of ``origin``.

    >>> draw_of(0, "weight", 1) == draw_of(0, "weight", 1) != draw_of(0, "weight", 2)
    True
    """
    digest = hashlib.blake2b(repr(origin).encode(), digest_size=8).digest()
    return Draw(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))


def key_of(draw: Draw, device: torch.device) -> torch.Tensor:
    """Return the key as a tensor: a number would make ``torch.compile`` begin anew for each."""
    return torch.tensor([_signed(draw.first), _signed(draw.second)], dtype=torch.int32).to(device)


def uniform(count: int, key: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Return numbers in [0, 1), one for every element; the twin of ``uniform`` in codecs.c.

    ``index`` is that of the first one in its tensor.
    """
    places = torch.arange(count, dtype=torch.int32, device=key.device)
    return _uniform(places + _signed(index & 0xFFFFFFFF), key[0], key[1])  # int32 wraps round


def uniform_in(runs: Runs, draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """Return such numbers for the elements of all runs, of which each has a key of its own."""
    lengths = torch.tensor([run.numel for run in runs.each])
    begins = torch.tensor([run.offset for run in runs.each]) - torch.tensor(runs.starts)
    first, second = torch.tensor(draws).to(torch.int32).unbind(1)
    begins, first, second = (
        each.repeat_interleave(lengths).to(device) for each in (begins, first, second)
    )
    places = torch.arange(runs.numel, device=device) + begins
    return _uniform(places.to(torch.int32), first, second)


def _uniform(places: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    hashed = places * _signed(_SPREAD) + first
    hashed = (hashed ^ _shift(hashed, 16)) * _signed(_MIX)
    hashed = (hashed ^ _shift(hashed, 13)) + second
    hashed = hashed * _signed(_LAST)
    hashed = hashed ^ _shift(hashed, 16)
    return _shift(hashed, 8).to(torch.float32) * 2.0**-24


def _shift(value: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right, filling with zeros: torch fills with the sign."""
    return (value >> places) & ((1 << (32 - places)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
