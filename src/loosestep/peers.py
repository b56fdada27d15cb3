"""A process group seen from one of its ranks, where every wait ends and names who was missing.

Everything here is point to point. A collective can only report that "it" failed; a message
between two ranks knows whose message did not come.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from loosestep.blame import Notes
from loosestep.errors import PeerLost
from loosestep.groups import group_timeout

# User code rarely uses tags up here, so a group that the user handed to us can be shared.
_FIRST_TAG = 1 << 24
_NEVER_SENT = _FIRST_TAG - 1
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
_broken: weakref.WeakKeyDictionary[dist.ProcessGroup, _Failure] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Phase:
    """What is going on, for the error text: the verb, the tensor and the step."""

    verb: str
    tensor: str = ""
    step: int | None = None

    def __str__(self) -> str:
        """Read as half a sentence: ``averaging 'fc.weight' at step 12``."""
        tensor = f" {self.tensor!r}" if self.tensor else ""
        return self.verb + tensor + ("" if self.step is None else f" at step {self.step}")


@dataclass(frozen=True)
class _Failure:
    """How a group failed; not the error itself, whose traceback would keep the group alive."""

    text: str
    ranks: tuple[int, ...]
    phase: str

    def error(self, prefix: str = "") -> PeerLost:
        """Return it as an error."""
        return PeerLost(prefix + self.text, ranks=self.ranks, phase=self.phase)


@dataclass(frozen=True)
class Message:
    """A tensor on its way to or from a member of the group."""

    tensor: torch.Tensor
    peer: int  # the other side's group rank
    outgoing: bool


@dataclass(frozen=True)
class Peers:
    """The ranks of one process group, and messages between them.

    ``group_rank`` counts inside the group, ``global_ranks[group_rank]`` in the job.
    """

    process_group: dist.ProcessGroup | None  # None: a group of one, which needs no messages
    global_ranks: tuple[int, ...]
    group_rank: int
    level: str = "group"
    weights: tuple[float, ...] | None = None  # one a member; None: all count the same
    timeout: float | None = None  # seconds; None: the process group's own
    phase: Phase = field(default=Phase("talking"))
    checked: bool = False  # whether all have said already which of them have a say

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.global_ranks)

    @property
    def others(self) -> list[int]:
        """The other members' group ranks, each rank starting at its right-hand neighbour."""
        return [(self.group_rank + i) % self.size for i in range(1, self.size)]

    @property
    def seconds(self) -> float:
        """How long a wait may take: the given time-out, or the process group's own."""
        if self.timeout is not None:
            return self.timeout
        return group_timeout(self._group).total_seconds()

    def muted(self, ranks: Sequence[int]) -> Peers:
        """Return the same with a weight of 0 for some global ranks, which then have no say."""
        if not set(ranks) & set(self.global_ranks):
            return self
        weights = self.weights or (1.0,) * self.size
        pairs = zip(self.global_ranks, weights, strict=True)
        return replace(self, weights=tuple(0.0 if rank in ranks else w for rank, w in pairs))

    def next_tags(self, count: int) -> int:
        """Reserve ``count`` message tags, the same ones on every member, and return the first."""
        counter = _tags.setdefault(self._group, itertools.count(_FIRST_TAG))
        first = next(counter)
        for _ in range(count - 1):
            next(counter)
        return first

    def post(self, messages: Sequence[Message], tag: int) -> list[Transfer]:
        """Launch messages that go together and return what is to be waited for."""
        self.check()
        if messages and messages[0].tensor.device.type != "cpu":
            return self._post_batch(messages, tag)
        return [self._launch(message, tag) for message in messages]

    def check(self) -> None:
        """Raise if the group has failed before, or was given up."""
        if (failure := _broken.get(self._group)) is not None:
            raise failure.error("this process group failed before and cannot go on: ")

    def give_up(self, reason: str) -> None:
        """Close the group to later calls, and end those that wait through memory now."""
        _broken.setdefault(self._group, _Failure(reason, (), str(self.phase)))

    def exchange(self, payload: bytes) -> list[bytes]:
        """Hand ``payload`` to every member and return all payloads by group rank."""
        if self.size == 1:
            return [payload]
        sizes = self._exchange_equal(len(payload).to_bytes(8, "little"), [8] * self.size)
        return self._exchange_equal(payload, [int.from_bytes(size, "little") for size in sizes])

    def exchange_fixed(self, payload: bytes, tag: int | None = None) -> list[bytes]:
        """Like ``exchange``, for payloads of one length on all members: one message fewer.

        A ``tag`` of its own keeps such messages apart from all others.
        """
        return self._exchange_equal(payload, [len(payload)] * self.size, tag)

    def during(self, phase: Phase) -> Peers:
        """Return the same peers, with ``phase`` for what their errors say."""
        return replace(self, phase=phase)

    def lost(self, peer: int | None, reason: str) -> PeerLost:
        """Return the error for a peer that did not answer, and close the group to later calls.

        None: a collective failed, which does not say whose fault it was.
        """
        me = self.global_ranks[self.group_rank]
        missed = None if peer is None else self.global_ranks[peer]
        notes = Notes(self._group.group_name, self.global_ranks, me)
        notes.leave(missed)  # before hanging up: who sees that must find the note
        self._hang_up()
        suspects = notes.suspects(missed)
        which = "one of ranks" if len(suspects) > 1 else "rank"
        text = (
            f"rank {me}: lost {which} "
            f"{', '.join(map(str, suspects))} while {self.phase} "
            f"on level {self.level!r} (ranks {list(self.global_ranks)}): {reason}. "
            "Parameters may be partly averaged: restart from a checkpoint"
        )
        _broken[self._group] = _Failure(text, suspects, str(self.phase))
        return _broken[self._group].error()

    def _hang_up(self) -> None:
        """Close all connections, so that those who wait for this rank need not sit it out."""
        if self._message_device().type != "cpu":
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in self.others:
            # Gloo does so when a wait times out; one for a peer that is gone ends at once.
            with contextlib.suppress(RuntimeError):
                self._group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.process_group is not None, "a group of one sends no messages"
        return self.process_group

    def _launch(self, message: Message, tag: int) -> Transfer:
        # The backend's own verbs: torch.distributed.isend adds checks that cost more than it does.
        verb = self._group.send if message.outgoing else self._group.recv
        reason = ""
        try:
            work = verb([message.tensor], message.peer, tag)
        except RuntimeError as error:
            reason = _one_line(error)
        # Outside the except block: a kept traceback would keep the group's sockets open.
        if reason:
            raise self.lost(message.peer, reason)
        return Transfer(work, self, message.peer)

    def _post_batch(self, messages: Sequence[Message], tag: int) -> list[Transfer]:
        # NCCL needs sends and receives in one batch, else two ranks may both receive first.
        operations = [
            dist.P2POp(
                dist.isend if message.outgoing else dist.irecv,
                message.tensor,
                group=self._group,
                tag=tag,
                group_peer=message.peer,
            )
            for message in messages
        ]
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(messages):  # one for all of them, which does not say whose it is
            return [Transfer(work, self, None) for work in works]
        return [Transfer(work, self, m.peer) for work, m in zip(works, messages, strict=True)]

    def _exchange_equal(
        self, payload: bytes, lengths: Sequence[int], tag: int | None = None
    ) -> list[bytes]:
        if self.size == 1:
            return [payload]
        tag = self.next_tags(1) if tag is None else tag
        device = self._message_device()
        inbox = {p: torch.zeros(lengths[p], dtype=torch.uint8, device=device) for p in self.others}
        outbox = torch.tensor(list(payload), dtype=torch.uint8, device=device)
        messages = [Message(inbox[p], p, outgoing=False) for p in self.others if lengths[p]]
        messages += [Message(outbox, p, outgoing=True) for p in self.others if payload]
        for transfer in self.post(messages, tag):
            transfer.wait()
        inbox[self.group_rank] = outbox
        return [bytes(inbox[p].tolist()) for p in range(self.size)]

    def device_for(self, device: torch.device) -> torch.device:
        """Return ``device`` if the group can move its tensors, else one that it can."""
        kinds = {kind.type for kind in self._group._device_types}
        return device if device.type in kinds else self._message_device()

    def _message_device(self) -> torch.device:
        kinds = {device.type for device in self._group._device_types}
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds.pop(), torch.accelerator.current_device_index())


@dataclass
class Transfer:
    """One message under way."""

    work: dist.Work
    peers: Peers
    peer: int | None  # None: several messages in one

    def wait(self) -> None:
        """Return when the message is through, or raise ``PeerLost`` naming the peer."""
        reason = ""
        timeout = self.peers.timeout
        try:
            if timeout is None:
                self.work.wait()
            else:
                self.work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            reason = _one_line(error)
        if reason:
            raise self.peers.lost(self.peer, reason)


def _one_line(error: RuntimeError) -> str:
    text = str(error).splitlines()[0] if str(error) else "no reason given"
    return text.split("] ", 1)[-1].split(". ")[0].rstrip(".")


def peers_of(
    group: dist.ProcessGroup,
    *,
    level: str = "group",
    weights: tuple[float, ...] | None = None,
    timeout: float | None = None,
) -> Peers:
    """Return this rank's view of ``group``."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return Peers(group, ranks, dist.get_group_rank(group, dist.get_rank()), level, weights, timeout)
