"""Who is to blame when a process group fails.

The rank that somebody misses may be alive and miss another one itself, and a rank that gives up
closes its connections, so that a neighbour would blame the messenger. Therefore every rank that
gives up leaves a note in the store: whom it missed, and later whom it blames. A rank that is dead
or stuck leaves none. What is in the store is also said over the group's own connections
([Note: last words]), for a store is lost with the rank that hosts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loosestep.comm import last_words
from loosestep.comm.group import Group
from loosestep.comm.store import GroupStore

# How much later than this rank another one that lives may give up; errors come so much later.
GRACE_SECONDS = 0.5
POLL_SECONDS = 0.01

Read = Callable[[int], str | None]  # a rank's note: '' if it cannot know, None if there is none


@dataclass(frozen=True)
class Notes:
    """The notes of one process group's ranks; ``me`` and all others are global ranks."""

    group: Group

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return self.group.ranks

    @property
    def me(self) -> int:
        """The rank that this process is."""
        return self.ranks[self.group.group_rank]

    @property
    def store(self) -> GroupStore:
        """Where the notes are."""
        assert self.group.store is not None, "a group of one has nobody to blame"
        return self.group.store

    def blame(self, missed: int | None) -> tuple[int, ...]:
        """Return the ranks to blame, as far as the others' notes tell within the grace.

        ``missed`` is whom this rank missed; None: it cannot know. It may be to blame itself: a
        rank that was stopped finds, when it goes on, that the others have given it up.
        """
        others = tuple(rank for rank in self.ranks if rank != self.me)
        if len(others) == 1:
            missed = others[0]
        # A store that this rank hosts has stood still with it, and answers when both have woken up.
        patience = 3 * GRACE_SECONDS if self.store.host == self.me else GRACE_SECONDS
        given_up = self.store.ask(patience, lambda store: self._leave(store, missed))
        if given_up is None and self.store.host == self.me:
            time.sleep(GRACE_SECONDS)
            given_up = self.store.ask(patience, lambda store: self._leave(store, missed))
        culprit = self.me if given_up else missed
        last_words.say(self.group, None if culprit is None else self.ranks.index(culprit))
        self.group.hang_up()  # not before: who sees it must find the note
        if given_up:
            return (self.me,)
        # Only a host that was stopped may have to wait for the note of the only other rank.
        if len(others) == 1 and self.store.host != self.me:
            return others
        found = self.store.ask(3 * GRACE_SECONDS, lambda store: self._find(store, missed)) or ()
        if given_up is None and len(found) != 1:
            found = self._find_without_store(missed)
        return found or (others if missed is None else (missed,))

    def _leave(self, store: Any, missed: int | None) -> bool:
        given_up = self._leads_to_me(lambda rank: self._read(store, rank), missed)
        self._write(store, self.me if given_up else missed)
        return given_up

    def _leads_to_me(self, read: Read, missed: int | None) -> bool:
        """Say whether notes that were there before mine, from the one of ``missed`` on, name me."""
        seen = set()
        while missed is not None and missed != self.me and missed not in seen:
            seen.add(missed)
            note = read(missed)
            if note is None:
                return False  # the rank that is missed says nothing
            missed = int(note) if note else None
        named = [read(rank) for rank in self.ranks] if missed is None else [str(missed)]
        return str(self.me) in named

    def _find(self, store: Any, missed: int | None) -> tuple[int, ...]:
        now = time.monotonic()
        deadline = now + GRACE_SECONDS

        def wait_for(rank: int) -> str | None:
            # A neighbour whose process lives may be slow to give up, on a busy machine.
            until = now + 2 * GRACE_SECONDS if self._lives_here(rank) else deadline
            return self._poll(store, rank, until, lambda note: note is not None)

        def wait_for_name(rank: int) -> str | None:
            # Where nobody knows, whoever is slow would be a suspect.
            return self._poll(store, rank, now + 2 * GRACE_SECONDS, bool)

        found = self._follow(wait_for, missed) or self._take_stock(wait_for_name)
        if len(found) == 1:
            self._write(store, found[0])
        return found

    def _find_without_store(self, missed: int | None) -> tuple[int, ...]:
        """Go by last words. The host of a store that is gone or stuck is the first suspect."""
        host = self.store.host
        if host in self.ranks and host != self.me and (missed is None or self._heard(host) is None):
            missed = host
        found = self._follow(self._heard, missed) or self._take_stock(self._heard)
        if len(found) == 1:  # a host that was only stopped finds the note when it goes on
            self.store.ask(0.0, lambda store: self._write(store, found[0]))
        return found

    def _follow(self, read: Read, missed: int | None) -> tuple[int, ...]:
        """Go from note to note to a rank that left none, or that knows that it is the one."""
        seen = {self.me}
        while missed is not None and missed not in seen:
            seen.add(missed)
            note = read(missed)
            if note is None or note == str(missed):
                return (missed,)
            missed = int(note) if note else None
        return ()

    def _take_stock(self, read: Read) -> tuple[int, ...]:
        """Where nobody knows, or ranks miss each other in a circle, look at all other notes."""
        notes = {rank: read(rank) for rank in self.ranks if rank != self.me}
        if silent := tuple(rank for rank, note in notes.items() if note is None):
            return silent
        named = {int(note) for note in notes.values() if note}
        return tuple(named) if len(named) == 1 else ()

    def _lives_here(self, rank: int) -> bool:
        """Say whether a rank is a process on this host that has not ended, as far as is known."""
        near = {} if self.group.board is None else self.group.board.neighbours
        neighbour = near.get(self.ranks.index(rank))
        return neighbour is not None and not neighbour.has_ended()

    def _heard(self, rank: int) -> str | None:
        word = last_words.heard(self.group, self.ranks.index(rank))
        return str(self.ranks[int(word)]) if word else word

    def _poll(
        self, store: Any, rank: int, deadline: float, enough: Callable[[str | None], bool]
    ) -> str | None:
        """Return a rank's note once it says enough, or what it says by then."""
        while not enough(note := self._read(store, rank)) and time.monotonic() <= deadline:
            time.sleep(POLL_SECONDS)
        return note

    def _read(self, store: Any, rank: int) -> str | None:
        if not store.check([self._key(rank)]):
            return None
        note: bytes = store.get(self._key(rank))
        return note.decode()

    def _write(self, store: Any, missed: int | None) -> None:
        store.set(self._key(self.me), "" if missed is None else str(missed))

    def _key(self, rank: int) -> str:
        return f"loosestep/lost/{self.group.process_group.group_name}/{rank}"
