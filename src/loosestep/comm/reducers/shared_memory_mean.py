"""Parameters or gradients that live in shared memory, so that averaging them copies nothing.

The storage of every parameter is moved once, when an averager is bound: one segment a rank, which
all neighbours map. At a sync each rank sums its slice straight out of everybody's parameters and
writes the mean to all of them. Addresses are stable afterwards; what pointed to the old storage
(a view that was taken before) does not follow. Gradients get rooms of their own (``room``).
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loosestep.comm import native
from loosestep.comm.flat.cuts import following, round_up
from loosestep.comm.peers import Peers, Phase
from loosestep.comm.reducers.mean import Mean
from loosestep.comm.reducers.reducer import NOTHING
from loosestep.comm.sharded_types import is_dtensor
from loosestep.comm.tensors import Named
from loosestep.comm.transport.segments import Segment
from loosestep.comm.transport.shared_memory import Home, SharedMemory
from loosestep.errors import NotAttachable

logger = logging.getLogger(__name__)

_segments: weakref.WeakSet[Segment] = weakref.WeakSet()

ALIGNMENT = 64  # bytes: what a vector unit likes
LARGE = 64 << 10  # bytes from which going past the caches pays
NO_MEMORY = "no shared memory to be had: {}"


@dataclass(frozen=True)
class SharedMemoryMean(Mean):
    """The exact mean of tensors that are moved into shared memory.

    The results are those of ``Mean`` to the bit. For tensors on the CPU whose ranks share hosts
    (other hosts are reached by the network, as ever); in a group where nobody is near it is
    refused, so that nobody waits for a speed that is not there.

    As ``reducer`` it moves parameters: attach before anything takes views of them or captures
    their addresses. As ``gradient_reducer`` it moves the gradients of a plain module: after a
    backward ``param.grad`` is a view of memory that the next backward writes again, so clone what
    has to outlive it, and leave it alone until backward returns: neighbours write to it. (A DDP
    module's buckets are DDP's own, and are copied.)

    Example::

        attach(model, optimizer, post_local_sgd(period=8, gradient_reducer=SharedMemoryMean()))
    """

    @property
    def resident(self) -> bool:
        """Whether gradients are to live in shared memory."""
        return True

    def init(self, tensors: Sequence[Named], peers: Peers) -> Any:
        """Move the parameters among ``tensors`` into memory that the group shares; collective."""
        if peers.size > 1:
            _move_in(peers, [t for _, t in tensors if isinstance(t, torch.nn.Parameter)])
        return NOTHING

    def room(
        self, size: int, devices: Sequence[torch.device], groups: Sequence[Peers]
    ) -> torch.Tensor | None:
        """Return memory of mine for gradients, which the neighbours in all these groups see."""
        return room(size, devices, groups)


def room(
    size: int, devices: Sequence[torch.device], groups: Sequence[Peers]
) -> torch.Tensor | None:
    """Return memory of mine for gradients, which the neighbours in all these groups see.

    A collective call of every group; where one member cannot, all of it raise. None: there is
    nobody else in any of them.
    """
    segment: Segment | None = None
    strange = next((device for device in devices if device.type != "cpu"), None)
    # The widest first: where a host cannot, all hear of it.
    for peers in sorted(groups, key=lambda group: -group.size):
        if peers.size == 1:
            continue
        shared = peers.shared_memory
        refusal = _out_of_reach(shared, peers)
        if strange is not None:
            refusal = f"they must be on the CPU, got {strange}"
        if segment is None and not refusal:
            try:
                segment = Segment.create(size)
            except OSError as error:
                refusal = NO_MEMORY.format(error)
        _introduce("gradients", shared, segment, refusal, peers)
    return None if segment is None else segment.bytes()


def _move_in(peers: Peers, tensors: Sequence[torch.Tensor]) -> None:
    """Move parameters, unless no rank has any: gradients get their rooms later."""
    if not any(map(any, peers.exchange_fixed(bytes([bool(tensors)])))):
        return
    shared = peers.shared_memory
    refusal, segment = _out_of_reach(shared, peers) or _immovable(tensors), None
    if tensors and not refusal:
        try:
            segment = _home_of(tensors) or _move(tensors)
        except OSError as error:
            refusal = NO_MEMORY.format(error)
    _introduce("parameters", shared, segment, refusal, peers)


def move_in(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to where they live from now on, which is not read again soon."""
    alike = values.dtype == place.dtype and values.device == place.device and values.is_contiguous()
    loops = native.loops() if alike and values.nbytes >= LARGE else None
    if loops is None or place.device.type != "cpu":
        place.copy_(values)
        return
    loops.copy_home(place.data_ptr(), values.data_ptr(), values.nbytes)


def _out_of_reach(shared: SharedMemory, peers: Peers) -> str:
    """Return why memory would be of no use on this level, or ''."""
    host = next(members for members in peers.hosts if peers.group_rank in members)
    missing = [peers.global_ranks[m] for m in host if m not in shared.neighbours]
    missing.remove(peers.global_ranks[peers.group_rank])
    if missing or not shared.any_neighbours:
        return f"ranks {missing or 'of other hosts'} are not reached through shared memory"
    return ""


def _immovable(tensors: Sequence[torch.Tensor]) -> str:
    """Return why these parameters cannot be resident, or ''."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return f"they must be on the CPU, got {tensors[0].device}"
    if any(is_dtensor(tensor) for tensor in tensors):
        return "they must be whole, and these are DTensors"
    return ""


def _home_of(tensors: Sequence[torch.Tensor]) -> Segment | None:
    """Return the segment in which all of these live already, because of another level."""
    for segment in _segments:
        start = segment.bytes().data_ptr()
        if all(start <= t.data_ptr() < start + segment.size for t in tensors):
            return segment
    return None


def _move(tensors: Sequence[torch.Tensor]) -> Segment:
    """Give the tensors' storages, each once, a place in a new segment."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    sizes = [round_up(storage.nbytes(), ALIGNMENT) for storage in storages.values()]
    places = dict(zip(storages, (start for start, _ in following(sizes)), strict=True))
    segment = Segment.create(sum(sizes))
    memory = segment.bytes()
    for address, storage in storages.items():
        old = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory[places[address] :][: old.numel()].copy_(old)
    for tensor in tensors:
        place = places[tensor.untyped_storage().data_ptr()]
        # Ties survive: all that shared a storage share the new one.
        tensor.data = _placed(tensor, memory, place)
    _segments.add(segment)
    return segment


def _placed(like: torch.Tensor, memory: torch.Tensor, place: int) -> torch.Tensor:
    offset = place // like.element_size() + like.storage_offset()
    new = torch.empty(0, dtype=like.dtype)
    return new.set_(memory.untyped_storage(), offset, like.shape, like.stride())


def _introduce(
    what: str, shared: SharedMemory, segment: Segment | None, refusal: str, peers: Peers
) -> None:
    """Let the neighbours map my segment and map theirs; raise on all where one cannot."""
    peers = peers.during(Phase(f"sharing resident {what}"))
    key = len(shared.homes) + 1
    fd, size = (-1, 0) if segment is None else (segment.fd, segment.size)
    told = [json.loads(p) for p in peers.exchange(json.dumps([refusal, fd, size]).encode())]
    for member, neighbour in shared.neighbours.items():
        said, fd, size = told[member]
        if not said and not refusal and size:
            refusal = _open(neighbour.opened, key, neighbour.pid, fd, size)
    reasons = [json.loads(payload) for payload in peers.exchange(json.dumps(refusal).encode())]
    for rank, reason in zip(peers.global_ranks, reasons, strict=True):
        if reason:
            raise NotAttachable(
                f"{what} cannot be resident on level {peers.level!r} (ranks "
                f"{list(peers.global_ranks)}): rank {rank}: {reason}; use Mean(), which "
                "copies (on a command line: the wire exact)"
            )
    if segment is not None:
        shared.homes.append(Home(segment.bytes().data_ptr(), segment.size, key, segment))
    logger.info("level %r: %s are resident in shared memory", peers.level, what)


def _open(opened: dict[int, torch.Tensor], key: int, pid: int, fd: int, size: int) -> str:
    try:
        segment = Segment.open(pid, fd, size)
    except OSError as error:
        return f"its memory cannot be mapped: {error}"
    segment.seal()
    opened[key] = segment.bytes()
    return ""
