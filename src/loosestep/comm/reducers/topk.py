"""Fewer bytes by fewer values: the largest magnitudes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loosestep.comm.codecs.largest import Largest
from loosestep.comm.reducers.compressed import Compressed
from loosestep.comm.reducers.reducer import NonFinite


@dataclass(frozen=True, init=False, repr=False)
class TopK(Compressed):
    """Average the largest ``density`` of every chunk of a tensor; the rest counts as zero.

    At least one value of each, in five and a half bytes: four, and 12 bits for its place (16 in
    chunks of more than 4096). The mean of sparse values is cut to its largest again. Of use inside
    ``ErrorFeedback``, which sends the rest later.

    >>> import torch
    >>> TopK(1 / 64).bytes_on_wire(numel=8192, dtype=torch.float32, group_size=2)
    705
    """

    density: float
    chunk: int = 4096  # larger: sends what is large wherever it is; smaller: some of every layer
    on_nonfinite: NonFinite = NonFinite.RAISE

    def __init__(
        self,
        density: float,
        chunk: int = 4096,
        *,
        on_nonfinite: NonFinite | str = NonFinite.RAISE,
    ) -> None:
        self._settle(density=density, chunk=chunk, on_nonfinite=on_nonfinite)

    @cached_property
    def codec(self) -> Largest:
        """What makes messages."""
        return Largest(self.density, self.chunk)

    def __repr__(self) -> str:
        return f"TopK({self.density}, chunk={self.chunk}, on_nonfinite='{self.on_nonfinite.value}')"
