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

from loosestep.binding import Header, Progress, Statement, agree, state
from loosestep.flat import STAGING, WINDOW_BYTES, Window, pack, unpack, windows
from loosestep.groups import own_subgroup, private_twin, require_process_group, world_group
from loosestep.peers import Peers, Phase, peers_of
from loosestep.replicas import fingerprints
from loosestep.tensors import (
    Holders,
    Named,
    check_averageable,
    holders_of,
    memory,
    shard_key,
    unique,
)
from loosestep.topology import check_weights
from loosestep.wire import Handle, Mean, Native, Reducer, Traffic, links
from loosestep.wire.native import First

BUDGET_BYTES = 12 << 20  # what they may take together, in each direction; one is always allowed
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
    process_group = private_twin(world_group(), timeout) if group is None else group
    if dist.get_rank(process_group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only members may average")
    ranks = tuple(dist.get_process_group_ranks(process_group))
    checked = check_weights(weights, ranks)
    chosen = None if checked is None else tuple(checked.values())
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
        self._shards: dict[str, tuple[Holders, Peers]] = {}
        self._bound = False  # whether the reducer has seen the tensors

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
            self._check_device(named[0][1].device)
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
        if self._bind(named):
            parts = memory(named)
        return Agreed(parts, tuple(counters), _shard_keys(named), headers, at.step)

    def _bind(self, named: Sequence[Named]) -> bool:
        """Show the tensors to the reducer once; return whether it may have moved them."""
        bind = getattr(self.reducer, "bind", None)
        if bind is None or self._bound:
            return False
        self._bound = True
        bind(named, self.peers)
        return True

    @torch.no_grad()
    def start(self, agreed: Agreed) -> Averaging:
        """Launch the mean of what was agreed, and the maximum of its counters."""
        self._check_shards(agreed)
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
        jobs = self._jobs(self._agree_on(named, "agreeing what to broadcast"))
        return Averaging(jobs, First()).finish()

    @torch.no_grad()
    def compare(self, named: Sequence[Named]) -> None:
        """Raise ``RankMismatch`` on every rank unless all hold the same values."""
        phase = Phase("comparing replicas")
        for key, group in _by_shard(self._agree_on(named, "agreeing what to compare")).items():
            _, peers = self._shard(key)
            agree(peers.during(phase), Statement(tuple(fingerprints(group))))

    def _agree_on(self, named: Sequence[Named], verb: str) -> Agreed:
        """Compare names, shapes and dtypes, whatever they are."""
        parts = memory(named)
        statement = state(_originals(parts, named), *self._agreements)
        headers = agree(self.peers.during(Phase(verb)), statement)
        return Agreed(parts, (), _shard_keys(named), headers, 0)

    def _check_device(self, device: torch.device) -> None:
        if self.peers.size > 1 and self.peers.device_for(device) != device:
            raise ValueError(
                f"the process group cannot move tensors on {device}; give one whose backend can, "
                "such as init_process_group('cpu:gloo,cuda:nccl')"
            )

    def _check_shards(self, agreed: Agreed) -> None:
        for key in _by_shard(agreed):
            holders, _ = self._shard(key)
            if key and not holders.can_average:
                raise ValueError(
                    f"level {self.peers.level!r} (ranks {list(self.peers.global_ranks)}) must hold "
                    f"every shard on several ranks, got {holders.by_shard}; a level inside the "
                    "shard mesh cannot average: choose one that spans whole meshes"
                )

    def _jobs(self, agreed: Agreed) -> list[tuple[Window, Peers]]:
        jobs: list[tuple[Window, Peers]] = []
        for key, group in _by_shard(agreed).items():
            peers = self._shard(key)[1]
            size = min(self._window_bytes, links.window_bytes(peers))
            jobs += [(window, peers) for window in windows(group, size)]
        return jobs

    def _shard(self, key: str) -> tuple[Holders, Peers]:
        """Return who of this group holds the same shard; the first call is collective."""
        if key == "":
            whole = self.peers.global_ranks
            return Holders({"": whole}, whole), self.peers
        if key not in self._shards:
            holders = holders_of(self.peers, key)
            self._shards[key] = (holders, self._subset(holders.mine))
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
        self._depth = min((links.depth(peers) for _, peers in jobs), default=1)
        self._reducer, self._largest, self._step = reducer, largest, step
        self._inbound: deque[tuple[Window, torch.Tensor, Handle]] = deque()
        self._outbound: deque[tuple[Window, torch.Tensor, Handle]] = deque()
        self.traffic = Traffic()
        self._launch_some()

    @torch.no_grad()
    def finish(self) -> Traffic:
        """Carry all windows through and write them back."""
        while self._inbound:
            sent = self._inbound.popleft()
            sent[2].advance()
            self._outbound.append(sent)
            self._launch_some()
            while len(self._outbound) > self._depth or self._staged_bytes > BUDGET_BYTES:
                self._write_back()
        while self._outbound:
            self._write_back()
        if self._largest is not None:
            self._take_largest(*self._largest)
        return self.traffic

    def _launch_some(self) -> None:
        while self._jobs and len(self._inbound) < self._depth:
            held = sum(_staged(w) + handle.bytes_held for w, _, handle in self._inbound)
            if self._inbound and held >= BUDGET_BYTES:
                return
            self._launch()

    @property
    def _staged_bytes(self) -> int:
        return sum(_staged(window) for window, _, _ in self._outbound)

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


def _staged(window: Window) -> int:
    """Return how much memory the window's copy takes."""
    return 0 if window.in_place else window.numel * window.dtype.itemsize


def _stage(window: Window) -> torch.Tensor:
    return pack(window, STAGING.take(window.numel, window.dtype, window.device))


def _shard_keys(named: Sequence[Named]) -> dict[str, str]:
    return {name: shard_key(tensor) for name, tensor in named}


def _by_shard(agreed: Agreed) -> dict[str, list[Named]]:
    """Group the parts by the shard that this rank holds of them; empty parts count."""
    groups: dict[str, list[Named]] = {}
    for name, local in agreed.parts:
        groups.setdefault(agreed.shard_keys[name], []).append((name, local))
    return groups


def _originals(parts: Sequence[Named], named: Sequence[Named]) -> list[Named]:
    """Return the tensors that ``parts`` are the memory of: their shape is the global one."""
    kept = {name for name, _ in parts}
    return [(name, tensor) for name, tensor in named if name in kept]


def _own_peers(peers: Peers, ranks: tuple[int, ...]) -> Peers:
    """Return the peers among ``ranks``, with a process group made for them once."""
    me = peers.global_ranks[peers.group_rank]
    weights = peers.weights
    if weights is not None:
        weights = tuple(weights[peers.global_ranks.index(rank)] for rank in ranks)
    group = own_subgroup(peers.process_group, ranks, peers.timeout)
    return Peers(group, ranks, ranks.index(me), peers.level, weights, peers.timeout)
