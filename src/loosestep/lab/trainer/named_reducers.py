"""The reducers that names on a command line stand for."""

from __future__ import annotations

import torch

import loosestep.comm.reducers
from loosestep.comm.reducers import Reducer, SharedMemoryMean, TwoLevel
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.reducer_names import LIVING, ReducerName


def plain_reducer(name: ReducerName) -> Reducer:
    """Return what a name stands for, between any ranks.

    >>> from loosestep.lab.trainer.reducer_names import parse_reducer
    >>> type(plain_reducer(parse_reducer("int4"))).__name__
    'Int4'
    """
    options = {} if name.bits is None else {"bits": name.bits}
    inner = _reducer(name.reducer, *_argument(name), **options)
    if name.feedback is None:
        return inner
    try:
        return _reducer(name.feedback, inner)
    except ValueError as error:
        raise BadInput(f"{name.text!r}: {error}") from error


def parameter_reducer(name: ReducerName) -> Reducer:
    """Return the reducer for parameters: one copy a host, which then travels so."""
    inner = plain_reducer(name)
    if name.reducer == "SharedMemoryMean":
        return inner
    if inner.leaves_apart:  # a host must be one replica
        return TwoLevel(inner, ranks_of_host="equal")
    return TwoLevel() if name.text == "mean" else TwoLevel(inner)


def gradient_reducer(name: ReducerName) -> Reducer:
    """Return the reducer for gradients: what is compressed, is so between hosts only."""
    inner = plain_reducer(name)
    if inner.leaves_apart:
        return inner  # which is refused, with the reason
    if not name.living:
        return TwoLevel(inner) if inner.lossy else inner
    try:
        return TwoLevel(inner, inside=SharedMemoryMean())
    except ValueError as error:
        raise BadInput(f"{LIVING + name.text!r}: {error}") from error


def _reducer(which: str, *arguments: object, **options: object) -> Reducer:
    made: Reducer = getattr(loosestep.comm.reducers, which)(*arguments, **options)
    return made


def _argument(name: ReducerName) -> tuple[object, ...]:
    if isinstance(name.argument, str):
        return (getattr(torch, name.argument),)
    return () if name.argument is None else (name.argument,)
