"""Fewer bytes by fewer bits: 8, 4, 2 or 1.6 for every value, and a scale for every block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loosestep.comm.codecs.blocks import Blocks
from loosestep.comm.codecs.rounding import Rounding
from loosestep.comm.reducers.compressed import Compressed
from loosestep.comm.reducers.reducer import NonFinite


@dataclass(frozen=True, init=False, repr=False)
class _Quantized(Compressed):
    """The mean of values in few bits."""

    block: int = 256  # of a tensor; larger: fewer bytes, coarser where magnitudes differ
    rounding: Rounding = Rounding.NEAREST
    seed: int = 0  # of the chances, if rounding is stochastic
    on_nonfinite: NonFinite = NonFinite.RAISE

    def __init__(
        self,
        block: int = 256,
        *,
        rounding: Rounding | str = Rounding.NEAREST,
        seed: int = 0,
        on_nonfinite: NonFinite | str = NonFinite.RAISE,
    ) -> None:
        self._settle(block=block, rounding=rounding, seed=seed, on_nonfinite=on_nonfinite)

    @property
    def bits(self) -> float:
        """How many a value takes."""
        raise NotImplementedError

    @cached_property
    def codec(self) -> Blocks:
        """What makes messages."""
        return Blocks(self.bits, self.block)

    def __repr__(self) -> str:
        chance = f", seed={self.seed}" if self.rounding is Rounding.STOCHASTIC else ""
        return (
            f"{type(self).__name__}(block={self.block}, rounding='{self.rounding.value}'{chance}, "
            f"on_nonfinite='{self.on_nonfinite.value}')"
        )


class Int8(_Quantized):
    """Average in 8 bits: a quarter of float32's bytes, errors of at most 0.4 % of a block's peak.

    ``rounding="stochastic"`` makes errors cancel in sums; ``on_nonfinite="skip"`` leaves ranks
    with infinities or NaN out of the mean, where otherwise all ranks raise ``NotFinite``.

    >>> import torch
    >>> Int8().bytes_on_wire(numel=512, dtype=torch.float32, group_size=2)
    521
    >>> Int8().bytes_on_wire(numel=[500, 12], dtype=torch.float32, group_size=2)
    525
    """

    bits = 8


class Int4(_Quantized):
    """Average in 4 bits: an eighth of float32's bytes; best inside ``ErrorFeedback``."""

    bits = 4


class Int2(_Quantized):
    """Average in 2 bits: a fifteenth of float32's bytes; only inside ``ErrorFeedback``, as a rule.

    There is no level at zero: a zero in a block that is not all zero becomes +0.45 of its rms.
    """

    bits = 2


class Ternary(_Quantized):
    """Average in 1.6 bits: an eighteenth of float32's bytes, of which zeros stay zero.

    For gradients: a row of an embedding that nobody used stays as it is.

    >>> import torch
    >>> Ternary().bytes_on_wire(numel=512, dtype=torch.float32, group_size=2)
    113
    """

    bits = 1.6
