"""Wires by name: how values travel, as it is written on a command line.

exact                     the mean, rounded once
resident                  the same, of values that live in memory shared by a host's workers
bf16, fp16                16 bits
int8, int4, int2          few bits and a scale for every block of values
top1%, top0.5%            the largest values only
int2+ef                   with error feedback: what was lost is sent later
int2+rf                   the same for parameters; what was lost stays in the replica until then
ternary                   -1, 0 or 1 times a scale
resident+ternary          gradients by what follows, in memory shared by a host's workers

Nothing here needs torch; ``wire_reducers`` makes of a wire what moves values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from loosestep.lab.trainer.mistakes import BadInput, nearest

# The reducer that a name stands for, and its argument, if it takes one.
WIRES: dict[str, tuple[str, str | None]] = {
    "exact": ("Mean", None),
    "resident": ("Resident", None),
    "bf16": ("Cast", "bfloat16"),
    "fp16": ("Cast", "float16"),
    "int8": ("Int8", None),
    "int4": ("Int4", None),
    "int2": ("Int2", None),
    "ternary": ("Ternary", None),
}
FEEDBACK = {"+ef": "ErrorFeedback", "+rf": "ReplicaFeedback"}
LIVING = "resident+"  # gradients that live in shared memory, and travel by what follows
EXAMPLES = {"+ef": "int2+ef", "+rf": "int2+rf"}


@dataclass(frozen=True)
class Wire:
    """A wire as it was written, not yet made into a reducer."""

    text: str
    reducer: str  # its name in ``loosestep.comm.reducers``
    argument: str | float | None = None  # a dtype's name or a density
    feedback: str | None = None  # the name of the reducer around it
    living: bool = False  # whether ``resident+`` stood before the text


def parse_wire(text: str) -> Wire:
    """Read a wire for parameters, or for anything.

    >>> parse_wire("int2+ef")
    Wire(text='int2+ef', reducer='Int2', argument=None, feedback='ErrorFeedback', living=False)
    """
    suffix = text[-3:] if text[-3:] in FEEDBACK else ""
    name = text.removesuffix(suffix)
    reducer, argument = _named(name, text)
    if suffix and name in ("exact", "resident", "bf16", "fp16"):
        raise BadInput(
            f"{text!r}: {suffix} is for wires that lose much, such as {EXAMPLES[suffix]}"
        )
    return Wire(text, reducer, argument, FEEDBACK.get(suffix))


def parse_gradient_wire(text: str) -> Wire:
    """Read a wire for gradients, which may live in shared memory.

    >>> parse_gradient_wire("resident+int4").living
    True
    """
    return replace(parse_wire(text.removeprefix(LIVING)), living=text.startswith(LIVING))


def _named(name: str, text: str) -> tuple[str, str | float | None]:
    if name in WIRES:
        return WIRES[name]
    if share := re.fullmatch(r"top(\d+(?:\.\d+)?)%", name):
        density = float(share[1]) / 100
        if 0 < density <= 1:
            return "TopK", density
    lossy = ("int8", "int4", "int2", "ternary", "top1%")
    known = [*WIRES, "top1%", *(f"{w}{suffix}" for suffix in FEEDBACK for w in lossy)]
    raise BadInput(f"there is no wire {text!r}{nearest(text, known)}; there are {', '.join(known)}")
