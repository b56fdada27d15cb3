"""One buffer that is too large for its way, as several that follow each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from loosestep.comm.reducers.reducer import Handle
from loosestep.telemetry.traffic import Traffic

Piece = TypeVar("Piece")


class InPieces(Handle, Generic[Piece]):
    """Pieces of a buffer, each launched while the one before is summed."""

    def __init__(self, pieces: Iterator[Piece], start: Callable[[Piece], Handle]) -> None:
        self.traffic = Traffic()
        self._pieces, self._start = pieces, start
        self._inbound: deque[Handle] = deque()
        self._outbound: deque[Handle] = deque()
        self._finished: list[Handle] = []
        self._launch()

    @property
    def bytes_held(self) -> int:
        """What the pieces under way take."""
        return sum(handle.bytes_held for handle in self._inbound)

    def advance(self) -> None:
        """Nothing to do before the end: all but the first piece are still to come."""

    def wait(self) -> None:
        """Carry all pieces through."""
        while self._inbound:
            handle = self._inbound.popleft()
            handle.advance()
            self._outbound.append(handle)
            self._launch()
            if len(self._outbound) > 1:
                self._finish()
        while self._outbound:
            self._finish()

    def commit(self) -> None:
        """Let the state have what all pieces have learnt."""
        for handle in self._finished:
            handle.commit()

    def _launch(self) -> None:
        piece = next(self._pieces, None)
        if piece is not None:
            self._inbound.append(self._start(piece))

    def _finish(self) -> None:
        handle = self._outbound.popleft()
        handle.wait()
        self.traffic.add(handle.traffic)
        self._finished.append(handle)
