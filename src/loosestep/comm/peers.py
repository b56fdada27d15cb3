"""A process group seen from one of its ranks, where every wait ends and names who was missing.

Everything here is point to point. A collective can only report that "it" failed; a message
between two ranks knows whose message did not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from loosestep.comm.failure import Failure, Notes, hang_up, reason_of
from loosestep.comm.flat.windows import WINDOW_BYTES
from loosestep.errors import PeerLost

if TYPE_CHECKING:
    from loosestep.comm.group import Group
    from loosestep.comm.transport.meeting import Hosts
    from loosestep.comm.transport.shared_memory import SharedMemory

DEPTH = 12  # by the network; more: less waiting for each other
FRAME_BYTES = 512  # of a payload whose size the others do not know; larger: fewer second rounds


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
class Message:
    """A tensor on its way to or from a member of the group."""

    tensor: torch.Tensor
    peer: int  # the other side's group rank
    outgoing: bool


@dataclass(frozen=True)
class Peers:
    """A group during one operation: on which level, by which weights, and what is going on.

    ``group_rank`` counts inside the group, ``global_ranks[group_rank]`` in the job.
    """

    group: Group
    level: str = "group"
    weights: tuple[float, ...] | None = None  # one a member; None: all count the same
    timeout: float | None = None  # seconds; None: the process group's own
    phase: Phase = field(default=Phase("talking"))
    checked: bool = False  # whether all have said already which of them have a say

    # Of the group, and here because they are read everywhere.
    global_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)  # by group rank
    group_rank: int = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        group = self.group
        vars(self).update(global_ranks=group.ranks, group_rank=group.group_rank, size=group.size)

    @property
    def others(self) -> list[int]:
        """The other members' group ranks, each rank starting at its right-hand neighbour."""
        return [(self.group_rank + i) % self.size for i in range(1, self.size)]

    @property
    def seconds(self) -> float:
        """How long a wait may take: the given time-out, or the process group's own."""
        if self.timeout is not None:
            return self.timeout
        return self.group.own_timeout.total_seconds()

    @property
    def shared_memory(self) -> SharedMemory:
        """What the members on this host share; a group's first call is collective."""
        return self.group.shared_memory or self.group.share_memory(self)

    @property
    def hosts(self) -> Hosts:
        """The members by host; a group's first call is collective."""
        if not self.group.hosts:
            self.group.share_memory(self)
        return self.group.hosts

    @property
    def depth(self) -> int:
        """How many buffers may be on their way in each direction; the first call is collective.

        Through memory one: while it is filled, a second is summed and a third emptied.
        """
        return 1 if self.size > 1 and self.shared_memory.any_neighbours else DEPTH

    @property
    def window_bytes(self) -> int:
        """How large a buffer may be on this group; its first call is collective."""
        if self.size == 1 or self.shared_memory.fused:
            return WINDOW_BYTES  # a train cuts them itself
        return self.shared_memory.layout.window_bytes

    def weighed(self, factors: Mapping[int, float]) -> Peers:
        """Return the same with other weights for some global ranks; with 0 they have no say."""
        if not set(factors) & set(self.global_ranks):
            return self
        weights = self.weights or (1.0,) * self.size
        pairs = zip(self.global_ranks, weights, strict=True)
        return replace(self, weights=tuple(w * factors.get(rank, 1.0) for rank, w in pairs))

    def next_tags(self, count: int) -> int:
        """Reserve ``count`` message tags, the same ones on every member, and return the first."""
        first = next(self.group.tags)
        for _ in range(count - 1):
            next(self.group.tags)
        return first

    def post(self, messages: Sequence[Message], tag: int) -> list[Transfer]:
        """Launch messages that go together and return what is to be waited for."""
        self.check()
        if messages and messages[0].tensor.device.type != "cpu":
            return self._post_batch(messages, tag)
        # The backend's own verbs: torch.distributed.isend adds checks that cost more than it does.
        group = self.group.process_group
        return [self._launch(group, message, tag) for message in messages]

    def check(self) -> None:
        """Raise if the group has failed before, or was given up."""
        if (failure := self.group.failure) is not None:
            raise failure.error("this process group failed before and cannot go on: ")

    def give_up(self, reason: str) -> None:
        """Close the group to later calls, and end those that wait now."""
        if self.group.failure is None:
            self.group.failure = Failure(reason, (), str(self.phase))
        hang_up(self.group)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Hand ``payload`` to every member and return all payloads by group rank."""
        if self.size == 1:
            return [payload]
        # In one round, as a rule: the length, what fits behind it, and the rest only where some is.
        mine = len(payload).to_bytes(8, "little") + payload
        first = mine[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")
        frames = self._exchange_equal(first, [FRAME_BYTES] * self.size)
        ends = [8 + int.from_bytes(frame[:8], "little") for frame in frames]
        rests = [max(0, end - FRAME_BYTES) for end in ends]
        if any(rests):
            more = self._exchange_equal(mine[FRAME_BYTES:], rests)
            frames = [frame + rest for frame, rest in zip(frames, more, strict=True)]
        return [frame[8:end] for frame, end in zip(frames, ends, strict=True)]

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
        suspects = Notes(self.group).blame(missed)
        if suspects == (me,):
            head = f"rank {me}: the others gave this rank up"
            reason = (
                f"it did not answer them for more than {self.seconds:g} s, so it was stopped, "
                "swapped out or too slow, its connections broke, or it took part in something else"
            )
        else:
            which = "one of ranks" if len(suspects) > 1 else "rank"
            head = f"rank {me}: lost {which} {', '.join(map(str, suspects))}"
        text = (
            f"{head} while {self.phase} "
            f"on level {self.level!r} (ranks {list(self.global_ranks)}): {reason}. "
            "Parameters may be partly averaged: restart from a checkpoint"
        )
        self.group.failure = Failure(text, suspects, str(self.phase))
        return self.group.failure.error()

    def _launch(self, group: dist.ProcessGroup, message: Message, tag: int) -> Transfer:
        verb = group.send if message.outgoing else group.recv
        reason = ""
        try:
            work = verb([message.tensor], message.peer, tag)
        except RuntimeError as error:
            reason = reason_of(error)
        if reason:  # not before: [Note: errors outside except]
            raise self.lost(message.peer, reason)
        return Transfer(work, self, message.peer)

    def _post_batch(self, messages: Sequence[Message], tag: int) -> list[Transfer]:
        # NCCL needs sends and receives in one batch, else two ranks may both receive first.
        operations = [
            dist.P2POp(
                dist.isend if message.outgoing else dist.irecv,
                message.tensor,
                group=self.group.process_group,
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
        return device if device.type in self.group.device_types else self._message_device()

    def _message_device(self) -> torch.device:
        if self.group.on_cpu:
            return torch.device("cpu")
        return torch.device(self.group.device_types[-1], torch.accelerator.current_device_index())


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
            reason = reason_of(error)
        if reason:  # not before: [Note: errors outside except]
            raise self.peers.lost(self.peer, reason)
