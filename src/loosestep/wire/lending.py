"""A tensor of any size that neighbours read for a while: sharded optimizers move theirs so.

Where the kernel lets processes read each other (``process_vm_readv``), a tensor is read where it
lies. Elsewhere (Yama's ``ptrace_scope``, some containers) the lender copies it to shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from loosestep.peers import Peers
from loosestep.wire.board import ADDRESS, LENT, OFFERED, SLOTS, TAKEN, Board, Neighbour
from loosestep.wire.segments import Segment
from loosestep.wire.shelf import SIZE_BITS, Copy

DETAIL = 3  # the column of a slot that tells which file of the lender holds a copy

Ranges = Sequence[tuple[int, int]]  # of elements: first, and one after the last


class Slot:
    """One tensor that this rank lends to its neighbours, and theirs that it reads in turn."""

    def __init__(self, board: Board, peers: Peers, pieces: Sequence[torch.Tensor]) -> None:
        self.members = sorted(board.neighbours)
        self._board, self._peers = board, peers
        board.lent += 1
        self._number, self._place = board.lent, board.lent % SLOTS
        assert self._place not in board.open, "too many tensors lent at once"
        board.open[self._place] = self._number
        if board.readable:
            assert len(pieces) == 1, "several pieces are lent by a table of their addresses"
            board.offered[self._place] = pieces[0]
            self._offer(pieces[0].data_ptr(), 0)
        else:
            copy = board.shelf.take(pieces)
            board.offered[self._place] = copy
            self._offer(copy.key, copy.detail)

    def wait(self, member: int) -> None:
        """Return when a neighbour has offered its tensor."""
        self._board.wait(self._peers, member, self._column(OFFERED), self._number)

    def read(self, member: int, ranges: Ranges, into: torch.Tensor) -> None:
        """Copy ranges of elements of a neighbour's tensor to a contiguous one, in this order."""
        size = into.element_size()
        spans = [(start * size, (stop - start) * size) for start, stop in ranges]
        if self._board.readable:
            base = self._told(member, ADDRESS)
            self.read_spans(member, [(base + at, length) for at, length in spans], [into])
            return
        room, memory, filled = into.view(torch.uint8), self._copy_of(member), 0
        for at, length in spans:
            room[filled : filled + length].copy_(memory[at : at + length])
            filled += length

    def read_spans(
        self, member: int, there: list[tuple[int, int]], into: Sequence[torch.Tensor]
    ) -> None:
        """Copy pieces of a neighbour's memory to contiguous tensors, in this order."""
        here = [(tensor.data_ptr(), tensor.nbytes) for tensor in into]
        error = self._board.neighbours[member].read(there, here)
        if error:
            raise self._peers.lost(member, error)

    def read_pieces(self, member: int, into: Sequence[torch.Tensor]) -> None:
        """Copy all pieces that a neighbour has lent as a copy, in their order."""
        memory, at = self._copy_of(member), 0
        for tensor in into:
            tensor.view(torch.uint8).copy_(memory[at : at + tensor.nbytes])
            at += tensor.nbytes

    def taken(self, member: int) -> None:
        """Tell a neighbour that this rank needs its tensor no more."""
        self._board.tell(member, self._column(TAKEN), self._number)

    def close(self) -> None:
        """Return when the neighbours have taken what they need of mine."""
        for member in self.members:
            self._board.wait(self._peers, member, self._column(TAKEN), self._number)
        del self._board.open[self._place]
        lent = self._board.offered.pop(self._place)
        if isinstance(lent, Copy):
            self._board.shelf.give(lent)

    def _offer(self, address: int, detail: int) -> None:
        self._board.note(self._column(ADDRESS), address)
        self._board.note(self._column(DETAIL), detail)
        self._board.tell_all(self._column(OFFERED), self._number)

    def _column(self, mark: int) -> int:
        return LENT + 4 * self._place + mark

    def _told(self, member: int, mark: int) -> int:
        return self._board.rows[member][self._column(mark)]

    def _copy_of(self, member: int) -> torch.Tensor:
        key, neighbour = self._told(member, ADDRESS), self._board.neighbours[member]
        if key not in neighbour.copies:
            neighbour.copies[key] = self._map(neighbour, self._told(member, DETAIL))
        return neighbour.copies[key]

    def _map(self, neighbour: Neighbour, detail: int) -> torch.Tensor:
        fd, size = detail >> SIZE_BITS, detail & ((1 << SIZE_BITS) - 1)
        reason = ""
        try:
            segment = Segment.open(neighbour.pid, fd, size)
            segment.seal()
            return segment.bytes()
        except OSError as error:
            reason = f"its memory cannot be shared: {error}"
        raise self._peers.lost(neighbour.member, reason)


class Handout:
    """Pieces of memory that all neighbours take: where they lie, or out of one copy."""

    def __init__(self, pieces: Sequence[torch.Tensor], peers: Peers, board: Board) -> None:
        self._by_table = board.readable
        addresses = [piece.data_ptr() for piece in pieces]
        table = [torch.tensor(addresses, dtype=torch.int64)]
        self._slot = Slot(board, peers, table if board.readable else pieces)

    def collect(self, places: Sequence[Sequence[torch.Tensor]]) -> None:
        """Read every neighbour's pieces to their places, and let it have its memory back."""
        for member in self._slot.members:
            self._slot.wait(member)
            if places[member] and self._by_table:
                self._slot.read_spans(member, list(self._spans(member, places)), places[member])
            elif places[member]:
                self._slot.read_pieces(member, places[member])
            self._slot.taken(member)

    def release(self) -> None:
        """Return when the neighbours have read mine."""
        self._slot.close()

    def _spans(
        self, member: int, places: Sequence[Sequence[torch.Tensor]]
    ) -> Iterator[tuple[int, int]]:
        table = torch.empty(len(places[member]), dtype=torch.int64)
        self._slot.read(member, [(0, table.numel())], table)
        for address, place in zip(table.tolist(), places[member], strict=True):
            yield address, place.nbytes
