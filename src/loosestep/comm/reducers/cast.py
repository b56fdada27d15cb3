"""Fewer bytes by a narrower dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from loosestep.comm.codecs.narrow import Narrow, narrow
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.compressed import Compressed, Memories
from loosestep.comm.reducers.mean import Mean
from loosestep.comm.reducers.reducer import (
    NOTHING,
    Around,
    Handle,
    NonFinite,
    Place,
    Reducer,
    check_reducer,
)
from loosestep.comm.tensors import Named


@dataclass(frozen=True)
class Cast(Reducer):
    """Average in a narrower dtype: half the bytes for bf16, at the precision of bf16.

    Values travel and come back as ``dtype``; the sum in between is kept wider, so all ranks end
    bit-equal. A finite value beyond the narrow range is sent as the largest that fits. A buffer
    that is no wider than ``dtype`` already is left to ``inner`` as it is. Infinities and NaN
    travel, as with ``Mean``; inside ``ErrorFeedback`` they are an error.

    >>> Cast(torch.bfloat16).bytes_on_wire(numel=8, dtype=torch.float32, group_size=2)
    16
    """

    dtype: torch.dtype
    inner: Reducer = field(default_factory=Mean)

    lossy = True

    def __post_init__(self) -> None:
        """Refuse what is no dtype, and what is no reducer of copies."""
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise TypeError(
                f"Cast needs a floating dtype such as torch.bfloat16, got {self.dtype!r}"
            )
        check_reducer("inner", self.inner)
        if self.inner.lossy and self.inner.resident:
            raise ValueError(
                f"Cast hands copies to its inner reducer, and {self.inner} works on gradients "
                "where they are; give TwoLevel(Cast(...), inside=SharedMemoryMean())"
            )

    @property
    def on_nonfinite(self) -> NonFinite | None:
        """What ``inner`` does about infinities and NaN."""
        return self.inner.on_nonfinite

    @property
    def host_size(self) -> int | None:
        """That of ``inner``."""
        return self.inner.host_size

    @property
    def block(self) -> int:
        """That of ``inner``."""
        return self.inner.block

    @property
    def remembers(self) -> bool:
        """Whether ``inner`` does."""
        return self.inner.remembers

    @property
    def engine(self) -> Compressed | None:
        """What moves narrow messages with a memory; None if ``inner`` is to move them."""
        return _NarrowMessages(self.dtype) if self.inner == Mean() else None

    def init(self, tensors: Sequence[Named], peers: Peers) -> Any:
        """Return the state of ``inner``."""
        return self.inner.init(tensors, peers)

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        """Launch the mean of a narrow copy."""
        if peers.size == 1 or buffer.dtype.itemsize <= self.dtype.itemsize:
            return self.inner.start(buffer, peers, state, place)
        copy = narrow(buffer, self.dtype)
        return _CastInFlight(buffer, copy, self.inner.start(copy, peers, state, place))

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what ``inner`` sends for the narrow copy."""
        narrower = dtype if dtype.itemsize <= self.dtype.itemsize else self.dtype
        return self.inner.bytes_on_wire(numel, narrower, group_size, group_rank)

    def __repr__(self) -> str:
        return f"Cast({self.dtype}, {self.inner})"


class _CastInFlight(Around):
    def __init__(self, buffer: torch.Tensor, narrow: torch.Tensor, inner: Handle) -> None:
        super().__init__(inner)
        self._buffer, self._narrow = buffer, narrow

    @property
    def bytes_held(self) -> int:
        """The narrow copy, and what its mean takes."""
        return self._narrow.nbytes + super().bytes_held

    def wait(self) -> None:
        """Widen the result into the buffer."""
        super().wait()
        self._buffer.copy_(self._narrow)


@dataclass(frozen=True)
class _NarrowMessages(Compressed):
    """The mean by narrow messages; what is narrow already goes as it is."""

    dtype: torch.dtype

    @cached_property
    def codec(self) -> Narrow:
        """What makes messages."""
        return Narrow(self.dtype)

    def launch(
        self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place, memories: Memories
    ) -> Handle:
        """Launch the mean, an exact one where nothing would be lost."""
        if buffer.dtype.itemsize <= self.dtype.itemsize:
            return Mean().start(buffer, peers, NOTHING, place)
        return super().launch(buffer, peers, state, place, memories)

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the bytes of narrow messages, or of an exact mean."""
        if dtype.itemsize <= self.dtype.itemsize:
            return Mean().bytes_on_wire(numel, dtype, group_size, group_rank)
        return super().bytes_on_wire(numel, dtype, group_size, group_rank)
