"""Where a flat buffer may be cut: what it holds, and bounds that leave blocks whole.

A buffer holds runs: values that follow each other in one tensor. A lossy reducer treats some
neighbours of a tensor together, its block. So whatever cuts a buffer (into windows, pieces, slices
of owners) does it at ends of runs and between blocks, and what becomes of a value depends on its
tensor and its offset there alone. All such bounds are computed here.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

Range = tuple[int, int]  # of elements: the first, and one after the last
Bounds = list[Range]  # that follow each other and leave nothing out


@dataclass(frozen=True)
class Run:
    """Values of a buffer that follow each other in one tensor; begins where a block begins."""

    tensor: str
    offset: int  # of the first one in the tensor, in logical order
    numel: int


@dataclass(frozen=True)
class Runs:
    """What a flat buffer holds, in its order.

    >>> runs = Runs.of([10, 3])
    >>> runs.slices(2, block=4), runs.slices(2, block=1)
    ([(0, 4), (4, 13)], [(0, 6), (6, 13)])
    """

    each: tuple[Run, ...]
    # What was asked for before: the same at every sync.
    _blocks: dict[int, Mapping[int, int]] = field(default_factory=dict, repr=False, compare=False)
    _slices: dict[tuple[int, int], Bounds] = field(default_factory=dict, repr=False, compare=False)
    _parts: dict[tuple[int, int], Runs] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, sizes: int | Sequence[int], tensor: str = "") -> Runs:
        """Return those of whole tensors of such sizes."""
        return cls(tuple(Run(tensor, 0, size) for size in sizes_of(sizes)))

    @cached_property
    def numel(self) -> int:
        """The number of elements of all runs."""
        return sum(run.numel for run in self.each)

    @cached_property
    def bounds(self) -> Bounds:
        """Where the runs lie in the buffer."""
        return following(run.numel for run in self.each)

    @cached_property
    def starts(self) -> list[int]:
        """Where each run begins in the buffer."""
        return [start for start, _ in self.bounds]

    @cached_property
    def lengths(self) -> ctypes.Array[ctypes.c_int64]:
        """How long the runs are, as C reads it."""
        return (ctypes.c_int64 * len(self.each))(*(run.numel for run in self.each))

    def blocks(self, block: int) -> Mapping[int, int]:
        """Return how many blocks there are of which length."""
        if block not in self._blocks:
            found: Counter[int] = Counter()
            for run in self.each:
                whole, rest = divmod(run.numel, block)
                found[block] += whole
                found[rest] += bool(rest)
            self._blocks[block] = found
        return self._blocks[block]

    def slices(self, parts: int, block: int) -> Bounds:
        """Cut into ``parts`` ranges of about the same length, none of them inside a block."""
        if (parts, block) not in self._slices:
            edges = [self._nearest(self.numel * i // parts, block) for i in range(parts + 1)]
            self._slices[parts, block] = list(itertools.pairwise(edges))
        return self._slices[parts, block]

    def pieces(self, most: int, block: int, multiple: int = 1) -> Bounds:
        """Cut into ranges of at most ``most`` elements each, or of one block.

        Where every element is a block, all but the last are a multiple of elements long.

        >>> Runs.of([10, 3]).pieces(5, block=4)
        [(0, 4), (4, 8), (8, 13)]
        """
        if block == 1:
            return pieces(self.numel, most, multiple)
        bounds: Bounds = []
        start = 0
        while start < self.numel or not bounds:
            stop = start + max(1, most)
            if stop < self.numel:
                below, above = self._around(stop, block)
                stop = below if below > start else above
            bounds.append((start, min(stop, self.numel)))
            start = stop
        return bounds

    def front(self, most: int, block: int) -> int:
        """Return how many elements whole blocks at the front have: ``most``, or the first block."""
        below, above = self._around(min(most, self.numel), block)
        return below or above

    def part(self, start: int, stop: int) -> Runs:
        """Return what a range of the buffer holds."""
        if (start, stop) == (0, self.numel):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = Runs(tuple(self._within(start, stop)))
        return self._parts[start, stop]

    def _within(self, start: int, stop: int) -> Iterator[Run]:
        index = max(0, bisect.bisect_right(self.starts, start) - 1)
        for run, begin in zip(self.each[index:], self.starts[index:], strict=True):
            if begin >= stop:
                return
            first, last = max(start, begin), min(stop, begin + run.numel)
            if first < last:
                yield Run(run.tensor, run.offset + first - begin, last - first)

    def _nearest(self, element: int, block: int) -> int:
        below, above = self._around(element, block)
        return below if element - below <= above - element else above

    def _around(self, element: int, block: int) -> tuple[int, int]:
        """Return the last place up to ``element`` where a cut may be, and the first from there."""
        if element >= self.numel:
            return self.numel, self.numel
        index = bisect.bisect_right(self.starts, element) - 1
        start, run = self.starts[index], self.each[index]
        below = start + (element - start) // block * block
        return below, element if below == element else min(below + block, start + run.numel)


def following(sizes: Iterable[int]) -> Bounds:
    """Return where parts of these sizes lie that follow each other.

    >>> following([2, 0, 3])
    [(0, 2), (2, 2), (2, 5)]
    """
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def slices(numel: int, parts: int) -> Bounds:
    """Cut ``numel`` elements into ``parts`` ranges whose lengths differ by at most one.

    >>> slices(5, 3)
    [(0, 1), (1, 3), (3, 5)]
    """
    return [slice_of(numel, parts, index) for index in range(parts)]


def slice_of(numel: int, parts: int, index: int) -> Range:
    """Return one of these ``slices``."""
    return numel * index // parts, numel * (index + 1) // parts


def pieces(numel: int, most: int, multiple: int = 1) -> Bounds:
    """Cut into ranges of at most ``most`` elements, or of ``multiple``; none is one of none.

    All but the last are a multiple long, so that slices of all of them hold together as many
    elements as slices of the whole.

    >>> pieces(10, most=5, multiple=2)
    [(0, 4), (4, 8), (8, 10)]
    """
    step = max(1, most // multiple) * multiple
    return [(at, min(at + step, numel)) for at in range(0, numel, step)] or [(0, 0)]


def cut(buffer: torch.Tensor, most_bytes: int, multiple: int) -> Iterator[torch.Tensor]:
    """Yield a buffer's ``pieces`` of at most so many bytes.

    >>> [piece.numel() for piece in cut(torch.zeros(10), most_bytes=20, multiple=2)]
    [4, 4, 2]
    """
    bounds = pieces(buffer.numel(), most_bytes // buffer.element_size(), multiple)
    return (buffer[start:stop] for start, stop in bounds)


def together(sizes: Sequence[int], most: Callable[[int], int]) -> Bounds:
    """Return which neighbours go together: as many as fit, or one that is too large.

    ``most``: what their sizes may add up to, given what is left in all.

    >>> together([3, 3, 5, 9, 1], lambda left: 6)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    bounds: Bounds = []
    first, filled, left = 0, 0, sum(sizes)
    room = most(left)
    for index, size in enumerate(sizes):
        if index > first and filled + size > room:
            bounds.append((first, index))
            left -= filled
            first, filled, room = index, 0, most(left)
        filled += size
    return [*bounds, (first, len(sizes))]


def round_up(size: int, unit: int) -> int:
    """Return the first multiple of ``unit`` that is not below ``size``."""
    return -(-size // unit) * unit


def sizes_of(numel: int | Sequence[int]) -> Sequence[int]:
    """Return the sizes of tensors, of which a number stands for one.

    >>> sizes_of(3), sum(sizes_of([2, 5]))
    ([3], 7)
    """
    return [numel] if isinstance(numel, int) else numel
