"""Exchange between processes of one host through memory that they share.

A loopback connection copies every byte twice and wakes a thread for every message. Here a rank
copies the slices that its neighbours own into a *window* of its own, they sum straight out of all
windows, and everybody copies the results home. A few windows go round, so that one is filled
while another is summed and a third emptied. Both ways carry the same bytes, so results cannot
depend on which was taken.

A buffer that lies in shared memory already (see ``resident``) needs no window: neighbours read it
where it is, and whoever owns a slice writes the result to all of them.
"""

from __future__ import annotations

import torch

from loosestep.comm.native import CONSTANTS
from loosestep.comm.transport.board import (
    DETAIL,
    OFFERED,
    PLACE,
    REDUCED,
    SINGLE,
    TAKEN,
    Board,
    Slot,
)
from loosestep.comm.transport.exchange import Task
from loosestep.comm.transport.shelf import Copy, copy_of

# Where a buffer lies: in a window (-1, -2, ...), in a copy (its key), or where it is resident
# (the key of that memory above the offset in it).
OFFSET_BITS = CONSTANTS["OFFSET_BITS"]


class MemoryExchange:
    """Slices are read where they lie, and results written where they belong."""

    in_memory = True

    def __init__(self, task: Task, board: Board) -> None:
        self._task, self._board, self._slot = task, board, Slot(board, task.peers)
        self.members = self._slot.members
        self._first, self._last = task.bounds[task.peers.group_rank]
        self._copy: Copy | None = None
        self._views: dict[int, torch.Tensor] = {}
        home = place_of(board, task.buffer)
        self._resident = home is not None
        self._mine = task.buffer  # what the neighbours see of it
        self._slot.offer(*(self._stage() if home is None else (home, 0)))

    def ready(self) -> None:
        """Return when the neighbours' slices can be read."""
        for member in self.members:
            self._slot.wait(member, OFFERED)
        self._views = {member: self._view(member) for member in self.members}

    def read(self, member: int) -> torch.Tensor:
        """Return a member's version of my slice, where it lies."""
        return self._views[member][self._first : self._last]

    def mirrors(self) -> list[torch.Tensor]:
        """Return where the result of my slice is to be written too."""
        resident = [m for m in self.members if self._slot.told(m, PLACE) >> OFFSET_BITS > 0]
        places = [self.read(member) for member in resident]
        if len(resident) < len(self.members) and not self._resident:
            places.append(self._mine[self._first : self._last])
        return places

    def publish(self) -> None:
        """Tell the neighbours that the result of my slice is where they look for it."""
        self._slot.tell_all(REDUCED)

    def collect(self) -> None:
        """Put every neighbour's result into the buffer, unless they have done so."""
        buffer = self._task.buffer
        for member in self.members:
            self._slot.wait(member, REDUCED)
            if not self._resident:
                first, last = self._task.bounds[member]
                buffer[first:last].copy_(self._views[member][first:last])
        self._slot.finish()
        self._slot.tell_all(TAKEN)

    def release(self) -> None:
        """Return when the neighbours have what they need, if they read it from more than a window.

        A window is waited for when it is needed again.
        """
        if self._resident or self._copy is not None:
            self._slot.wait_until_taken()
        if self._copy is not None:
            self._board.shelf.give(self._copy)
            self._copy = None

    def _stage(self) -> tuple[int, int]:
        """Copy the slices that neighbours own to where they find them, and say where that is."""
        index = self._free_window()
        if index is None:
            self._copy = self._board.shelf.take([self._task.buffer])
            self._mine = self._part(self._copy.memory, 0)
            return self._copy.key, self._copy.detail
        self._board.windows[index] = self._slot.use
        self._mine = self._part(
            self._board.arena_for(SINGLE, self._task.buffer.nbytes),
            index * self._board.layout.window_bytes,
        )
        self._mine[: self._first].copy_(self._task.buffer[: self._first])
        self._mine[self._last :].copy_(self._task.buffer[self._last :])
        return -1 - index, 0

    def _free_window(self) -> int | None:
        """Return a window that nobody reads, waiting if it is for others; None: it is up to me.

        [Note: windows of one's own] Where this rank holds all windows for averages that it has
        not finished (two of them taking turns), waiting for a window would be for ever.
        """
        uses = self._board.windows
        for index, use in enumerate(uses):
            if use is None or use.taken(self._board):
                return index
        finished = [use for use in uses if use is not None and use.finished]
        if not finished:
            return None
        oldest = min(finished, key=lambda use: use.number)
        self._board.wait_for_all(self._task.peers, oldest.column, oldest.number)
        return uses.index(oldest)

    def _view(self, member: int) -> torch.Tensor:
        """Return a member's buffer, wherever it lies."""
        place, neighbour = self._slot.told(member, PLACE), self._board.neighbours[member]
        if place < 0:
            return self._part(neighbour.arena, (-1 - place) * self._board.layout.window_bytes)
        if place >> OFFSET_BITS == 0:
            detail = self._slot.told(member, DETAIL)
            return self._part(copy_of(neighbour.copies, place, neighbour.pid, detail), 0)
        key, offset = place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)
        return self._part(neighbour.opened[key], offset)

    def _part(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return the part of some memory that holds a buffer like mine."""
        buffer = self._task.buffer
        return memory[start : start + buffer.nbytes].view(buffer.dtype)


def place_of(board: Board, buffer: torch.Tensor) -> int | None:
    """Return where neighbours find a buffer of mine, if it lies in memory that they have mapped."""
    address = buffer.data_ptr()
    for home in board.shared:
        if home.address <= address and address + buffer.nbytes <= home.address + home.size:
            return (home.key << OFFSET_BITS) | (address - home.address)
    return None
