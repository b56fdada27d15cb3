"""What a codec is: values to bytes and back, with a size that is known beforehand."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import torch

import loosestep.comm.codecs.in_c as codec_c
from loosestep.comm.codecs.rounding import Draw

Function = TypeVar("Function", bound=Callable[..., object])


class Loops(enum.Enum):
    """Which loops do a codec's work; the bits are the same."""

    BEST = "best"  # C where it was built and the values are on the CPU, else torch
    C = "c"
    TORCH = "torch"

    def in_c(self, tensor: torch.Tensor) -> bool:
        """Say whether C is to work on ``tensor``."""
        return self is Loops.C or (self is Loops.BEST and codec_c.available(tensor))


def on_device(function: Function, tensor: torch.Tensor) -> Function:
    """Return ``function``, as one kernel where ``tensor`` is on an accelerator."""
    return function if tensor.device.type == "cpu" else cast(Function, _compiled(function))


@functools.cache
def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


class Codec(Protocol):
    """Turns flat float32 values into messages; needs no process group.

    A message is a contiguous tensor of bytes that begins where its memory does.
    """

    def nbytes(self, numel: int) -> int:
        """Return the size of a message of ``numel`` values."""

    def encode(self, values: torch.Tensor, message: torch.Tensor, draw: Draw | None) -> None:
        """Write finite ``values`` to ``message``, rounded by ``draw``; None: to the nearest."""

    def decode(
        self, message: torch.Tensor, numel: int, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write ``share`` times the first values of a message of ``numel`` to ``out``.

        As many as it has room for: all, or ``sample`` many.
        """

    def add(self, message: torch.Tensor, total: torch.Tensor, share: float) -> None:
        """Add ``share`` times the values of a message to ``total``."""

    def sample(self, numel: int) -> int:
        """Return how many values ``decode`` can read from the front of a message at little cost."""
