"""The reducers that wires stand for."""

from __future__ import annotations

import torch

import loosestep.comm.reducers
from loosestep.comm.reducers import Reducer, Resident, TwoLevel
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.wires import LIVING, Wire


def plain_reducer(wire: Wire) -> Reducer:
    """Return what moves values by a wire, between any ranks.

    >>> from loosestep.lab.trainer.wires import parse_wire
    >>> type(plain_reducer(parse_wire("int4"))).__name__
    'Int4'
    """
    options = {} if wire.bits is None else {"bits": wire.bits}
    inner = _reducer(wire.reducer, *_argument(wire), **options)
    if wire.feedback is None:
        return inner
    try:
        return _reducer(wire.feedback, inner)
    except ValueError as error:
        raise BadInput(f"{wire.text!r}: {error}") from error


def parameter_reducer(wire: Wire) -> Reducer:
    """Return the reducer for parameters: one copy a host, which then travels by the wire."""
    inner = plain_reducer(wire)
    if wire.reducer == "Resident":
        return inner
    if inner.leaves_apart:  # a host must be one replica
        return TwoLevel(inner, hosts="agree")
    return TwoLevel() if wire.text == "exact" else TwoLevel(inner)


def gradient_reducer(wire: Wire) -> Reducer:
    """Return the reducer for gradients: what is compressed, is so between hosts only."""
    inner = plain_reducer(wire)
    if inner.leaves_apart:
        return inner  # which is refused, with the reason
    if not wire.living:
        return TwoLevel(inner) if inner.lossy else inner
    try:
        return TwoLevel(inner, inside=Resident())
    except ValueError as error:
        raise BadInput(f"{LIVING + wire.text!r}: {error}") from error


def _reducer(name: str, *arguments: object, **options: object) -> Reducer:
    made: Reducer = getattr(loosestep.comm.reducers, name)(*arguments, **options)
    return made


def _argument(wire: Wire) -> tuple[object, ...]:
    if isinstance(wire.argument, str):
        return (getattr(torch, wire.argument),)
    return () if wire.argument is None else (wire.argument,)
