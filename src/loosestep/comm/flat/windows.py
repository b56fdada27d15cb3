"""Many tensors as few flat buffers of bounded size: cut, group, pack, write back in place.

The cut depends on shapes and dtypes only, never on strides or addresses, so that ranks agree on
it even where one of them keeps a weight in channels_last or has re-pointed ``param.data``. (How
many views a range takes may depend on strides; nobody tells others.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from loosestep.comm import native
from loosestep.comm.flat.cuts import Bounds, Run, following
from loosestep.comm.flat.packing import Addresses, pack_flats, tell_autograd, unpack_flats

WINDOW_BYTES = 4 << 20  # larger: fewer messages; smaller: less memory, more overlap
FEW_PIECES = 16  # a call for each costs less than a second pass over the window
OWN_WINDOW_BYTES = 512 << 10  # a piece this large is worth a window without a copy


@dataclass(frozen=True)
class Piece:
    """A part of one tensor, at most a window long, whose elements are consecutive."""

    name: str
    view: torch.Tensor
    offset: int  # of its first element in the tensor, in logical order


@dataclass(frozen=True)
class Window:
    """Pieces of one dtype and device that travel as one buffer."""

    pieces: tuple[Piece, ...]

    @cached_property
    def numel(self) -> int:
        """The number of elements in all pieces."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of each piece."""
        return [piece.view.numel() for piece in self.pieces]

    @cached_property
    def bounds(self) -> Bounds:
        """Where the pieces lie in the buffer."""
        return following(self.sizes)

    @cached_property
    def runs(self) -> list[Run]:
        """What the pieces hold, those of one tensor that follow each other as one."""
        runs: list[Run] = []
        for piece, size in zip(self.pieces, self.sizes, strict=True):
            last = runs[-1] if runs else None
            if last and (last.tensor, last.offset + last.numel) == (piece.name, piece.offset):
                runs[-1] = replace(last, numel=last.numel + size)
            else:
                runs.append(Run(piece.name, piece.offset, size))
        return runs

    @cached_property
    def flats(self) -> list[torch.Tensor] | None:
        """The pieces as flat views; None: one of them is not contiguous."""
        if not all(piece.view.is_contiguous() for piece in self.pieces):
            return None
        return [piece.view.view(-1) for piece in self.pieces]

    @cached_property
    def addresses(self) -> Addresses | None:
        """Where the pieces lie, if one call in C can copy all of them."""
        return Addresses.of([piece.view for piece in self.pieces])

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of every piece."""
        return self.pieces[0].view.dtype

    @cached_property
    def device(self) -> torch.device:
        """The device of every piece."""
        return self.pieces[0].view.device

    @cached_property
    def name(self) -> str:
        """The first tensor's name, with the number of the others."""
        more = len(self.runs) - 1
        return self.pieces[0].name + (f" and {more} more" if more else "")

    @cached_property
    def in_place(self) -> bool:
        """Whether the tensor's own memory can serve as the buffer."""
        return len(self.pieces) == 1 and self.pieces[0].view.is_contiguous()


def windows(
    tensors: Sequence[tuple[str, torch.Tensor]],
    window_bytes: int = WINDOW_BYTES,
    own_window_bytes: int = OWN_WINDOW_BYTES,
    block: int = 1,
) -> list[Window]:
    """Cut named tensors into windows of at most ``window_bytes`` (at least one element each).

    Pieces of ``own_window_bytes`` get a window of their own, smaller ones share. Tensors are cut
    between their blocks of ``block`` elements only, so a window holds at least one of those.

    >>> cut = windows([("w", torch.zeros(3, 4)), ("b", torch.zeros(2))], window_bytes=32)
    >>> [(window.name, window.numel) for window in cut]
    [('w and 1 more', 6), ('w', 8)]
    """
    finished: list[Window] = []
    waiting: dict[tuple[torch.dtype, torch.device], list[Piece]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, tensor in tensors:
        kind, start = (tensor.dtype, tensor.device), 0
        for views in _ranges(tensor, max(1, window_bytes // tensor.element_size()), block):
            pieces = []
            for view in views:
                pieces.append(Piece(name, view, start))
                start += view.numel()
            size = sum(view.nbytes for view in views)
            if size >= min(own_window_bytes, window_bytes):
                finished.append(Window(tuple(pieces)))
                continue
            if filled.get(kind, 0) + size > window_bytes:
                finished.append(Window(tuple(waiting[kind])))
                waiting[kind], filled[kind] = [], 0
            waiting.setdefault(kind, []).extend(pieces)
            filled[kind] = filled.get(kind, 0) + size
    # The shared ones first: they need a copy in and out, which then overlaps with the rest.
    return [Window(tuple(pieces)) for pieces in waiting.values() if pieces] + finished


def pack(window: Window, staging: torch.Tensor) -> torch.Tensor:
    """Copy the pieces into the front of ``staging`` and return that part as one flat buffer."""
    buffer = staging[: window.numel]
    where = window.addresses if _same_kind(window, buffer) else None
    if where is not None and (loops := native.loops()) is not None:
        loops.gather(buffer.data_ptr(), where.starts, where.sizes, where.num)
        return buffer
    if window.flats is not None and buffer.dtype == window.dtype:
        return pack_flats(window.flats, buffer)
    for piece, part in zip(window.pieces, _parts(window, buffer), strict=True):
        part.copy_(piece.view)
    return buffer


def _same_kind(window: Window, buffer: torch.Tensor) -> bool:
    return buffer.dtype == window.dtype and buffer.device == window.device


def pack_difference(window: Window, staging: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Like ``pack``, of how far the pieces are from a flat reference; few of them in one pass."""
    if len(window.pieces) > FEW_PIECES:
        return pack(window, staging).sub_(reference)
    buffer = staging[: window.numel]
    parts = zip(_parts(window, buffer), _parts(window, reference), strict=True)
    for piece, (part, base) in zip(window.pieces, parts, strict=True):
        torch.sub(piece.view, base, out=part)
    return buffer


def unpack(window: Window, buffer: torch.Tensor) -> None:
    """Write the flat buffer back into the pieces, in place, whatever their strides."""
    where = window.addresses if _same_kind(window, buffer) else None
    if where is not None and (loops := native.loops()) is not None:
        loops.scatter(buffer.data_ptr(), where.starts, where.sizes, where.num)
        tell_autograd([piece.view for piece in window.pieces])
        return
    if window.flats is not None:
        unpack_flats(buffer, window.flats, window.sizes)
        return
    for piece, part in zip(window.pieces, _parts(window, buffer), strict=True):
        piece.view.copy_(part)


def unpack_sum(window: Window, buffer: torch.Tensor, more: torch.Tensor) -> None:
    """Like ``unpack``, of the sum of two flat buffers; few pieces in one pass."""
    if len(window.pieces) > FEW_PIECES:
        unpack(window, torch.add(buffer, more))
        return
    parts = zip(_parts(window, buffer), _parts(window, more), strict=True)
    for piece, (part, added) in zip(window.pieces, parts, strict=True):
        torch.add(part, added, out=piece.view)


def _parts(window: Window, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    for piece, (start, stop) in zip(window.pieces, window.bounds, strict=True):
        yield buffer[start:stop].view(piece.view.shape)


def _ranges(tensor: torch.Tensor, limit: int, block: int) -> Iterator[Sequence[torch.Tensor]]:
    """Yield views of ranges that follow each other, of at most ``limit`` elements or one block."""
    if block == 1:  # then one view is enough for each range
        yield from ((view,) for view in _split(tensor, limit))
        return
    numel = tensor.numel()
    step = max(block, limit // block * block) if numel > limit else max(1, numel)
    for start in range(0, numel, step):
        yield list(_views(tensor, start, min(start + step, numel)))


def _views(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the views that hold a range of elements, in logical order: one, if they can be one."""
    if stop - start == tensor.numel():
        yield tensor
        return
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:  # all of it lies inside one
        yield from _views(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _views(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from _views(tensor[last], 0, stop - last * row)


def _split(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield views of at most ``limit`` elements that follow each other in logical order."""
    if tensor.numel() == 0:
        return
    if tensor.numel() <= limit:
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    if row <= limit:
        yield from torch.split(tensor, limit // row)
        return
    for part in tensor.unbind(0):
        yield from _split(part, limit)
