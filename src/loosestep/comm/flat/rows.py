"""Tensors divided between their rows into parts of about the same size.

A tensor of which a part has some rows only is named after them there: ``"weight rows 2:5"``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from loosestep.comm.flat.cuts import following, slices

ROWS = " rows "  # between the name of a tensor and those of its rows that a part holds


def shares(
    named: Sequence[tuple[str, torch.Tensor]], count: int, block: int = 1
) -> list[list[tuple[str, torch.Tensor]]]:
    """Cut tensors into ``count`` parts of about the same size, between rows and blocks.

    The cut depends on shapes only, so that all ranks know all parts. Where few rows begin with a
    block of ``block`` elements, parts are the less alike.

    >>> w, b = torch.zeros(3, 2), torch.zeros(2)
    >>> [[(name, len(t)) for name, t in part] for part in shares([("w", w), ("b", b)], 2)]
    [[('w rows 0:2', 2)], [('w rows 2:3', 1), ('b', 2)]]
    """
    cuts = _cuts(tuple(tensor.shape for _, tensor in named), count, block)
    return [[_rows(*named[index], first, last) for index, first, last in cut] for cut in cuts]


def origin(name: str, part: torch.Tensor) -> tuple[str, int]:
    """Return which tensor a part has rows of, and the number of its first element in that.

    >>> origin("w rows 2:5", torch.zeros(3, 4)), origin("b", torch.zeros(4))
    (('w', 8), ('b', 0))
    """
    whole, _, rows = name.partition(ROWS)
    return whole, int(rows.partition(":")[0] or 0) * (part.numel() // _num_rows(part.shape))


def whole_name(name: str) -> str:
    """Return the name of the tensor that a part has rows of."""
    return name.partition(ROWS)[0]


@functools.lru_cache(maxsize=64)
def _cuts(
    shapes: tuple[torch.Size, ...], count: int, block: int
) -> list[list[tuple[int, int, int]]]:
    """Return for every part which rows of which tensors it holds."""
    bounds = slices(sum(shape.numel() for shape in shapes), count)
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in bounds]
    for index, (at, _) in enumerate(following(shape.numel() for shape in shapes)):
        for cut, part in zip(cuts, bounds, strict=True):
            first, last = (_row(shapes[index], element - at, block) for element in part)
            if first < last:
                cut.append((index, first, last))
    return cuts


def _num_rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _row(shape: torch.Size, element: int, block: int) -> int:
    """Return the row that begins next to an element, and with a block; none is cut."""
    rows, numel = _num_rows(shape), shape.numel()
    if not 0 < element < numel:
        return rows if 0 < numel <= element else 0
    size = math.lcm(numel // rows, block)  # of rows that are whole blocks together
    return min((2 * element + size - 1) // (2 * size) * (size * rows // numel), rows)


def _rows(name: str, tensor: torch.Tensor, first: int, last: int) -> tuple[str, torch.Tensor]:
    if last - first == _num_rows(tensor.shape):
        return name, tensor
    return f"{name}{ROWS}{first}:{last}", tensor[first:last]
