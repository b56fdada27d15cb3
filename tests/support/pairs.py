"""Pairs in place of full products: what `make test` runs of a matrix; the rest of it is long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_pairs(first: Iterable[Any], second: Sequence[Any], each: int = 2) -> list[Any]:
    """Return all pairs; of every ``first`` those with ``each`` of ``second``, in turn, run always.

    >>> [case.values for case in in_pairs("abc", [1, 2, 3], each=1) if not case.marks]
    [('a', 1), ('b', 2), ('c', 3)]
    """
    found = []
    for index, one in enumerate(first):
        kept = {(index * each + offset) % len(second) for offset in range(each)}
        for number, other in enumerate(second):
            marks = () if number in kept else (pytest.mark.long,)
            found.append(pytest.param(one, other, marks=marks, id=f"{one}-{other}"))
    return found
