"""Wires by name: how values travel, as it is written on a command line.

exact                     the mean, rounded once
resident                  the same, of values that live in memory shared by a host's workers
bf16, fp16                16 bits
int8, int4, int2          few bits and a scale for every block of values
top1%, top0.5%            the largest values only
int2+ef                   with error feedback: what was lost is sent later
int2+rf                   the same for parameters; what was lost stays in the replica until then
ternary+sc                gradients in -1, 0 or 1 times a scale that every value has for itself
resident+ternary+sc       the same, of gradients that live in memory shared by a host's workers
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
    ReplicaFeedback,
    Resident,
    Scaled,
    Ternary,
    TopK,
    TwoLevel,
    leaves_apart,
)

WIRES: dict[str, Callable[[], Reducer]] = {
    "exact": Mean,
    "resident": Resident,
    "bf16": lambda: Cast(torch.bfloat16),
    "fp16": lambda: Cast(torch.float16),
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "ternary": Ternary,
}
FEEDBACK: dict[str, Callable[[Reducer], Reducer]] = {
    "+ef": ErrorFeedback,
    "+rf": ReplicaFeedback,
    "+sc": Scaled,
}
LIVING = "resident+"  # gradients that live in shared memory, and travel by what follows
EXAMPLES = {"+ef": "int2+ef", "+rf": "int2+rf", "+sc": "ternary+sc"}


def wire(text: str) -> Reducer:
    """Return the reducer of a name.

    >>> type(wire("int4")).__name__
    'Int4'
    """
    suffix = text[-3:] if text[-3:] in FEEDBACK else ""
    name = text.removesuffix(suffix)
    inner = _named(name, text)
    if not suffix:
        return inner
    if name in ("exact", "resident", "bf16", "fp16"):
        raise BadInput(
            f"{text!r}: {suffix} is for wires that lose much, such as {EXAMPLES[suffix]}"
        )
    try:
        return FEEDBACK[suffix](inner)
    except ValueError as error:
        raise BadInput(f"{text!r}: {error}") from error


def parameter_wire(text: str) -> Reducer:
    """Return the reducer for parameters: one copy a host, which then travels by the wire."""
    if text == "resident":
        return Resident()
    inner = wire(text)
    if leaves_apart(inner):  # a host must be one replica
        return TwoLevel(inner, hosts="agree")
    return TwoLevel() if text == "exact" else TwoLevel(inner)


def gradient_wire(text: str) -> Reducer:
    """Return the reducer for gradients: what is compressed, is so between hosts only."""
    inner = wire(text.removeprefix(LIVING))
    if leaves_apart(inner):
        return inner  # which is refused, with the reason
    if not text.startswith(LIVING):
        return TwoLevel(inner) if getattr(inner, "lossy", False) else inner
    try:
        return TwoLevel(inner, inside=Resident())
    except ValueError as error:
        raise BadInput(f"{text!r}: {error}") from error


def _named(name: str, text: str) -> Reducer:
    if name in WIRES:
        return WIRES[name]()
    if share := re.fullmatch(r"top(\d+(?:\.\d+)?)%", name):
        density = float(share[1]) / 100
        if 0 < density <= 1:
            return TopK(density)
    lossy = ("int8", "int4", "int2", "ternary", "top1%")
    known = [*WIRES, "top1%", *(f"{w}{suffix}" for suffix in FEEDBACK for w in lossy)]
    known.remove("int2+sc")  # which is refused
    raise BadInput(f"there is no wire {text!r}{nearest(text, known)}; there are {', '.join(known)}")
