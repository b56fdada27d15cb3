"""Fewer bytes by fewer values: the largest magnitudes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loosestep.comm.codecs.largest import Largest
from loosestep.comm.reducers.compressed import Compressed
from loosestep.comm.reducers.reducer import NonFinite


@dataclass(frozen=True, init=False, repr=False)
class TopK(Compressed):
    """Average the largest ``density`` of every part (at least one value); the rest counts as zero.

    Eight bytes a value: below a density of a half this is less than float32. The mean of sparse
    parts is cut to its largest again. Of use inside ``ErrorFeedback``, which sends the rest later.

    >>> import torch
    >>> TopK(0.01).bytes_on_wire(numel=20000, dtype=torch.float32, group_size=2)
    1601
    """

    density: float
    on_nonfinite: NonFinite = NonFinite.RAISE

    def __init__(self, density: float, *, on_nonfinite: NonFinite | str = NonFinite.RAISE) -> None:
        self._settle(density=density, on_nonfinite=on_nonfinite)

    @cached_property
    def codec(self) -> Largest:
        """What makes messages."""
        return Largest(self.density)

    def __repr__(self) -> str:
        return f"TopK({self.density}, on_nonfinite='{self.on_nonfinite.value}')"
