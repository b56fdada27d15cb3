"""What a rank that gives up tells the members of its group, over the group's own connections.

The store has the notes of ranks that gave up (see ``blame``), but it may be gone: with the rank
that hosts it, or because that rank gave up first and has ended since.

[Note: last words] Every member posts a receive from every other one when it first sees the group.
Gloo's thread writes what comes to memory, so last words are there whatever the receiver does
meanwhile, and before the connection that brought them is seen to be closed. After a time-out there
are none: Gloo has closed all connections by then.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from loosestep.comm.group import LAST_WORDS, NOTHING, Group

_SAYING = timedelta(milliseconds=50)
_UNKNOWN = -1


def say(group: Group, missed: int | None) -> None:
    """Tell all other members whom this rank missed, by group rank; None: it cannot know."""
    if not group.on_cpu:
        return
    word = torch.tensor([_UNKNOWN if missed is None else missed])
    sends: list[dist.Work] = []
    for member in _others(group):
        with contextlib.suppress(RuntimeError):  # that member is the one that is lost
            sends.append(group.process_group.send([word], member, LAST_WORDS))
    for send in sends:
        with contextlib.suppress(RuntimeError):
            send.wait(_SAYING)


def heard(group: Group, member: int) -> str | None:
    """Return whom a member has missed: '' if it cannot know, None if it has said nothing."""
    word = NOTHING if group.words is None else int(group.words.heard[member])
    if word == NOTHING:
        return None
    return "" if word == _UNKNOWN else str(word)


def _others(group: Group) -> list[int]:
    return [member for member in range(group.size) if member != group.group_rank]
