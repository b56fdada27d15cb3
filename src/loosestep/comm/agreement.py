"""Whether all ranks mean the same: an exchange of digests before any byte of a model moves."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from loosestep.comm.peers import Peers
from loosestep.comm.tensors import Named, placement, short_dtype
from loosestep.comm.transport.shared_memory import Slot
from loosestep.errors import RankMismatch


@dataclass(frozen=True)
class Progress:
    """How far this rank is."""

    step: int = 0
    final: bool = False  # it has no more steps of its own
    # A fingerprint of its values, where it has taken no step since the widest level averaged.
    clean: bytes = b""
    finite: bool = True  # none of its values is an infinity or NaN, as far as it looked
    sample: bytes = b""  # a hash of some of its values, where ranks must hold the same
    observed: tuple[float, ...] = ()  # what it has seen since the last sync; as many on all ranks
    norm: float = 0.0  # of its pseudo-gradient, where a gate asks for that
    outlier: bool = False  # whether that is unlike its norms before


@dataclass(frozen=True)
class Header:
    """What every rank tells the others before a sync."""

    digest: bytes  # of everything that must be equal
    step: int
    final: bool
    clean: bytes
    finite: bool = True
    sample: bytes = b""
    observed: tuple[float, ...] = ()
    norm: float = 0.0
    outlier: bool = False

    _FORMAT: ClassVar = struct.Struct("<16sq?8s?8sd?")

    def encode(self) -> bytes:
        """Return the header as bytes of one length."""
        told = (self.digest, self.step, self.final, self.clean, self.finite, self.sample)
        numbers = struct.pack(f"<{len(self.observed)}d", *self.observed)
        return self._FORMAT.pack(*told, self.norm, self.outlier) + numbers

    @classmethod
    def decode(cls, payload: bytes) -> Header:
        """Read what ``encode`` wrote."""
        size = cls._FORMAT.size
        numbers = struct.unpack(f"<{(len(payload) - size) // 8}d", payload[size:])
        *told, norm, outlier = cls._FORMAT.unpack(payload[:size])
        return replace(cls(*told), observed=numbers, norm=norm, outlier=outlier)


def all_clean(headers: Sequence[Header]) -> bool:
    """Say whether no rank has taken a step since the last sync, and all hold the same values."""
    told = {header.clean for header in headers}
    return len(told) == 1 and any(told.pop())


@dataclass(frozen=True)
class Statement:
    """Everything that must be equal on all ranks, as lines that a person can read."""

    lines: tuple[str, ...]

    @cached_property
    def digest(self) -> bytes:
        """A short hash of the lines."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).digest()


def state(named: Sequence[Named], *agreements: str) -> Statement:
    """Return the statement about ``named`` tensors and further agreements (a schedule, say)."""
    lines = [f"{tuple(t.shape)} {short_dtype(t.dtype)} {name!r}{placement(t)}" for name, t in named]
    return Statement((*agreements, *lines))


def agree(
    peers: Peers,
    statement: Statement,
    progress: Progress | None = None,
    *,
    about: str = "average",
) -> list[Header]:
    """Exchange headers; raise the same ``RankMismatch`` on every rank where they differ.

    Ranks may differ in their step where one of them is ``final``. ``about`` is the verb for what
    they disagree about.
    """
    at = Progress() if progress is None else progress
    told = (at.step, at.final, at.clean, at.finite, at.sample, at.observed, at.norm, at.outlier)
    mine = Header(statement.digest, *told)
    if peers.size == 1 or _all_say(peers, mine):
        return [mine] * peers.size
    headers = [Header.decode(payload) for payload in peers.exchange_fixed(mine.encode())]
    if any(header.digest != mine.digest for header in headers):
        raise _explain(peers, statement, about)
    if len({header.step for header in headers if not header.final}) > 1:
        steps = {rank: h.step for rank, h in zip(peers.global_ranks, headers, strict=True)}
        raise RankMismatch(
            f"{_me(peers)}ranks are not at the same step: {steps}. Every rank must take the same "
            "number of optimizer steps between syncs; a GradScaler that skipped a step on one "
            "rank does this: hand it to attach(..., scaler=scaler)"
        )
    return headers


def _all_say(peers: Peers, mine: Header) -> bool:
    """Say whether all ranks have this header; no also where they do not all share memory.

    All get the same answer: a digest is two numbers, for which a slot has room.
    """
    shared = peers.group.shared_memory
    if shared is None or not shared.fused:
        return False
    digest = hashlib.blake2b(mine.encode(), digest_size=16).digest()
    numbers = struct.unpack("<qq", digest)
    return set(Slot(shared, peers).exchange(*numbers)) == {numbers}


def in_common(peers: Peers, named: Sequence[Named]) -> list[Named]:
    """Return those of ``named`` that all ranks have, by name; all members must ask together."""
    names = [name for name, _ in named]
    digest = Statement(tuple(names)).digest
    if peers.size == 1 or len(set(peers.exchange_fixed(digest))) == 1:
        return list(named)
    told = [set(json.loads(payload)) for payload in peers.exchange(json.dumps(names).encode())]
    everywhere = set.intersection(*told)
    return [(name, tensor) for name, tensor in named if name in everywhere]


def _explain(peers: Peers, statement: Statement, about: str) -> RankMismatch:
    payloads = peers.exchange(json.dumps(statement.lines).encode())
    stated = [tuple(json.loads(payload)) for payload in payloads]
    longest = max(len(lines) for lines in stated)
    for index in range(longest):
        said = [lines[index] if index < len(lines) else "nothing more" for lines in stated]
        if len(set(said)) > 1:
            return RankMismatch(
                f"{_me(peers)}ranks disagree about what to {about} on level {peers.level!r}: "
                f"{_who_says_what(peers, said)}. Nothing has been changed; build the same "
                "model, optimizer and schedule on every rank"
            )
    raise AssertionError("digests differ but statements do not")


def _who_says_what(peers: Peers, said: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in zip(peers.global_ranks, said, strict=True):
        groups.setdefault(text, []).append(rank)
    parts = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {verb} {text}"
        for (text, ranks) in groups.items()
        for verb in ["have" if len(ranks) > 1 else "has"]
    ]
    return "; ".join(parts)


def _me(peers: Peers) -> str:
    return f"rank {peers.global_ranks[peers.group_rank]}: "
