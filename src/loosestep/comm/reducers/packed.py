"""A host's replicas of some values as one message in blocks, and back, in one pass each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import loosestep.comm.codecs.in_c as codec_c
from loosestep.comm.codecs.blocks import Blocks


class Packed:
    """How the values of one buffer travel between two hosts."""

    def __init__(self, codec: Blocks, numel: int) -> None:
        self._codec, self._numel = codec, numel
        self.nbytes = codec.nbytes(numel)

    def pack(
        self,
        replicas: Sequence[torch.Tensor],
        message: torch.Tensor,
        units: tuple[torch.Tensor, float] | None = None,
    ) -> bool:
        """Write the mean of the replicas; return whether it is finite.

        ``units`` are mean squares, and the least unit.
        """
        codec, parts = self._codec, self._codec.cut(message, self._numel)
        return codec_c.pack_host(replicas, units, codec.block, codec.bits, parts)

    def unpack(
        self,
        messages: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        units: tuple[torch.Tensor, float, float] | None = None,
    ) -> float:
        """Write the mean of two messages to all places.

        Of the mean squares among ``units`` the last number says how much stays; return the largest.
        """
        codec = self._codec
        parts = [codec.cut(message, self._numel) for message in messages]
        return codec_c.unpack_pair(parts, units, codec.block, codec.bits, places)

    def commit(self) -> None:
        """Let the state have what was learnt: nothing."""
