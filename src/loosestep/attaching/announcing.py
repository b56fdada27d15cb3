"""What attaching will do, in one line of the log; and a warning where it can do no good."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.reducers import Native, Reducer
from loosestep.errors import warn_once
from loosestep.strategy.schedules import STEPS_LOOKED_AT, Schedule, next_sync
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology

logger = logging.getLogger(__name__)


def announce(strategy: Strategy, topology: Topology, model: torch.nn.Module, kept: int) -> None:
    """Say what will happen; by the first rank alone, since it is the same on all.

    ``kept`` are the bytes that averages keep beside the model.
    """
    if dist.get_rank() != topology.ranks[0]:
        return
    if logger.isEnabledFor(logging.INFO):  # it asks the schedule about thousands of steps
        logger.info("%s", describe(strategy, topology, model, kept))
    if reason := _saves_nothing(strategy, topology):
        warn_once("saves nothing", reason)


def describe(strategy: Strategy, topology: Topology, model: torch.nn.Module, kept: int) -> str:
    """Return levels, gradients, averages, bytes and memory as one line."""
    trained = [p for p in model.parameters() if p.requires_grad]
    extra = kept + _bytes_of_gradients(strategy, model, trained)
    return "; ".join(
        [
            f"attached: {topology}",
            _gradients(strategy, topology, trained),
            _averages(strategy, topology, trained),
            f"some {_size(extra)} of memory beside model, gradients and optimizer",
        ]
    )


def _bytes_of_gradients(
    strategy: Strategy, model: torch.nn.Module, trained: Sequence[torch.Tensor]
) -> int:
    """Return what sharing gradients takes: copies in buckets, which DDP has of its own anyway."""
    if not strategy.schedule.gradient_levels():
        return 0
    own = not isinstance(model, DistributedDataParallel) and strategy.sharding is None
    remembers = strategy.gradient_reducer is not None and strategy.gradient_reducer.remembers
    kept = sum(4 * p.numel() for p in trained) if remembers else 0
    return kept + (sum(p.nbytes for p in trained) if own else 0)


def _gradients(strategy: Strategy, topology: Topology, trained: Sequence[torch.Tensor]) -> str:
    phases = list(_phases(strategy.schedule))
    if len(phases) > 3:
        return f"gradients as {strategy.schedule} says"
    reducer = strategy.gradient_reducer or Native()
    told = []
    for start, level in phases:
        since = "" if len(phases) == 1 else f"from step {start} on "
        sent = "" if level is None else _bytes(reducer, topology, level, trained, "step")
        told.append(f"{since}{'local' if level is None else f'over {level!r}'}{sent}")
    return f"gradients {', '.join(told)}"


def _phases(schedule: Schedule) -> Iterable[tuple[int, str | None]]:
    """Return from which step on which level shares gradients, as far as one looks."""
    first = (next_sync(schedule, 0) or (0, ""))[0]
    steps = sorted({*range(STEPS_LOOKED_AT), *range(first, first + STEPS_LOOKED_AT)})
    for level, run in itertools.groupby(steps, lambda step: schedule(step).gradients):
        yield next(run), level


def _averages(strategy: Strategy, topology: Topology, trained: Sequence[torch.Tensor]) -> str:
    schedule, told = strategy.schedule, []
    for level in topology.levels:
        if level not in schedule.parameter_levels():
            continue
        first = next_sync(schedule, 0, level)
        second = None if first is None else next_sync(schedule, first[0], level)
        if first is None:
            continue
        often = "" if second is None else f" every {second[0] - first[0]} steps"
        size = _bytes(strategy.reducer, topology, level, trained, "sync")
        told.append(f"{level!r}{often} (first after {first[0]}){size}")
    late = f", applied {strategy.overlap_steps} steps later" if strategy.overlap_steps else ""
    return f"parameters averaged over {', '.join(told)}{late}" if told else "no averages"


def _bytes(
    reducer: Reducer, topology: Topology, level: str, trained: Sequence[torch.Tensor], unit: str
) -> str:
    """Return what a rank sends on a level, where that is known before the ranks have met."""
    size = len(topology.members(level))
    if size == 1:
        return " (alone there)"
    try:
        sent = sum(reducer.bytes_on_wire(tensor.numel(), tensor.dtype, size) for tensor in trained)
    except ValueError:  # who is on which host is found out at the first sync
        sent = sum(Native().bytes_on_wire(tensor.numel(), tensor.dtype, size) for tensor in trained)
        return f", at most {_size(sent)} a {unit}"
    return f", {_size(sent)} a {unit}"


def _saves_nothing(strategy: Strategy, topology: Topology) -> str:
    """Return why averages cannot save anything, or nothing where they may."""
    schedule = strategy.schedule
    averaged = schedule.parameter_levels()
    if not averaged or len(topology.ranks) == 1 or strategy.sharding is not None:
        return ""
    averaging = [set(group) for level in averaged for group in topology.levels[level]]
    sharing: set[str] = set()
    for _, level in _phases(schedule):  # as a rule the first one tells, and no other is looked at
        wide = () if level is None else topology.levels[level]
        if not all(any(group <= set(ranks) for ranks in wide) for group in averaging):
            return ""
        sharing.add(str(level))
    shared, means = (" and ".join(map(repr, sorted(n))) for n in (sharing, averaged))
    return (
        f"nothing is saved by this strategy: gradients are shared at every step over {shared}, "
        f"which has all ranks that average parameters with each other (over {means}), so their "
        "replicas never differ and averaging them is extra traffic. Give gradients=None for local "
        "steps or a narrower level, a topology with several hosts, or use ddp()"
    )


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
