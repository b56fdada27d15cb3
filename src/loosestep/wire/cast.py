"""Fewer bytes by a narrower dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loosestep.peers import Peers
from loosestep.tensors import Named
from loosestep.wire.codec_cast import Narrow, narrow
from loosestep.wire.compressed import Compressed, Memories
from loosestep.wire.mean import Mean
from loosestep.wire.reducer import Around, Handle, Reducer, check_reducer


class Cast:
    """Average in a narrower dtype: half the bytes for bf16, at the precision of bf16.

    Values travel and come back as ``dtype``; the sum in between is kept wider, so all ranks end
    bit-equal. A finite value beyond the narrow range is sent as the largest that fits. A buffer
    that is no wider than ``dtype`` already is left to ``inner`` as it is. Infinities and NaN
    travel, as with ``Mean``; inside ``ErrorFeedback`` they are an error.

    >>> Cast(torch.bfloat16).bytes_on_wire(numel=8, dtype=torch.float32, group_size=2)
    16
    """

    lossy = True

    def __init__(self, dtype: torch.dtype, inner: Reducer | None = None) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"Cast needs a floating dtype such as torch.bfloat16, got {dtype!r}")
        if inner is not None:
            check_reducer("inner", inner)
        self.dtype = dtype
        self.inner = Mean() if inner is None else inner
        self.on_nonfinite = getattr(self.inner, "on_nonfinite", None)

    def bind(self, named: Sequence[Named], peers: Peers) -> None:
        """Show the tensors to ``inner``, if it wants to see them."""
        bind = getattr(self.inner, "bind", None)
        if bind is not None:
            bind(named, peers)

    @property
    def engine(self) -> Compressed | None:
        """What moves narrow messages with a memory; None if ``inner`` is to move them."""
        return _NarrowMessages(self.dtype) if isinstance(self.inner, Mean) else None

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch the mean of a narrow copy."""
        if peers.size == 1 or buffer.dtype.itemsize <= self.dtype.itemsize:
            return self.inner.start(buffer, peers, slot)
        copy = narrow(buffer, self.dtype)
        return _CastInFlight(buffer, copy, self.inner.start(copy, peers, slot))

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return what ``inner`` sends for the narrow copy."""
        narrower = dtype if dtype.itemsize <= self.dtype.itemsize else self.dtype
        return self.inner.bytes_on_wire(numel, narrower, group_size, group_rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``inner``."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of ``inner``."""
        self.inner.load_state_dict(state_dict)

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


class _NarrowMessages(Compressed):
    """The mean by narrow messages; what is narrow already goes as it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(Narrow(dtype))
        self._dtype = dtype

    def launch(self, buffer: torch.Tensor, peers: Peers, slot: str, memories: Memories) -> Handle:
        """Launch the mean, an exact one where nothing would be lost."""
        if buffer.dtype.itemsize <= self._dtype.itemsize:
            return Mean().start(buffer, peers, slot)
        return super().launch(buffer, peers, slot, memories)

    def bytes_on_wire(
        self, numel: int, dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        """Return the bytes of narrow messages, or of an exact mean."""
        if dtype.itemsize <= self._dtype.itemsize:
            return Mean().bytes_on_wire(numel, dtype, group_size, group_rank)
        return super().bytes_on_wire(numel, dtype, group_size, group_rank)
