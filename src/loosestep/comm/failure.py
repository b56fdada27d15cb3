"""What happens when ranks lose each other: whose fault it was, and how that is told.

The rank that somebody misses may be alive and miss another one itself, and a rank that gives up
closes its connections, so that a neighbour would blame the messenger. Therefore every rank that
gives up leaves a note in the store: whom it missed, and later whom it blames. A rank that is dead
or stuck leaves none. What is in the store is also said over the group's own connections
([Note: last words]), for a store is lost with the rank that hosts it: because that rank is the one
that is lost, or because it gave up first and has ended since.

[Note: last words] Every member posts a receive from every other one when it first sees the group.
Gloo's thread writes what comes to memory, so last words are there whatever the receiver does
meanwhile, and before the connection that brought them is seen to be closed. After a time-out there
are none: Gloo has closed all connections by then.

[Note: errors outside except] An error that is raised inside ``except`` carries the one that it
was raised for, and with it every frame on the way, whose variables hold the group. Whoever keeps
the error (a log, a test, a handler that goes on) would then keep the group's sockets open, and the
others would not see this rank leave: they would wait for it until their time-out. So what is
caught is put into words there, and the error that the user gets is raised behind the block.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from loosestep.errors import PeerLost

if TYPE_CHECKING:
    from loosestep.comm.group import Group
    from loosestep.comm.store import GroupStore

# User code rarely uses tags up here, so a group that the user handed to us can be shared.
FIRST_TAG = 1 << 24  # of ordinary messages
_NEVER_SENT = FIRST_TAG - 1
_LAST_WORDS = FIRST_TAG - 3

# How much later than this rank another one that lives may give up; errors come so much later.
GRACE_SECONDS = 0.5
SLOW_SECONDS = 5.0  # the same where several ranks say nothing: one is lost, others are only slow
POLL_SECONDS = 0.01
STORE_SECONDS = 1.0  # how long the store may take to say who came
_SAYING = timedelta(milliseconds=50)
_NOTHING, _UNKNOWN = -2, -1  # a member has said nothing yet; it cannot know whom it missed

Read = Callable[[int], str | None]  # a rank's note: '' if it cannot know, None if there is none


@dataclass(frozen=True)
class Failure:
    """How a group failed; not the error itself, whose traceback would keep the group alive."""

    text: str
    ranks: tuple[int, ...]
    phase: str

    def error(self, prefix: str = "") -> PeerLost:
        """Return it as an error."""
        return PeerLost(prefix + self.text, ranks=self.ranks, phase=self.phase)


@dataclass(frozen=True)
class Notes:
    """The notes of one process group's ranks; ``me`` and all others are global ranks."""

    group: Group
    # Notes that were read, by rank: the store may end with its host before all were.
    _seen: dict[int, str] = field(default_factory=dict)
    # Whom this rank blames, once it knows: a question that the store has not answered in time may
    # still write to it when its host goes on, and must not take the name back.
    _blamed: list[int] = field(default_factory=list)

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
        # The others' notes may come a little later, and of a collective nothing else tells.
        unsure = given_up is None or (not given_up and missed is None)
        if unsure and self.store.host == self.me:
            time.sleep(GRACE_SECONDS)
            given_up = self.store.ask(patience, lambda store: self._leave(store, missed))
        culprit = self.me if given_up else missed
        say_last_words(self.group, None if culprit is None else self.ranks.index(culprit))
        hang_up(self.group)  # not before: who sees it must find the note
        if given_up:
            return (self.me,)
        # Only a host that was stopped may have to wait for the note of the only other rank.
        if len(others) == 1 and self.store.host != self.me:
            return others
        patience = 3 * GRACE_SECONDS + (0.0 if given_up is None else SLOW_SECONDS)
        # Where nobody knows, a store that did not answer tells of its host, unless that is a
        # neighbour; one that goes on meanwhile would only tell who was a little later than this.
        host = self.store.host
        silent = host in others and self._heard(host) is None and not self._lives_here(host)
        if given_up is None and missed is None and silent:
            return self._find_without_store(missed)
        found = self.store.ask(patience, lambda store: self._find(store, missed))
        # Its host may have given up first, and end while this rank still asks.
        if found is None or (given_up is None and len(found) != 1):
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
        while len(found) > 1 and time.monotonic() <= now + SLOW_SECONDS:
            time.sleep(POLL_SECONDS)
            found = self._take_stock(lambda rank: self._read(store, rank))
        if len(found) == 1:
            self._blamed[:] = found
            self._write(store, found[0])
        return found

    def _find_without_store(self, missed: int | None) -> tuple[int, ...]:
        """Go by last words, and by notes that were read before.

        The host of a store that is gone or stuck is the first suspect.
        """
        host = self.store.host
        if host in self.ranks and host != self.me and (missed is None or self._heard(host) is None):
            missed = host
        found = self._follow(self._heard, missed) or self._take_stock(self._heard)
        if len(found) == 1:  # a host that was only stopped finds the note when it goes on
            self._blamed[:] = found
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
        met = self.group.shared_memory
        neighbour = None if met is None else met.neighbours.get(self.ranks.index(rank))
        return neighbour is not None and not neighbour.has_ended()

    def _heard(self, rank: int) -> str | None:
        words = self.group.last_words
        word = _NOTHING if words is None else int(words.heard[self.ranks.index(rank)])
        if word == _NOTHING:
            return self._seen.get(rank)
        return "" if word == _UNKNOWN else str(self.ranks[word])

    def _poll(
        self, store: Any, rank: int, deadline: float, enough: Callable[[str | None], bool]
    ) -> str | None:
        """Return a rank's note once it says enough, or what it says by then."""
        if self.store.host in self.ranks:  # it may end, and the store with it, while others wait
            self._read(store, self.store.host)
        while not enough(note := self._read(store, rank)) and time.monotonic() <= deadline:
            time.sleep(POLL_SECONDS)
        return note

    def _read(self, store: Any, rank: int) -> str | None:
        if not store.check([self._key(rank)]):
            return None
        note: bytes = store.get(self._key(rank))
        self._seen[rank] = note.decode()
        return self._seen[rank]

    def _write(self, store: Any, missed: int | None) -> None:
        missed = self._blamed[0] if self._blamed else missed
        store.set(self._key(self.me), "" if missed is None else str(missed))

    def _key(self, rank: int) -> str:
        return f"loosestep/lost/{self.group.process_group.group_name}/{rank}"


@dataclass(frozen=True)
class LastWords:
    """Where the members' last words come to, by group rank ([Note: last words])."""

    heard: torch.Tensor
    works: list[dist.Work]  # kept: a receive ends with its handle


def listen(group: Group) -> LastWords:
    """Be ready for the others' last words; asks nothing of them."""
    heard, works = torch.full((group.size,), _NOTHING), []
    for member in range(group.size):
        if member != group.group_rank:
            with contextlib.suppress(RuntimeError):  # it has gone already
                into = [heard[member : member + 1]]
                works.append(group.process_group.recv(into, member, _LAST_WORDS))
    return LastWords(heard, works)


def say_last_words(group: Group, missed: int | None) -> None:
    """Tell all other members whom this rank missed, by group rank; None: it cannot know."""
    if not group.on_cpu:
        return
    word = torch.tensor([_UNKNOWN if missed is None else missed])
    sends: list[dist.Work] = []
    for member in range(group.size):
        if member != group.group_rank:
            with contextlib.suppress(RuntimeError):  # that member is the one that is lost
                sends.append(group.process_group.send([word], member, _LAST_WORDS))
    for send in sends:
        with contextlib.suppress(RuntimeError):
            send.wait(_SAYING)


def hang_up(group: Group) -> None:
    """Close all connections, so that those who wait for this rank need not sit it out."""
    if not group.on_cpu:
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size):
        # Gloo does so when a wait times out; one for a peer that is gone ends at once.
        if peer != group.group_rank:
            with contextlib.suppress(RuntimeError):
                waiting = group.process_group.recv([nothing], peer, _NEVER_SENT)
                waiting.wait(timedelta(milliseconds=1))


def not_made(
    name: str, ranks: tuple[int, ...], rank: int, store: GroupStore, reason: str
) -> PeerLost:
    """Return the error for a group that could not be made: it names those who have not come."""

    def absent(reached: Any) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not reached.check([f"{name}/{rank}"]))

    missing = store.ask(STORE_SECONDS, absent)
    if missing is not None:
        who = f"ranks {list(missing)} did not come" if missing else "one of them was lost"
    elif store.host is None:
        who = "the store does not answer, so the rank that hosts it (0, as a rule) hangs or is gone"
    else:
        missing = (store.host,)
        who = f"the store does not answer, so rank {store.host}, which hosts it, hangs or is gone"
    return PeerLost(
        f"rank {rank}: cannot make a process group of ranks {list(ranks)}: {who} "
        f"({reason}). A rank that died, hangs or was given other ranks to average with does this",
        ranks=missing or (),
        phase="making a process group",
    )


_CALLBACK = re.compile(r"^Got the following error when running the callback: (RuntimeError: )?")
_SOURCE = re.compile(r"\[[^\]\s]*:\d+\] ?")  # [/pytorch/third_party/gloo/.../pair.cc:537]
_ADDRESS = re.compile(r" ?\[[0-9a-fA-F.:%]+\]:\d+")  # of a peer, which says less than its rank
_TIMED_OUT = re.compile(r"(?:timed out waiting|time-?out after) (\d+) ?ms", re.IGNORECASE)
_FRAME = re.compile(r"^(At:$|Traceback |Exception raised from |frame #\d+: |File \"|/.*\(\d+\): )")
_MOST = 200  # characters of a text that is none of the known ones

_KNOWN = {
    "connection reset by peer": "connection reset by peer",
    "connection closed by": "connection closed by peer",
    "connection was likely closed": "connection closed by peer",
    "broken pipe": "connection closed by peer",
    "timed out": "no answer in time",
    "application timeout": "no answer in time",
}


def reason_of(error: BaseException) -> str:
    r"""Return why something failed in a few words, without paths, addresses and tracebacks.

    What Gloo raises begins with a place in its sources and ends with advice; a future puts a prefix
    before it for every callback that it went through, and a traceback behind.

    >>> reason_of(RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:80. GLHF!"))
    'connection closed by peer'
    >>> reason_of(RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
    'no answer within 5 s'
    """
    text = _message(str(error))
    if found := _TIMED_OUT.search(text):
        return f"no answer within {int(found[1]) / 1000:g} s"
    for piece, reason in _KNOWN.items():
        if piece in text.lower():
            return reason
    sentence = text.split(". ")[0].rstrip(".")
    return sentence[:_MOST] or f"{type(error).__name__} without a text"


def _message(text: str) -> str:
    """Return the first line that is none of a traceback, without what is not for people."""
    lines = (line.strip() for line in text.splitlines())
    text = next((line for line in lines if line and not _FRAME.match(line)), "")
    text = _SOURCE.sub("", _ADDRESS.sub("", text))
    while (shorter := _CALLBACK.sub("", text)) != text:
        text = shorter
    return text
