"""Who is reached how: neighbours on this host through memory, all others by the network."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import struct
from dataclasses import asdict, dataclass

import torch

from loosestep.comm import native
from loosestep.comm.flat import WINDOW_BYTES
from loosestep.comm.group import Group
from loosestep.comm.peers import Peers
from loosestep.comm.places import host_key
from loosestep.comm.transport.board import (
    ORDERED,
    Board,
    Layout,
    Neighbour,
    arena_of,
    rows_of,
    segment_bytes,
)
from loosestep.comm.transport.exchange import Exchange, Task
from loosestep.comm.transport.kernel import copy_from
from loosestep.comm.transport.memory import MemoryExchange
from loosestep.comm.transport.segments import Segment
from loosestep.comm.transport.sockets import SocketExchange

logger = logging.getLogger(__name__)

DEPTH = 12  # by the network; more: less waiting for each other
OFF = "switched off by LOOSESTEP_SHARED_MEMORY=0"
ALONE = "it is alone on its host"
UNORDERED = "without the loops in C this processor cannot order what it writes"


def exchanges(task: Task) -> list[Exchange]:
    """Start to exchange a task's slices with all peers; a group's first call is collective."""
    board, distant = reach(task.peers, task.buffer.device)
    started: list[Exchange] = []
    if board is not None:
        started.append(MemoryExchange(task, board))
    if distant:
        started.append(SocketExchange(task, distant))
    return started


def reach(peers: Peers, device: torch.device) -> tuple[Board | None, list[int]]:
    """Return the board for members that are reached through memory, and who is not.

    None: nobody is. A group's first call is collective.
    """
    if peers.size == 1:
        return None, []
    board = board_of(peers)
    near = board.neighbours if device.type == "cpu" else {}
    return (board if near else None), [p for p in peers.others if p not in near]


def use_network(group: Group) -> None:
    """Send everything by the network; all members must say so before the group's first use."""
    group.board = Board(None, group.size, Layout(WINDOW_BYTES))
    group.board.hosts = [(member,) for member in range(group.size)]


def window_bytes(peers: Peers) -> int:
    """Return how large a buffer may be on this group; a group's first call is collective."""
    if peers.size == 1 or board_of(peers).fused:
        return WINDOW_BYTES  # a train cuts them itself
    return board_of(peers).layout.window_bytes


def largest(peers: Peers, buffer: torch.Tensor) -> int:
    """Return how many bytes of such a buffer may be under way as one; the same on all ranks."""
    board = board_of(peers)
    on_host = board.any_neighbours and buffer.device.type == "cpu"
    return board.layout.window_bytes if on_host else buffer.nbytes


def depth(peers: Peers) -> int:
    """Return how many buffers may be on their way in each direction on this group.

    Through memory one: while it is filled, a second is summed and a third emptied.
    """
    return 1 if peers.size > 1 and board_of(peers).any_neighbours else DEPTH


def board_of(peers: Peers) -> Board:
    """Return who is reached through memory; a group's first call is collective."""
    group = peers.group
    if group.board is None:
        group.board = _meet(peers)
    return group.board


@dataclass
class _Card:
    """How a rank introduces itself: its process, and a segment with a random number in front."""

    pid: int
    fd: int
    size: int
    nonce: int
    address: int  # of the random number, in its own memory
    reason: str = ""  # why it has no segment


def _meet(peers: Peers) -> Board:
    """Share memory with those on this host, by trying; both directions must work."""
    said = [json.loads(p) for p in peers.exchange(json.dumps([host_key(), _has_loops()]).encode())]
    hosts, fused = [host for host, _ in said], all(loops for _, loops in said)
    by_host = [[m for m, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    layout = Layout.of(max(map(len, by_host)))
    alone = hosts.count(host_key()) == 1
    segment, card = (None, _nothing(ALONE)) if alone else _introduce(peers.size, layout)
    cards = [_Card(**json.loads(p)) for p in peers.exchange(json.dumps(asdict(card)).encode())]
    board = Board(segment, peers.size, layout)
    board.hosts = [tuple(members) for members in by_host]
    near = [p for p in peers.others if hosts[p] == host_key()]
    met = {p: n for p in near if (n := _visit(p, cards[p], peers)) is not None}
    readable = all(_readable(cards[p]) for p in near)
    said = [json.loads(p) for p in peers.exchange(json.dumps([list(met), readable]).encode())]
    board.neighbours = {p: n for p, n in met.items() if peers.group_rank in said[p][0]}
    everybody = all(len(members) == peers.size - 1 for members, _ in said)
    board.fused = everybody and fused
    board.any_neighbours = any(members for members, _ in said)
    board.readable = all(said[p][1] for p in (peers.group_rank, *near))
    _say(peers, board, [f"rank {peers.global_ranks[p]}: {cards[p].reason}" for p in near])
    return board


def _has_loops() -> bool:
    return native.loops() is not None


def _introduce(group_size: int, layout: Layout) -> tuple[Segment | None, _Card]:
    nonce = secrets.randbits(62)
    if os.environ.get("LOOSESTEP_SHARED_MEMORY") == "0":
        return None, _nothing(OFF)
    if not (ORDERED or _has_loops()):
        return None, _nothing(UNORDERED)
    try:
        segment = Segment.create(*segment_bytes(group_size, layout))
    except OSError as error:
        return None, _nothing(f"no shared memory to be had: {error}")
    segment.map[:8] = struct.pack("<q", nonce)
    address = segment.bytes().data_ptr()
    return segment, _Card(os.getpid(), segment.fd, segment.size, nonce, address)


def _nothing(reason: str) -> _Card:
    """Return the card of a rank that shares no memory."""
    return _Card(os.getpid(), -1, 0, 0, 0, reason)


def _visit(member: int, card: _Card, peers: Peers) -> Neighbour | None:
    """Map a neighbour's board and find my row on it."""
    if card.reason:
        return None
    try:
        segment = Segment.open(card.pid, card.fd, card.size)
    except OSError as error:
        card.reason = f"its memory cannot be mapped: {error}"
        return None
    segment.seal()
    if struct.unpack("<q", segment.map[:8])[0] != card.nonce:
        card.reason = "its process is not the one that it seems to be"
        return None
    row = rows_of(segment, peers.size)[peers.group_rank]
    return Neighbour(member, card.pid, segment, row, arena_of(segment, peers.size))


def _readable(card: _Card) -> bool:
    """Say whether the kernel lets this process read the neighbour's own memory."""
    if os.environ.get("LOOSESTEP_READ_MEMORY") == "0" or card.reason:
        return False
    probe = ctypes.c_int64()
    error = copy_from(card.pid, [(card.address, 8)], [(ctypes.addressof(probe), 8)])
    return not error and probe.value == card.nonce


def _say(peers: Peers, board: Board, reasons: list[str]) -> None:
    near = [peers.global_ranks[member] for member in sorted(board.neighbours)]
    far = [rank for rank in peers.global_ranks if rank not in near]
    far.remove(peers.global_ranks[peers.group_rank])
    why = [reason for reason in reasons if not reason.endswith(": ")]
    logger.info(
        "level %r: ranks %s are reached through shared memory, ranks %s by the network%s",
        peers.level,
        near,
        far,
        f" ({'; '.join(why)})" if why else "",
    )
