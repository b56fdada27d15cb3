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

from loosestep.wire.board import (
    EMPTIED,
    PLACES,
    REDUCED,
    STAGED,
    WINDOWS,
    Board,
)
from loosestep.wire.exchange import Task

IN_WINDOW = -1  # otherwise a place is the key of a shared segment and an offset in it
OFFSET_BITS = 44


class MemoryExchange:
    """Slices are read where they lie, and results written where they belong."""

    in_memory = True

    def __init__(self, task: Task, board: Board) -> None:
        self._task, self._board = task, board
        self.members = board.members
        self._first, self._last = task.bounds[task.peers.group_rank]
        board.started += 1
        self._number = board.started
        self._start = (self._number % WINDOWS) * board.window_bytes
        self._place = place_of(board, task.buffer)
        self._window = self._memory(board.arena, self._start)
        self._views: dict[int, torch.Tensor] = {}
        self._stage()

    def ready(self) -> None:
        """Return when the neighbours' slices can be read."""
        for member in self.members:
            self._board.wait(self._task.peers, member, STAGED, self._number)
        self._views = {member: self._view(member) for member in self.members}

    def read(self, member: int) -> torch.Tensor:
        """Return a member's version of my slice, where it lies."""
        return self._views[member][self._first : self._last]

    def mirrors(self) -> list[torch.Tensor]:
        """Return where the result of my slice is to be written too."""
        resident = [m for m in self.members if self._place_of(m) != IN_WINDOW]
        places = [self.read(member) for member in resident]
        if len(resident) < len(self.members) and self._place == IN_WINDOW:
            places.append(self._window[self._first : self._last])
        return places

    def publish(self) -> None:
        """Tell the neighbours that the result of my slice is where they look for it."""
        self._board.tell_all(REDUCED, self._number)

    def collect(self) -> None:
        """Put every neighbour's result into the buffer, unless they have done so."""
        resident, buffer = self._place != IN_WINDOW, self._task.buffer
        for member in self.members:
            self._board.wait(self._task.peers, member, REDUCED, self._number)
            if not resident:
                first, last = self._task.bounds[member]
                buffer[first:last].copy_(self._views[member][first:last])
        self._board.tell_all(EMPTIED, self._number)

    def release(self) -> None:
        """Return when the neighbours have what they need of a buffer that they read in place."""
        if self._place != IN_WINDOW:
            for member in self.members:
                self._board.wait(self._task.peers, member, EMPTIED, self._number)

    def _stage(self) -> None:
        """Put my slices where the neighbours find them, and tell them where that is."""
        for member in self.members:  # all have emptied what was in this window before
            self._board.wait(self._task.peers, member, EMPTIED, self._number - WINDOWS)
        if self._place == IN_WINDOW:
            buffer = self._task.buffer
            self._window[: self._first].copy_(buffer[: self._first])
            self._window[self._last :].copy_(buffer[self._last :])
        self._board.note(PLACES + self._number % WINDOWS, self._place)
        self._board.tell_all(STAGED, self._number)

    def _place_of(self, member: int) -> int:
        return self._board.rows[member][PLACES + self._number % WINDOWS]

    def _view(self, member: int) -> torch.Tensor:
        """Return a member's buffer: its window, or where it is resident."""
        place, neighbour = self._place_of(member), self._board.neighbours[member]
        if place == IN_WINDOW:
            return self._memory(neighbour.arena, self._start)
        key, offset = place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)
        return self._memory(neighbour.opened[key], offset)

    def _memory(self, memory: torch.Tensor, start: int) -> torch.Tensor:
        """Return the part of some memory that holds a buffer like mine."""
        buffer = self._task.buffer
        return memory[start : start + buffer.nbytes].view(buffer.dtype)


def place_of(board: Board, buffer: torch.Tensor) -> int:
    """Return where neighbours find a buffer of mine, if it lies in memory that they have mapped."""
    address = buffer.data_ptr()
    for home in board.shared:
        if home.address <= address and address + buffer.nbytes <= home.address + home.size:
            return (home.key << OFFSET_BITS) | (address - home.address)
    return IN_WINDOW
