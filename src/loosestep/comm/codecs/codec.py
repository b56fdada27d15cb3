"""What a codec is: values to bytes and back, with a size that is known beforehand."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import torch

import loosestep.comm.codecs.in_c as codec_c
from loosestep.comm.codecs.rounding import Draw
from loosestep.comm.flat.cuts import Runs

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

    The values are those of runs, each of which is a tensor's own: blocks begin anew with it. A
    message is a contiguous tensor of bytes that begins where its memory does.
    """

    block: int  # how many neighbours of a tensor are treated together

    def nbytes(self, runs: Runs) -> int:
        """Return the size of a message of such values."""

    def encode(
        self, values: torch.Tensor, runs: Runs, message: torch.Tensor, draws: Sequence[Draw] | None
    ) -> None:
        """Write finite ``values`` to ``message``.

        Each run is rounded by its own of the ``draws``; None: to the nearest.
        """

    def decode(
        self, message: torch.Tensor, runs: Runs, out: torch.Tensor, share: float = 1.0
    ) -> None:
        """Write ``share`` times the first values of a message of ``runs`` to ``out``.

        As many as it has room for: all, or whole blocks (``Runs.front``).
        """

    def add(self, message: torch.Tensor, runs: Runs, total: torch.Tensor, share: float) -> None:
        """Add ``share`` times the values of a message to ``total``."""
