"""Wires by name: how values travel, as it is written on a command line.

exact                     the mean, rounded once
resident                  the same, of values that live in memory shared by a host's workers
bf16, fp16                16 bits
int8, int4, int2          few bits and a scale for every block of values
top1%, top0.5%            the largest values only
int2+ef                   with error feedback: what was lost is sent later
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from loosestep.trainer.mistakes import BadInput, nearest
from loosestep.wire import (
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    Reducer,
    Resident,
    TopK,
    TwoLevel,
)

WIRES: dict[str, Callable[[], Reducer]] = {
    "exact": Mean,
    "resident": Resident,
    "bf16": lambda: Cast(torch.bfloat16),
    "fp16": lambda: Cast(torch.float16),
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
}
FEEDBACK = "+ef"


def wire(text: str) -> Reducer:
    """Return the reducer of a name.

    >>> type(wire("int4")).__name__
    'Int4'
    """
    name = text.removesuffix(FEEDBACK)
    inner = _named(name, text)
    if name == text:
        return inner
    if name in ("exact", "resident", "bf16", "fp16"):
        raise BadInput(f"{text!r}: error feedback is for wires that lose much, such as int2+ef")
    return ErrorFeedback(inner)


def parameter_wire(text: str) -> Reducer:
    """Return the reducer for parameters: one copy a host, which then travels by the wire."""
    if text == "resident":
        return Resident()
    return TwoLevel() if text == "exact" else TwoLevel(wire(text))


def _named(name: str, text: str) -> Reducer:
    if name in WIRES:
        return WIRES[name]()
    if share := re.fullmatch(r"top(\d+(?:\.\d+)?)%", name):
        density = float(share[1]) / 100
        if 0 < density <= 1:
            return TopK(density)
    known = [*WIRES, "top1%", *(f"{w}{FEEDBACK}" for w in ("int8", "int4", "int2", "top1%"))]
    raise BadInput(f"there is no wire {text!r}{nearest(text, known)}; there are {', '.join(known)}")
