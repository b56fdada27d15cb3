"""Modules that are alive, whoever holds them: a parameter does not know whose it is."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import TypeVar

import torch

Kind = TypeVar("Kind", bound=torch.nn.Module)


def living(kinds: Iterable[type[Kind]]) -> list[Kind]:
    """Return all modules of these classes and of those derived from them.

    This looks at all objects that there are, in some 10 ms; so it is for what is done once.
    """
    wanted: set[type] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if kind not in wanted:
            wanted.add(kind)
            waiting += type.__subclasses__(kind)
    # By type, in loops of C: there are a hundred thousand objects, and ``isinstance`` would ask a
    # proxy what it stands for, which may be gone.
    things = gc.get_objects()
    found = itertools.compress(things, map(wanted.__contains__, map(type, things)))
    return [module for module in found if "_modules" in vars(module)]  # not half made ones
