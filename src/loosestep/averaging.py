"""Averaging named tensors in place: agree, cut into windows, pack, reduce, write back.

agree       all ranks mean the same tensors, schedule and step, or all raise
launch      a few windows at a time, so that memory stays bounded
advance     sum what has arrived, launch the way back
finish      write back; ``data_ptr``, strides and views are what they were
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from loosestep.binding import (
    Header,
    Named,
    Progress,
    Statement,
    agree,
    check_averageable,
    memory,
    same_shard,
    shard_key,
    state,
    unique,
)
from loosestep.flat import STAGING, WINDOW_BYTES, Window, pack, unpack, windows
from loosestep.groups import own_group, require_process_group, world_group
from loosestep.peers import Peers, Phase, peers_of
from loosestep.wire import Handle, Mean, Native, Reducer, Traffic
from loosestep.wire.native import First

DEPTH = 4  # windows on their way in each direction; more: better overlap, more memory
COUNTER_WINDOW_BYTES = 512 << 10  # counters are widened to 8 bytes on the way


@torch.no_grad()
def average_(
    tensors: Iterable[torch.Tensor] | Sequence[Named],
    group: dist.ProcessGroup | None = None,
    *,
    reducer: Reducer | None = None,
    weights: Sequence[float] | None = None,
    timeout: float | None = None,
) -> Traffic:
    """Replace every tensor by its mean over the ranks of ``group`` (default: the world), in place.

    ``weights`` gives one number a rank of the group, ``timeout`` seconds for every wait.

    Example::

        average_(model.parameters())
        average_(ema.values(), group, reducer=Cast(torch.bfloat16))
    """
    require_process_group()
    named = unique(with_names(tensors))
    process_group = world_group() if group is None else group
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only members may average")
    chosen = None if weights is None else tuple(map(float, weights))
    if chosen is not None and len(chosen) != dist.get_world_size(process_group):
        raise ValueError(
            f"give one weight a rank: got {len(chosen)} for "
            f"{dist.get_world_size(process_group)} ranks"
        )
    peers = peers_of(process_group, weights=chosen, timeout=timeout)
    return Averager(peers, reducer=reducer).average(named)


def with_names(tensors: Iterable[torch.Tensor] | Sequence[Named]) -> list[Named]:
    """Give every tensor that has no name its place as one."""
    return [
        item if isinstance(item, tuple) else (f"tensor {index}", item)
        for index, item in enumerate(tensors)
    ]


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed to average."""

    parts: list[Named]  # this rank's memory, ties once
    counters: tuple[Named, ...]
    shard_keys: dict[str, str]
    headers: list[Header]
    step: int


class Averager:
    """Averages tensors over one group, as often as asked.

    ``agreements`` are further lines that must be equal on all ranks, such as the schedule.
    ``subset`` makes the peers for some of the ranks; sharded tensors need it.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        reducer: Reducer | None = None,
        agreements: Sequence[str] = (),
        subset: Callable[[tuple[int, ...]], Peers] | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.peers = peers
        self._window_bytes = window_bytes
        self.reducer: Reducer = Mean() if reducer is None else reducer
        self._agreements = (*agreements, f"reducer {self.reducer!r}", f"weights {peers.weights}")
        self._subset = subset or (lambda ranks: _own_peers(peers, ranks))
        self._shards: dict[str, Peers] = {"": peers}

    def agree(
        self,
        named: Sequence[Named],
        counters: Sequence[Named] = (),
        progress: Progress | None = None,
    ) -> Agreed:
        """Compare what the ranks are about to average; all return or all raise.

        A rank whose tensors cannot be averaged says so to the others before it raises.
        """
        refusal: ValueError | TypeError | None = None
        parts: list[Named] = []
        try:
            check_averageable(named)
            parts = memory(named)
            statement = state([*_originals(parts, named), *counters], *self._agreements)
        except (ValueError, TypeError) as error:
            refusal = error
            statement = Statement((*self._agreements, f"an error: {error}"))
        at = Progress() if progress is None else progress
        peers = self.peers.during(Phase("agreeing what to average", step=at.step))
        headers = agree(peers, statement, at)
        if refusal is not None:
            raise refusal
        keys = {name: shard_key(tensor) for name, tensor in named}
        return Agreed(parts, tuple(counters), keys, headers, at.step)

    @torch.no_grad()
    def start(self, agreed: Agreed) -> Averaging:
        """Launch the mean of what was agreed, and the maximum of its counters."""
        largest = (agreed.counters, self.peers)
        return Averaging(self._jobs(agreed), self.reducer, largest=largest, step=agreed.step)

    def average(
        self, named: Sequence[Named], counters: Sequence[Named] = (), *, step: int = 0
    ) -> Traffic:
        """Agree, start and finish."""
        return self.start(self.agree(named, counters, Progress(step))).finish()

    @torch.no_grad()
    def broadcast(self, named: Sequence[Named]) -> Traffic:
        """Give every rank the first rank's values, in place; any dtype will do."""
        parts = memory(named)
        statement = state(_originals(parts, named), *self._agreements)
        headers = agree(self.peers.during(Phase("agreeing what to broadcast")), statement)
        keys = {name: shard_key(tensor) for name, tensor in named}
        return Averaging(self._jobs(Agreed(parts, (), keys, headers, 0)), First()).finish()

    def _jobs(self, agreed: Agreed) -> list[tuple[Window, Peers]]:
        by_shard: dict[str, list[Named]] = {}
        for name, local in agreed.parts:
            by_shard.setdefault(agreed.shard_keys[name], []).append((name, local))
        return [
            (window, self._peers_of_shard(key))
            for key, group in by_shard.items()
            for window in windows(group, self._window_bytes)
        ]

    def _peers_of_shard(self, key: str) -> Peers:
        """Return the ranks of this group that hold the same shard; the first call is collective."""
        if key not in self._shards:
            self._shards[key] = self._subset(same_shard(self.peers, key))
        return self._shards[key]


class Averaging:
    """A sync under way: a pipeline of windows, and the counters at its end."""

    def __init__(
        self,
        jobs: Sequence[tuple[Window, Peers]],
        reducer: Reducer,
        *,
        largest: tuple[Sequence[Named], Peers] | None = None,
        step: int | None = None,
    ) -> None:
        self._jobs = deque(jobs)
        self._reducer, self._largest, self._step = reducer, largest, step
        self._inbound: deque[tuple[Window, torch.Tensor, Handle]] = deque()
        self._outbound: deque[tuple[Window, torch.Tensor, Handle]] = deque()
        self.traffic = Traffic()
        while self._jobs and len(self._inbound) < DEPTH:
            self._launch()

    @torch.no_grad()
    def finish(self) -> Traffic:
        """Carry all windows through and write them back."""
        while self._inbound:
            sent = self._inbound.popleft()
            sent[2].advance()
            self._outbound.append(sent)
            if self._jobs:
                self._launch()
            if len(self._outbound) > DEPTH:
                self._write_back()
        while self._outbound:
            self._write_back()
        if self._largest is not None:
            self._take_largest(*self._largest)
        return self.traffic

    def _launch(self) -> None:
        window, peers = self._jobs.popleft()
        buffer = window.pieces[0].view.view(-1) if window.in_place else _stage(window)
        phase = Phase("averaging", window.name, self._step)
        handle = self._reducer.start(buffer, peers.during(phase), window.name)
        self._inbound.append((window, buffer, handle))

    def _write_back(self) -> None:
        window, buffer, handle = self._outbound.popleft()
        handle.wait()
        if not window.in_place:
            unpack(window, buffer)
            STAGING.give(buffer)
        self.traffic.add(handle.traffic)

    def _take_largest(self, counters: Sequence[Named], peers: Peers) -> None:
        for window in windows(counters, COUNTER_WINDOW_BYTES):
            carrier = torch.uint8 if window.dtype in (torch.bool, torch.uint8) else torch.int64
            carrier = torch.float64 if window.dtype.is_floating_point else carrier
            device = window.device if peers.size == 1 else peers.device_for(window.device)
            staging = torch.empty(window.numel, dtype=carrier, device=device)
            buffer = pack(window, staging)
            phase = Phase("taking the largest of", window.name, self._step)
            handle = Native(dist.ReduceOp.MAX).start(buffer, peers.during(phase), window.name)
            handle.wait()
            unpack(window, buffer)
            self.traffic.add(handle.traffic)


def _stage(window: Window) -> torch.Tensor:
    return pack(window, STAGING.take(window.numel, window.dtype, window.device))


def _originals(parts: Sequence[Named], named: Sequence[Named]) -> list[Named]:
    """Return the tensors that ``parts`` are the memory of: their shape is the global one."""
    kept = {name for name, _ in parts}
    return [(name, tensor) for name, tensor in named if name in kept]


def _own_peers(peers: Peers, ranks: tuple[int, ...]) -> Peers:
    """Return the peers among ``ranks``, with a process group made for them."""
    me = peers.global_ranks[peers.group_rank]
    weights = peers.weights
    if weights is not None:
        weights = tuple(weights[peers.global_ranks.index(rank)] for rank in ranks)
    group = own_group(ranks, peers.timeout)
    return Peers(group, ranks, ranks.index(me), peers.level, weights, peers.timeout)
