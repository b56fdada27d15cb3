"""Moving a slice from one rank to another: over the network, or straight out of its memory.

Between two ranks of one host a loopback connection copies every byte twice, through a socket.
Where the kernel lets one process read another (``process_vm_readv``), the receiver is told the
address instead and copies once. Both ways carry the same bytes in the same order, so the result
cannot depend on which was taken.

A transfer has two sides. ``offer`` makes a slice available to a peer; it must stay as it is until
``wait`` returns. ``accept`` returns an ``Incoming``, whose ``block`` gives parts of the slice.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import secrets
import sys
import weakref
from typing import Protocol

import torch
import torch.distributed as dist

from loosestep.peers import Message, Peers, Transfer
from loosestep.places import host_key

logger = logging.getLogger(__name__)


class Incoming(Protocol):
    """A slice on its way to this rank."""

    def wait(self) -> None:
        """Return when the slice can be read."""

    def read(self, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Return elements ``start:stop``; ``scratch`` may be used to hold them."""


class Received:
    """A slice that arrives by the network, in a buffer of its own."""

    def __init__(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        self._transfer = transfer
        self._buffer = buffer

    def wait(self) -> None:
        """Return when all of it is here."""
        self._transfer.wait()

    def read(self, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Return a view of what arrived."""
        return self._buffer[start:stop]


class Remote:
    """A slice in the memory of a process on this host; only its address arrives."""

    def __init__(self, transfer: Transfer, address: torch.Tensor, pid: int) -> None:
        self._transfer = transfer
        self._address = address
        self._pid = pid

    def wait(self) -> None:
        """Return when the address is here."""
        self._transfer.wait()

    def read(self, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Copy elements ``start:stop`` out of the other process."""
        part = scratch[: stop - start]
        size = part.element_size()
        error = copy_from(
            self._pid, int(self._address) + start * size, part.data_ptr(), (stop - start) * size
        )
        if error:
            raise self._transfer.peers.lost(self._transfer.peer, error)
        return part


class Links:
    """The ways from this rank to each member of a group."""

    def __init__(self, neighbour_pids: dict[int, int]) -> None:
        self.neighbour_pids = neighbour_pids  # group rank -> process id, where memory can be read

    def reads_memory(self, peer: int, device: torch.device) -> bool:
        """Say whether slices from and to ``peer`` go through memory."""
        return device.type == "cpu" and peer in self.neighbour_pids

    def offer(self, part: torch.Tensor, peer: int) -> Message:
        """Return the message that makes ``part`` available to ``peer``."""
        if self.reads_memory(peer, part.device):
            return Message(torch.tensor([part.data_ptr()]), peer, outgoing=True)
        return Message(part.view(torch.uint8), peer, outgoing=True)

    def expect(self, buffer: torch.Tensor | None, peer: int) -> Message:
        """Return the message that a slice from ``peer`` begins with."""
        if buffer is None:
            return Message(torch.zeros(1, dtype=torch.int64), peer, outgoing=False)
        return Message(buffer.view(torch.uint8), peer, outgoing=False)

    def incoming(
        self, transfer: Transfer, message: Message, buffer: torch.Tensor | None
    ) -> Incoming:
        """Return the slice that begins with ``message``."""
        if buffer is None:
            return Remote(transfer, message.tensor, self.neighbour_pids[transfer.peer])
        return Received(transfer, buffer)


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Links] = weakref.WeakKeyDictionary()


def links_of(peers: Peers) -> Links:
    """Return the group's links; the first call on a group finds them out, collectively."""
    if peers.process_group is None:
        return Links({})
    if peers.process_group not in _links:
        _links[peers.process_group] = _find_links(peers)
    return _links[peers.process_group]


def _find_links(peers: Peers) -> Links:
    """Try to read a random number out of every neighbour; both directions must work."""
    nonce = torch.tensor([secrets.randbits(62)])
    cards = [
        card.decode().split("|")
        for card in peers.exchange(
            f"{host_key()}|{os.getpid()}|{nonce.data_ptr()}|{int(nonce)}".encode()
        )
    ]
    mine = cards[peers.group_rank]
    readable = [
        p for p in peers.others if cards[p][0] == mine[0] and _can_read(*map(int, cards[p][1:]))
    ]
    answers = peers.exchange(",".join(map(str, readable)).encode())
    mutual = [p for p in readable if str(peers.group_rank) in answers[p].decode().split(",")]
    logger.info(
        "level %r: memory of ranks %s is read directly, %d other ranks by the network",
        peers.level,
        [peers.global_ranks[p] for p in mutual],
        len(peers.others) - len(mutual),
    )
    return Links({p: int(cards[p][1]) for p in mutual})


def _can_read(pid: int, address: int, expected: int) -> bool:
    probe = torch.zeros(1, dtype=torch.int64)
    return copy_from(pid, address, probe.data_ptr(), 8) == "" and int(probe) == expected


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _process_vm_readv() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux") or os.environ.get("LOOSESTEP_READ_MEMORY") == "0":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        vectors = ctypes.POINTER(_IoVec)
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, vectors, ctypes.c_ulong, vectors] + [ctypes.c_ulong] * 2
    return function


def copy_from(pid: int, address: int, into: int, size: int) -> str:
    """Copy ``size`` bytes at ``address`` of process ``pid``; return what went wrong, or ''."""
    function = _process_vm_readv()
    if function is None:
        return "reading other processes' memory is not available here"
    done = 0
    while done < size:
        local, remote = _IoVec(into + done, size - done), _IoVec(address + done, size - done)
        count = function(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count <= 0:
            return f"its memory could not be read: {os.strerror(ctypes.get_errno())}"
        done += count
    return ""
