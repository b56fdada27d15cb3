"""Fewer bytes by fewer values: the largest magnitudes only."""

from __future__ import annotations

from loosestep.wire.codec_topk import Largest
from loosestep.wire.compressed import Compressed
from loosestep.wire.nonfinite import NonFinite


class TopK(Compressed):
    """Average the largest ``density`` of every part (at least one value); the rest counts as zero.

    Eight bytes a value: below a density of a half this is less than float32. The mean of sparse
    parts is cut to its largest again. Of use inside ``ErrorFeedback``, which sends the rest later.

    >>> import torch
    >>> TopK(0.01).bytes_on_wire(numel=20000, dtype=torch.float32, group_size=2)
    1601
    """

    def __init__(self, density: float, *, on_nonfinite: NonFinite | str = NonFinite.RAISE) -> None:
        super().__init__(Largest(density), on_nonfinite=on_nonfinite)
        self.density = density

    def __repr__(self) -> str:
        return f"TopK({self.density}, on_nonfinite='{self.on_nonfinite.value}')"
