"""Reducers by name: how values travel, as it is written on a command line.

mean                      the mean, rounded once
shared                    the same, of values that live in memory shared by a host's workers
bf16, fp16                16 bits
int8, int4, int2          few bits and a scale for every block of values
top1%, top0.5%            the largest values only
top1%2bit                 the same, each in 2 bits
mask0.5%                  a random share of the parameters, exactly; another one at every sync
int2+ef                   with error feedback: what was lost is sent later
int2+rf                   the same for parameters; what was lost stays in the replica until then
ternary                   -1, 0 or 1 times a scale
shared+ternary            gradients by what follows, in memory shared by a host's workers

Nothing here needs torch; ``named_reducers`` makes of such a name what moves values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from loosestep.lab.trainer.mistakes import BadInput, nearest

# The reducer that a name stands for, and its argument, if it takes one.
NAMES: dict[str, tuple[str, str | None]] = {
    "mean": ("Mean", None),
    "shared": ("SharedMemoryMean", None),
    "bf16": ("Cast", "bfloat16"),
    "fp16": ("Cast", "float16"),
    "int8": ("Int8", None),
    "int4": ("Int4", None),
    "int2": ("Int2", None),
    "ternary": ("Ternary", None),
}
FEEDBACK = {"+ef": "ErrorFeedback", "+rf": "ReplicaFeedback"}
TWO_BITS = "2bit"  # behind the share of the largest
LIVING = "shared+"  # gradients that live in shared memory, and travel by what follows
EXAMPLES = {"+ef": "int2+ef", "+rf": "int2+rf"}


@dataclass(frozen=True)
class ReducerName:
    """A reducer as it was written, not yet made into a reducer."""

    text: str
    reducer: str  # its name in ``loosestep.comm.reducers``
    argument: str | float | None = None  # a dtype's name or a density
    feedback: str | None = None  # the name of the reducer around it
    living: bool = False  # whether ``shared+`` stood before the text
    bits: int | None = None  # of the largest values


def parse_reducer(text: str) -> ReducerName:
    """Read a reducer for parameters, or for anything.

    >>> parse_reducer("top1%2bit+ef").reducer, parse_reducer("int2+ef").feedback
    ('TopK', 'ErrorFeedback')
    """
    suffix = text[-3:] if text[-3:] in FEEDBACK else ""
    name = text.removesuffix(suffix)
    reducer, argument = _named(name, text)
    if suffix and (name in ("mean", "shared", "bf16", "fp16") or reducer == "RandomMask"):
        raise BadInput(
            f"{text!r}: {suffix} is for reducers that lose much, such as {EXAMPLES[suffix]}"
        )
    bits = 2 if name.endswith(TWO_BITS) else None
    return ReducerName(text, reducer, argument, FEEDBACK.get(suffix), bits=bits)


def parse_gradient_reducer(text: str) -> ReducerName:
    """Read a reducer for gradients, which may live in shared memory.

    >>> parse_gradient_reducer("shared+int4").living
    True
    """
    return replace(parse_reducer(text.removeprefix(LIVING)), living=text.startswith(LIVING))


def _named(name: str, text: str) -> tuple[str, str | float | None]:
    if name in NAMES:
        return NAMES[name]
    if share := re.fullmatch(r"(top|mask)(\d+(?:\.\d+)?)%", name.removesuffix(TWO_BITS)):
        density, masked = float(share[2]) / 100, share[1] == "mask"
        if 0 < density <= 1 and not (masked and name.endswith(TWO_BITS)):
            return "RandomMask" if masked else "TopK", density
    lossy = ("int8", "int4", "int2", "ternary", "top1%")
    shares = ("top1%", f"top1%{TWO_BITS}", "mask0.5%")
    known = [*NAMES, *shares, *(f"{w}{suffix}" for suffix in FEEDBACK for w in lossy)]
    raise BadInput(
        f"there is no reducer {text!r}{nearest(text, known)}; there are {', '.join(known)}"
    )
