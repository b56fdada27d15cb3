"""Fewer bytes by fewer values: the largest magnitudes only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loosestep.comm.codecs.largest import Largest
from loosestep.comm.reducers.compressed import Compressed
from loosestep.comm.reducers.reducer import NonFinite
from loosestep.errors import check_instance


@dataclass(frozen=True, init=False, repr=False)
class TopK(Compressed):
    """Average the largest ``density`` of every chunk of a tensor; the rest counts as zero.

    At least one value of each, in five and a half bytes: four, and 12 bits for its place (16 in
    chunks of more than 4096). With ``bits=2`` a value is a sign and one of two magnitudes of its
    chunk, in under two bytes with its place. Of use inside ``ErrorFeedback``, which sends the rest
    later.

    Every rank sends its message to all others, and all take the mean: nothing is lost on a way
    back. So n ranks send n - 1 messages each; ``gather=False`` sends two at most, and cuts the
    mean, which holds up to n times as many values, to its largest again.

    >>> import torch
    >>> TopK(1 / 64).bytes_on_wire(numel=8192, dtype=torch.float32, group_size=2)
    705
    >>> TopK(1 / 64, bits=2).bytes_on_wire(numel=8192, dtype=torch.float32, group_size=3)
    482
    """

    density: float
    chunk: int = 4096  # larger: sends what is large wherever it is; smaller: some of every layer
    bits: int | None = None  # of a value: 2; None: as it is
    gather: bool = True  # False: fewer bytes among many ranks, and the mean loses too
    on_nonfinite: NonFinite = NonFinite.RAISE

    def __init__(
        self,
        density: float,
        chunk: int = 4096,
        *,
        bits: int | None = None,
        gather: bool = True,
        on_nonfinite: NonFinite | str = NonFinite.RAISE,
    ) -> None:
        check_instance("gather", gather, bool, "True, or False to send means back by owners")
        self._settle(
            density=density, chunk=chunk, bits=bits, gather=gather, on_nonfinite=on_nonfinite
        )

    @cached_property
    def codec(self) -> Largest:
        """What makes messages."""
        return Largest(self.density, self.chunk, self.bits)

    def __repr__(self) -> str:
        return (
            f"TopK({self.density}, chunk={self.chunk}, bits={self.bits}, gather={self.gather}, "
            f"on_nonfinite='{self.on_nonfinite.value}')"
        )
