"""Averages that travel while training goes on.

    launch at step t      snapshot = p, and a thread of its own takes the mean of all snapshots
    land at step t + tau  p += mean - snapshot

so that no step taken in between is lost: computation and communication decoupled SGD,
https://arxiv.org/abs/1906.12043. The training thread stands still for one copy at launch and one
sum at landing. A snapshot and a mean are kept in memory beside the model (``Overlap.nbytes``).

[Note: order of messages] The ranks agree and average on that thread, over process groups that
nothing else uses meanwhile ([Note: threads and groups] in ``comm/group.py``); all of them launch in
the same order, one at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loosestep.comm.agreement import Progress
from loosestep.comm.flat import WINDOW_BYTES
from loosestep.comm.peers import Peers
from loosestep.comm.tensors import Named, each_once, memory
from loosestep.errors import PeerLost
from loosestep.sync.averager import Averager
from loosestep.sync.parts import Parts, always_exact
from loosestep.telemetry.traffic import Traffic

LINGER_SECONDS = 2.0  # for a mean that nobody wants any more, before its connections are cut
ALONE_SECONDS = 600.0  # for one that needs nobody else


class Overlap:
    """At most one mean under way, applied ``steps`` steps after its launch."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.flight: Flight | None = None  # what is under way
        self._snapshots, self._means = Copies(), Copies()

    @property
    def nbytes(self) -> int:
        """How much memory the snapshot and the mean take."""
        return self._snapshots.nbytes + self._means.nbytes

    def due(self, step: int) -> bool:
        """Say whether a mean is to be applied after ``step`` steps."""
        return self.flight is not None and step - self.flight.step >= self.steps

    def prepare(self, averager: Averager, parts: Parts) -> None:
        """Take the memory now: new pages are slow when they are first written."""
        named = each_once(parts.everything)
        mine, means = averager.share(memory(named)), self._means.of(named)
        snapshots = self._snapshots.of(mine)
        for _, tensor in [*snapshots, *memory(means)]:
            tensor.zero_()

    @torch.no_grad()
    def launch(self, averager: Averager, parts: Parts, step: int, level: str) -> None:
        """Copy the parts and start to average the copy; nothing else may be under way."""
        assert self.flight is None, "one at a time"
        began = time.perf_counter()
        named = each_once(parts.everything)
        mine, means = averager.share(memory(named)), self._means.of(named)
        snapshots = self._snapshots.of(mine)
        _copy_(snapshots, mine)
        flight = self.flight = Flight(step, level, memory(means), peers=averager.peers)
        progress = Progress(step, sample=averager.sample(memory(parts.means), step))
        copies = parts.replaced(dict(means))
        flight.take_off(lambda: _travel(averager, copies, progress, snapshots, means, flight))
        flight.seconds_waited = time.perf_counter() - began

    def finish(self) -> None:
        """Wait until nothing is under way; what has come is not applied."""
        if self.flight is not None:
            try:
                self.flight.wait()
            except BaseException:
                if not self.flight.flying:  # else it still uses its process group
                    self.flight = None
                raise

    @torch.no_grad()
    def land(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Flight | None:
        """Wait for what is under way, add it to the tensors, and return it; None: there is none.

        Tensors are found by name, since a module may have new ones for its buffers by now. Those
        that were not launched stay as they are.
        """
        self.finish()
        flight, self.flight = self.flight, None
        if flight is not None:
            began = time.perf_counter()
            add_(*_matched(flight, tensors()))
            flight.seconds_waited += time.perf_counter() - began
        return flight

    def discard(self) -> None:
        """Drop what is under way, once it no longer uses its process group."""
        flight, self.flight = self.flight, None
        if flight is not None:
            with contextlib.suppress(Exception):  # the next launch fails too, if the group did
                flight.wait()
            flight.abandon()

    def close(self) -> None:
        """Drop what is under way within a few seconds, and all memory."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.abandon()
        self._snapshots, self._means = Copies(), Copies()

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way and return it, not yet applied."""
        self.finish()
        flight = self.flight or Flight(-1, "", [])
        differences = {name: tensor.clone() for name, tensor in flight.differences}
        return {
            "step": flight.step,
            "level": flight.level,
            "num_tensors": len(differences),
            "differences": differences,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Drop what is under way and take back what was saved."""
        self.discard()
        differences = dict(state_dict.get("differences", {}))
        if len(differences) != state_dict.get("num_tensors", 0):
            raise ValueError(
                f"the checkpoint was taken with an average of {state_dict['num_tensors']} tensors "
                f"under way and holds {len(differences)} of them; distributed checkpoints load "
                "only what the new run has too: save state_dict() with torch.save, or after the "
                "average has landed"
            )
        if state_dict.get("step", -1) >= 0:
            held = [(name, tensor.clone()) for name, tensor in differences.items()]
            self.flight = Flight(state_dict["step"], state_dict["level"], held)


@dataclass
class Flight:
    """A mean on its way, or one that has come and is not applied yet."""

    step: int
    level: str
    differences: list[Named]  # mean - snapshot of this rank's memory, once it has come
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0  # from launch until it had come
    seconds_waited: float = 0.0  # how long training stood still for it
    peers: Peers | None = None  # with whom; None: it has come
    _thread: threading.Thread | None = None
    _errors: list[BaseException] = field(default_factory=list)

    def take_off(self, travel: Callable[[], Traffic]) -> None:
        """Let a thread of its own carry the mean; ``travel`` leaves it in ``differences``."""
        began = time.perf_counter()

        def run() -> None:
            try:
                self.traffic = travel()
            except BaseException as error:  # raised again by wait, where somebody listens
                self._errors.append(error)
            self.seconds = time.perf_counter() - began

        self._thread = threading.Thread(target=run, name="loosestep overlap", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the mean has come; raise what went wrong on the way."""
        if self._thread is None:
            return
        began, limit = time.perf_counter(), self._limit()
        self._thread.join(limit)
        self.seconds_waited += time.perf_counter() - began
        if self.flying:
            raise PeerLost(
                f"the average that was launched at step {self.step} on level {self.level!r} has "
                f"not come within {limit:g} s. Parameters are as they were before it",
                phase="waiting for an average under way",
            )
        self._thread = self.peers = None
        if self._errors:
            raise self._errors.pop()

    @property
    def flying(self) -> bool:
        """Whether its thread still runs."""
        return self._thread is not None and self._thread.is_alive()

    def abandon(self) -> None:
        """Let it end soon, whatever becomes of it: its own time-outs end it in any case."""
        if self._thread is not None:
            self._thread.join(LINGER_SECONDS)
            if self.flying and self.peers is not None:
                self.peers.give_up("an average under way was given up")
                self._thread.join(LINGER_SECONDS)

    def _limit(self) -> float:
        """Return how long all waits on the way may take, should each just not time out."""
        if self.peers is None or self.peers.size == 1:
            return ALONE_SECONDS
        num_bytes = sum(tensor.nbytes for _, tensor in self.differences)
        num_windows = len(self.differences) + num_bytes // WINDOW_BYTES
        return self.peers.seconds * (4 + num_windows)


class Copies:
    """Memory for copies of tensors, used again from one flight to the next."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return sum(tensor.nbytes for _, tensor in memory(list(self._held.items())))

    def of(self, named: Sequence[Named]) -> list[Named]:
        """Return tensors that are laid out as ``named`` are, with any content."""
        held: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            old = self._held.get(name)
            fits = old is not None and _layout(old) == _layout(tensor)
            held[name] = old if fits and old is not None else torch.empty_like(tensor.detach())
        self._held = held
        return list(held.items())


@torch.no_grad()
def _travel(
    averager: Averager,
    copies: Parts,
    progress: Progress,
    snapshots: list[Named],
    means: list[Named],
    flight: Flight,
) -> Traffic:
    """Average the snapshots into copies, and leave how far the two are apart.

    ``snapshots`` are of what this rank averages itself, ``means`` all copies. This is what the
    thread of a flight does.
    """
    with _beside(means[0][1].device if means else torch.device("cpu")):
        _copy_(averager.share(memory(means)), snapshots)
        traffic = averager.start(averager.agree(copies, progress), hand_round=False).finish()
        flight.differences = memory(means)  # again: a reducer may have moved them
        finite: list[tuple[torch.Tensor, torch.Tensor]] = []
        other: list[tuple[torch.Tensor, torch.Tensor]] = []
        mine = averager.share(flight.differences)
        for (name, mean), (_, snapshot) in zip(mine, snapshots, strict=True):
            # What was found finite on the way is not looked at again.
            known = averager.only_finite and not always_exact(name)
            (finite if known else other).append((mean, snapshot))
        if finite:
            torch._foreach_sub_([mean for mean, _ in finite], [old for _, old in finite])
        differ_([mean for mean, _ in other], [old for _, old in other])
        traffic.add(averager.hand_round(flight.differences, flight.step))
    return traffic


def differ_(means: Sequence[torch.Tensor], snapshots: Sequence[torch.Tensor]) -> None:
    """Replace means by how far they are from the snapshots.

    >>> means = [torch.tensor([2.0, 3.0])]
    >>> differ_(means, [torch.tensor([2.0, 1.0])])
    >>> means
    [tensor([0., 2.])]
    """
    for mean, snapshot in zip(means, snapshots, strict=True):
        if mean.dtype == torch.bool:
            mean.logical_xor_(snapshot)
        elif not mean.is_floating_point() or snapshot.sum().isfinite():
            mean.sub_(snapshot)
        else:  # equal values differ by nothing, also where they are infinite
            same = mean == snapshot
            mean.sub_(snapshot).masked_fill_(same, 0.0)


def add_(tensors: Sequence[torch.Tensor], differences: Sequence[torch.Tensor]) -> None:
    """Add what ``differ_`` made."""
    pairs = list(zip(tensors, differences, strict=True))
    numbers = [pair for pair in pairs if pair[0].dtype != torch.bool]
    if numbers:
        torch._foreach_add_([tensor for tensor, _ in numbers], [by for _, by in numbers])
    for tensor, flipped in pairs:
        if tensor.dtype == torch.bool:
            tensor.logical_xor_(flipped)


def _matched(
    flight: Flight, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return this rank's memory of what was launched, and its differences."""
    missing = [name for name, _ in flight.differences if name not in tensors]
    found = dict(memory([(n, tensors[n]) for n, _ in flight.differences if n in tensors]))
    for name, difference in flight.differences:
        if name in found and found[name].shape != difference.shape:
            missing.append(f"{name} of shape {tuple(difference.shape)}")
    if missing:
        raise ValueError(
            f"the average launched at step {flight.step} holds {missing[:3]} ({len(missing)} in "
            "all), which the model no longer has; change it when no average is under way"
        )
    by_name = {name: d for name, d in flight.differences if name in found}
    return list(found.values()), [by_name[n].to(t.device) for n, t in found.items()]


def _copy_(into: Sequence[Named], source: Sequence[Named]) -> None:
    if into:
        torch._foreach_copy_([tensor for _, tensor in into], [tensor for _, tensor in source])


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    placements = getattr(tensor, "placements", None)  # of a DTensor
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), placements


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run kernels on a stream of their own, where there are streams, and wait for them."""
    if device.type == "cpu":
        yield
        return
    torch.accelerator.synchronize(device)  # the snapshot may still be on its way
    stream = torch.Stream(device)
    with stream:
        yield
    stream.synchronize()
