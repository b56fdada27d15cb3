"""Who is to blame when a process group fails.

The rank that somebody misses may be alive and miss another one itself, and a rank that gives up
closes its connections, so that a neighbour would blame the messenger. Therefore every rank that
gives up leaves a note in the store: whom it missed. A rank that is dead or stuck leaves none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loosestep.deadline import ask_store

# How much later than this rank another one that lives may give up; errors come so much later.
GRACE_SECONDS = 0.5
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Notes:
    """The notes of one process group's ranks; ``me`` and all others are global ranks."""

    group_name: str
    ranks: tuple[int, ...]
    me: int

    def leave(self, missed: int | None) -> None:
        """Say whom this rank missed; None: it cannot know."""
        note = "" if missed is None else str(missed)
        ask_store(GRACE_SECONDS, lambda store: store.set(self._key(self.me), note))

    def suspects(self, missed: int | None) -> tuple[int, ...]:
        """Return the ranks to blame, as far as the others' notes tell within the grace."""
        others = tuple(rank for rank in self.ranks if rank != self.me)
        if len(others) == 1:
            return others
        answers = [others if missed is None else (missed,)]
        # The store may go meanwhile, with the rank that serves it; what was read still holds.
        ask_store(2 * GRACE_SECONDS, lambda store: answers.extend(self._follow(store, missed)))
        return answers[-1]

    def _follow(self, store: Any, missed: int | None) -> Iterator[tuple[int, ...]]:
        """Yield better and better answers, going from note to note to a rank that left none."""
        deadline, seen = time.monotonic() + GRACE_SECONDS, {self.me}
        while missed is not None and missed not in seen:
            seen.add(missed)
            yield (missed,)
            note = self._read(store, missed, deadline)
            if note is None:
                return
            missed = int(note) if note else None
        # Nobody knows, or all in a circle miss each other: it is one that says nothing.
        silent = [r for r in self.ranks if self._read(store, r, deadline) is None]
        if suspects := tuple(rank for rank in silent if rank != self.me):
            yield suspects

    def _read(self, store: Any, rank: int, deadline: float) -> str | None:
        """Return a rank's note, or None if it has left none by then."""
        while not store.check([self._key(rank)]):
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        note: bytes = store.get(self._key(rank))
        return note.decode()

    def _key(self, rank: int) -> str:
        return f"loosestep/lost/{self.group_name}/{rank}"
