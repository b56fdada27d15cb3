"""All codecs by name, with the loops of one's choice: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loosestep.comm.codecs.blocks import Blocks
from loosestep.comm.codecs.codec import Codec, Loops
from loosestep.comm.codecs.largest import Largest
from loosestep.comm.codecs.narrow import Narrow

CODECS: dict[str, Callable[[Loops], Codec]] = {
    "int8": lambda loops: Blocks(8, loops=loops),
    "int4": lambda loops: Blocks(4, loops=loops),
    "int2": lambda loops: Blocks(2, loops=loops),
    "ternary": lambda loops: Blocks(1.6, loops=loops),
    "top 1 %": lambda loops: Largest(0.01, loops=loops),
    "bfloat16": lambda loops: Narrow(torch.bfloat16),  # torch's own loops in any case
    "float16": lambda loops: Narrow(torch.float16),
}


def codec(name: str, loops: Loops | str = Loops.BEST) -> Codec:
    """Return a codec of the table.

    >>> from loosestep.comm.flat.cuts import Runs
    >>> codec("int8", "torch").nbytes(Runs.of(256))
    260
    """
    return CODECS[name](Loops(loops))
