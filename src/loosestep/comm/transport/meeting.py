"""How the members of a group find out who is on which host, and share memory there.

It is tried, not looked up: a rank shares memory with those whose segment it could map, if they
could map its own too. All others it reaches by the network.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loosestep.comm import native
from loosestep.comm.transport.kernel import copy_from
from loosestep.comm.transport.segments import Segment
from loosestep.comm.transport.shared_memory import (
    ORDERED,
    Layout,
    Neighbour,
    SharedMemory,
    arena_of,
    rows_of,
    segment_bytes,
)

if TYPE_CHECKING:
    from loosestep.comm.peers import Peers

logger = logging.getLogger(__name__)

OFF = "switched off by LOOSESTEP_SHARED_MEMORY=0"
ALONE = "it is alone on its host"
UNORDERED = "without the loops in C this processor cannot order what it writes"

Hosts = list[tuple[int, ...]]  # the members of a group, by host


@dataclass
class _Introduction:
    """What a rank says of itself: its process, and a segment with a random number in front."""

    pid: int
    fd: int
    size: int
    nonce: int
    address: int  # of the random number, in its own memory
    reason: str = ""  # why it has no segment


def meet(peers: Peers) -> tuple[Hosts, SharedMemory]:
    """Share memory with those on this host; return also who is on which. A collective call."""
    has_loops = native.loops() is not None
    said = [json.loads(p) for p in peers.exchange(json.dumps([host_key(), has_loops]).encode())]
    names, all_loops = [name for name, _ in said], all(loops for _, loops in said)
    hosts = [tuple(m for m, n in enumerate(names) if n == name) for name in dict.fromkeys(names)]
    layout = Layout.of(max(map(len, hosts)))
    near = [p for p in peers.others if names[p] == host_key()]
    segment, mine = _introduce(peers.size, layout) if near else (None, _nothing(ALONE))
    told = peers.exchange(json.dumps(asdict(mine)).encode())
    introduced = [_Introduction(**json.loads(payload)) for payload in told]
    shared = SharedMemory(segment, peers.size, layout)
    mapped = {p: n for p in near if (n := _map(p, introduced[p], peers)) is not None}
    readable = all(_readable(introduced[p]) for p in near)
    said = [json.loads(p) for p in peers.exchange(json.dumps([list(mapped), readable]).encode())]
    shared.neighbours = {p: n for p, n in mapped.items() if peers.group_rank in said[p][0]}
    shared.fused = all_loops and all(len(members) == peers.size - 1 for members, _ in said)
    shared.any_neighbours = any(members for members, _ in said)
    shared.readable = all(said[p][1] for p in (peers.group_rank, *near))
    _log(peers, shared, [f"rank {peers.global_ranks[p]}: {introduced[p].reason}" for p in near])
    return hosts, shared


def _introduce(group_size: int, layout: Layout) -> tuple[Segment | None, _Introduction]:
    nonce = secrets.randbits(62)
    if os.environ.get("LOOSESTEP_SHARED_MEMORY") == "0":
        return None, _nothing(OFF)
    if not (ORDERED or native.loops() is not None):
        return None, _nothing(UNORDERED)
    try:
        segment = Segment.create(*segment_bytes(group_size, layout))
    except OSError as error:
        return None, _nothing(f"no shared memory to be had: {error}")
    segment.map[:8] = struct.pack("<q", nonce)
    address = segment.bytes().data_ptr()
    return segment, _Introduction(os.getpid(), segment.fd, segment.size, nonce, address)


def _nothing(reason: str) -> _Introduction:
    """Return what a rank says that shares no memory."""
    return _Introduction(os.getpid(), -1, 0, 0, 0, reason)


def _map(member: int, said: _Introduction, peers: Peers) -> Neighbour | None:
    """Map a neighbour's segment and find my row in it."""
    if said.reason:
        return None
    try:
        segment = Segment.open(said.pid, said.fd, said.size)
    except OSError as error:
        said.reason = f"its memory cannot be mapped: {error}"
        return None
    segment.seal()
    if struct.unpack("<q", segment.map[:8])[0] != said.nonce:
        said.reason = "its process is not the one that it seems to be"
        return None
    row = rows_of(segment, peers.size)[peers.group_rank]
    return Neighbour(member, said.pid, segment, row, arena_of(segment, peers.size))


def _readable(said: _Introduction) -> bool:
    """Say whether the kernel lets this process read the neighbour's own memory."""
    if os.environ.get("LOOSESTEP_READ_MEMORY") == "0" or said.reason:
        return False
    probe = ctypes.c_int64()
    error = copy_from(said.pid, [(said.address, 8)], [(ctypes.addressof(probe), 8)])
    return not error and probe.value == said.nonce


def _log(peers: Peers, shared: SharedMemory, reasons: list[str]) -> None:
    near = [peers.global_ranks[member] for member in sorted(shared.neighbours)]
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


def host_key() -> str:
    """Return a text that is equal on the ranks of one host and different on others.

    Network namespaces count as hosts of their own: whoever puts ranks into them wants the
    traffic between them to be real.
    """
    return "/".join([socket.gethostname(), _boot_id(), _namespace("net"), _namespace("pid")])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"


def _namespace(kind: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return "-"
