"""Who is reached how: neighbours on this host through memory, all others by the network."""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from loosestep.peers import Peers
from loosestep.places import host_key
from loosestep.wire.exchange import Exchange, Task
from loosestep.wire.kernel import copy_from, copy_to
from loosestep.wire.memory import Board, MemoryExchange, Neighbour
from loosestep.wire.sockets import SocketExchange

logger = logging.getLogger(__name__)

_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, Board] = weakref.WeakKeyDictionary()


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


def use_network(group: dist.ProcessGroup) -> None:
    """Send everything by the network; all members must say so before the group's first use."""
    _boards[group] = Board(dist.get_world_size(group))


def board_of(peers: Peers) -> Board:
    """Return who is reached through memory; a group's first call is collective."""
    group = peers.process_group
    assert group is not None, "a group of one exchanges nothing"
    if group not in _boards:
        _boards[group] = _meet(peers)
    return _boards[group]


def _meet(peers: Peers) -> Board:
    """Find out whose memory can be read and written, by trying; both directions must work."""
    board, nonce = Board(peers.size), ctypes.c_int64(secrets.randbits(62))
    here = "nowhere" if os.environ.get("LOOSESTEP_READ_MEMORY") == "0" else host_key()
    mine = f"{here}|{os.getpid()}|{ctypes.addressof(nonce)}|{nonce.value}"
    cards = [_Card.parse(payload.decode()) for payload in peers.exchange(mine.encode())]
    rows = ",".join(str(board.row_address(member)) for member in range(peers.size))
    their_rows = [list(map(int, p.decode().split(","))) for p in peers.exchange(rows.encode())]
    met = [
        Neighbour(p, cards[p].pid, their_rows[p][peers.group_rank])
        for p in peers.others
        if cards[p].host == here != "nowhere"
        and _reachable(cards[p], their_rows[p][peers.group_rank])
    ]
    answers = peers.exchange(",".join(str(neighbour.member) for neighbour in met).encode())
    mutual = [n for n in met if str(peers.group_rank) in answers[n.member].decode().split(",")]
    board.neighbours = {neighbour.member: neighbour for neighbour in mutual}
    _say(peers, board)
    return board


class _Card(NamedTuple):
    """How a rank introduces itself: where it runs, and a random number at an address."""

    host: str
    pid: int
    address: int
    nonce: int

    @classmethod
    def parse(cls, text: str) -> _Card:
        host, pid, address, nonce = text.split("|")
        return cls(host, int(pid), int(address), int(nonce))


def _reachable(card: _Card, row: int) -> bool:
    """Read the neighbour's random number and write a 0 to the row that it keeps for me."""
    probe, zero = ctypes.c_int64(), ctypes.c_int64(0)
    error = copy_from(card.pid, [(card.address, 8)], [(ctypes.addressof(probe), 8)])
    if error or probe.value != card.nonce:
        return False  # not the process that it seems to be: nothing may be written there
    return copy_to(card.pid, [(row, 8)], [(ctypes.addressof(zero), 8)]) == ""


def _say(peers: Peers, board: Board) -> None:
    near = [peers.global_ranks[member] for member in sorted(board.neighbours)]
    far = [rank for rank in peers.global_ranks if rank not in near]
    far.remove(peers.global_ranks[peers.group_rank])
    logger.info(
        "level %r: ranks %s are reached through memory, ranks %s by the network",
        peers.level,
        near,
        far,
    )
