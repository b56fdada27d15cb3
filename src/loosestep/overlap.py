"""Averages that travel while training goes on.

    launch at step t      snapshot = p, and a thread of its own takes the mean of all snapshots
    land at step t + tau  p += mean - snapshot

so that no step taken in between is lost: computation and communication decoupled SGD,
https://arxiv.org/abs/1906.12043. The training thread stands still for one copy at launch and one
sum at landing. A snapshot and a mean are kept in memory beside the model (``Overlap.nbytes``).

[Note: order of messages] The ranks agree and average on that thread, over process groups that
nothing else uses meanwhile; all of them launch in the same order, one at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loosestep.averaging import Averager
from loosestep.binding import Progress
from loosestep.flight import Flight
from loosestep.policies import OptimizerState, Parts, always_exact
from loosestep.tensors import Named, memory
from loosestep.wire import NonFinite, Reducer, Resident, Traffic


class Overlap:
    """At most one mean under way, applied ``steps`` steps after its launch."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._flight: Flight | None = None
        self._snapshots, self._means = Copies(), Copies()

    @property
    def nbytes(self) -> int:
        """How much memory the snapshot and the mean take."""
        return self._snapshots.nbytes + self._means.nbytes

    def describe(self) -> list[str]:
        """Return what must be equal on all ranks, as lines; none where nothing overlaps."""
        return [f"applied {self.steps} steps after its launch"] if self.steps else []

    def due(self, step: int) -> bool:
        """Say whether a mean is to be applied after ``step`` steps."""
        return self._flight is not None and step - self._flight.step >= self.steps

    def prepare(self, averager: Averager, parts: Parts) -> None:
        """Take the memory now: new pages are slow when they are first written."""
        named = _each_once(parts.everything)
        snapshots, means = self._snapshots.of(averager.work.mine(named)), self._means.of(named)
        for _, tensor in [*snapshots, *memory(means)]:
            tensor.zero_()

    @torch.no_grad()
    def launch(self, averager: Averager, parts: Parts, step: int, level: str) -> None:
        """Copy the parts and start to average the copy; nothing else may be under way."""
        assert self._flight is None, "one at a time"
        began = time.perf_counter()
        named = _each_once(parts.everything)
        mine, means = averager.work.mine(named), self._means.of(named)
        snapshots = self._snapshots.of(mine)
        _copy_(snapshots, mine)
        flight = self._flight = Flight(step, level, memory(means), peers=averager.peers)
        progress = Progress(step, sample=averager.work.sample(parts.means, step))
        cargo = parts.replaced(dict(means))
        flight.take_off(_Trip(averager, cargo, progress, snapshots, means, flight))
        flight.seconds_waited = time.perf_counter() - began

    def finish(self) -> None:
        """Wait until nothing is under way; what has come is not applied."""
        if self._flight is not None:
            try:
                self._flight.wait()
            except BaseException:
                if not self._flight.flying:  # else it still uses its process group
                    self._flight = None
                raise

    @torch.no_grad()
    def land(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> Flight | None:
        """Wait for what is under way, add it to the tensors, and return it; None: there is none.

        Tensors are found by name, since a module may have new ones for its buffers by now. Those
        that were not launched stay as they are.
        """
        self.finish()
        flight, self._flight = self._flight, None
        if flight is not None:
            began = time.perf_counter()
            add_(*_matched(flight, tensors()))
            flight.seconds_waited += time.perf_counter() - began
        return flight

    def discard(self) -> None:
        """Drop what is under way, once it no longer uses its process group."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with contextlib.suppress(Exception):  # the next launch fails too, if the group did
                flight.wait()
            flight.abandon()

    def close(self) -> None:
        """Drop what is under way within a few seconds, and all memory."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon()
        self._snapshots, self._means = Copies(), Copies()

    def state_dict(self) -> dict[str, Any]:
        """Wait for what is under way and return it, not yet applied."""
        self.finish()
        flight = self._flight or Flight(-1, "", [])
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
            self._flight = Flight(state_dict["step"], state_dict["level"], held)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of: no thread."""
        return {"steps": self.steps, "flight": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take back what has come."""
        self.__init__(state["steps"])  # type: ignore[misc]
        self.load_state_dict(state["flight"])


@dataclass(frozen=True)
class _Trip:
    """What the thread of a flight does."""

    averager: Averager
    cargo: Parts  # the means, still to be averaged
    progress: Progress
    snapshots: list[Named]  # of what this rank averages itself
    means: list[Named]
    flight: Flight

    @torch.no_grad()
    def __call__(self) -> Traffic:
        """Average the snapshots, and leave how far they were from the mean."""
        device = self.means[0][1].device if self.means else torch.device("cpu")
        with _beside(device):
            _copy_(self.averager.work.mine(self.means), self.snapshots)
            traffic = self.averager.average_share(self.cargo, self.progress)
            self.flight.differences = memory(self.means)  # again: a reducer may have moved them
            self._differ()
            traffic.add(self.averager.work.hand_round(self.means, self.flight.step))
        return traffic

    def _differ(self) -> None:
        """Leave the differences; what was found finite on the way is not looked at again."""
        finite: list[tuple[torch.Tensor, torch.Tensor]] = []
        other: list[tuple[torch.Tensor, torch.Tensor]] = []
        mine = self.averager.work.mine(self.means)
        for (name, mean), (_, snapshot) in zip(mine, self.snapshots, strict=True):
            known = self.averager.only_finite and not always_exact(name)
            (finite if known else other).append((mean, snapshot))
        if finite:
            torch._foreach_sub_([mean for mean, _ in finite], [old for _, old in finite])
        differ_([mean for mean, _ in other], [old for _, old in other])


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


def check_can_overlap(
    overlap_steps: int, reducer: Reducer | None, state: OptimizerState = OptimizerState.KEEP
) -> None:
    """Raise where differences to a snapshot, applied later, would not do what was asked for."""
    if not overlap_steps:
        return
    if state is OptimizerState.AVERAGE:
        raise ValueError(
            f"overlap_steps={overlap_steps} adds a difference that is some steps old, which can "
            "bring Adam's second moments below zero, so optimizer_state cannot be 'average'; "
            "use 'keep' or 'reset', or overlap_steps=0"
        )
    if getattr(reducer, "on_nonfinite", None) is NonFinite.SKIP:
        raise ValueError(
            f"overlap_steps={overlap_steps} adds a difference, and a rank that {reducer} skipped "
            "holds NaN, to which nothing can be added; use on_nonfinite='raise', or "
            "overlap_steps=0"
        )
    if isinstance(reducer, Resident):
        raise ValueError(
            f"overlap_steps={overlap_steps} averages copies of the parameters and not those that "
            f"{reducer} moves into shared memory; use TwoLevel() or Mean(), or overlap_steps=0"
        )


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


def _each_once(named: Sequence[Named]) -> list[Named]:
    """Drop all but one of those that share memory."""
    kept = {name for name, _ in memory(named)}
    return [(name, tensor) for name, tensor in named if name in kept]


def _copy_(into: Sequence[Named], source: Sequence[Named]) -> None:
    if into:
        torch._foreach_copy_(_tensors(into), _tensors(source))


def _tensors(named: Sequence[Named]) -> list[torch.Tensor]:
    return [tensor for _, tensor in named]


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
