"""What attaching will do, in one line of the log; and a warning where it can do no good."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.reducers import AllReduce, Mean, Reducer
from loosestep.comm.sharded_types import is_dtensor
from loosestep.errors import warn_once
from loosestep.strategy.policies import OptimizerState, StatePeriods
from loosestep.strategy.schedules import STEPS_LOOKED_AT, Schedule, next_sync
from loosestep.strategy.strategy import Strategy
from loosestep.sync.connected import ConnectedTopology
from loosestep.sync.replica import Replica

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Held = tuple[int, torch.dtype, int]  # numbers on this rank, their dtype, how many ranks hold them

logger = logging.getLogger(__name__)


def announce(
    strategy: Strategy,
    topology: ConnectedTopology,
    model: torch.nn.Module,
    replica: Replica,
    kept: int,
) -> None:
    """Say what will happen; by the first rank alone, since it is the same on all.

    ``kept`` are the bytes that averages keep beside the model.
    """
    if dist.get_rank() != topology.ranks[0]:
        return
    if logger.isEnabledFor(logging.INFO):  # it asks the schedule about thousands of steps
        logger.info("%s", describe(strategy, topology, model, replica, kept))
    if reason := _saves_nothing(strategy, topology):
        warn_once("saves nothing", reason)
    if reason := _never_joins(strategy, topology):
        warn_once("never joins", reason)


def describe(
    strategy: Strategy,
    topology: ConnectedTopology,
    model: torch.nn.Module,
    replica: Replica,
    kept: int,
) -> str:
    """Return levels, gradients, averages, bytes and memory as one line."""
    trained = [p for p in model.parameters() if p.requires_grad]
    extra = kept + _bytes_of_gradients(strategy, model, trained)
    return "; ".join(
        [
            f"attached: {topology}",
            _gradients(strategy, topology, trained),
            _averages(strategy, topology, replica, trained),
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


def _gradients(
    strategy: Strategy, topology: ConnectedTopology, trained: Sequence[torch.Tensor]
) -> str:
    phases = list(_phases(strategy.schedule))
    if len(phases) > 3:
        return f"gradients as {strategy.schedule} says"
    reducer = strategy.gradient_reducer or AllReduce()
    told = []
    for start, level in phases:
        since = "" if len(phases) == 1 else f"from step {start} on "
        held = [] if level is None else _held(trained, len(topology.members(level)))
        sent = "" if level is None else _bytes(reducer, held, "step")
        told.append(f"{since}{'local' if level is None else f'over {level!r}'}{sent}")
    return f"gradients {', '.join(told)}"


def _phases(schedule: Schedule) -> Iterable[tuple[int, str | None]]:
    """Return from which step on which level shares gradients, as far as one looks."""
    first = (next_sync(schedule, 0) or (0, ""))[0]
    steps = sorted({*range(STEPS_LOOKED_AT), *range(first, first + STEPS_LOOKED_AT)})
    for level, run in itertools.groupby(steps, lambda step: schedule(step).gradients):
        yield next(run), level


def _averages(
    strategy: Strategy,
    topology: ConnectedTopology,
    replica: Replica,
    trained: Sequence[torch.Tensor],
) -> str:
    schedule, told = strategy.schedule, []
    averaging = [level for level in topology.levels if level in schedule.parameter_levels()]
    for level in averaging:
        first = next_sync(schedule, 0, level)
        second = None if first is None else next_sync(schedule, first[0], level)
        if first is None:
            continue
        often = "" if second is None else f" every {second[0] - first[0]} steps"
        held, pairs = _held(trained, len(topology.members(level))), ""
        if strategy.gossip is not None:  # NoLoCo sends float32
            wide = strategy.gossip.step is not None
            held = [(n, torch.float32 if wide else dtype, min(2, size)) for n, dtype, size in held]
            pairs = ", in pairs"
        gathered = 0
        if (sharded := replica.sharded) is not None:
            across, shards = sharded.across(level).size, sharded.zero.shards.of.values()
            held = [(shard.numel(), shard.dtype, across) for shard in shards]
            if across > 1:  # then shards change, and the others of the group get them
                others = dist.get_world_size(sharded.zero.process_group) - 1
                gathered = others * sum(shard.nbytes for shard in shards)
        size = _bytes(strategy.reducer, held, "sync", gathered)
        state = _state(strategy, held)
        rule = strategy.outer_by_level(averaging).get(level)
        stepped = "" if rule is None else f", which {rule} steps from"
        told.append(f"{level!r}{often} (first after {first[0]}){pairs}{size}{state}{stepped}")
    late = f", applied {strategy.overlap_steps} steps later" if strategy.overlap_steps else ""
    return f"parameters averaged over {', '.join(told)}{late}" if told else "no averages"


def _state(strategy: Strategy, held: Sequence[Held]) -> str:
    """Return what the optimizer's state adds, which is never compressed."""
    state, exact = strategy.optimizer_state, strategy.reducer.exact or Mean()
    each = _bytes(exact, held, "sync")
    if state is OptimizerState.AVERAGE:
        return f", with the optimizer's state{each} for each of its tensors"
    if isinstance(state, StatePeriods):
        kinds = " and ".join(f"{key!r} at every {_nth(period)}" for key, period in state.syncs)
        return f", with {kinds} of these syncs{each} each"
    return ""


def _held(tensors: Sequence[torch.Tensor], size: int) -> list[Held]:
    """Return what this rank sends its own part of, over a level of ``size`` ranks."""
    return [
        (tensor.to_local().numel(), tensor.dtype, max(1, size // _num_shards(tensor)))
        if is_dtensor(tensor)
        else (tensor.numel(), tensor.dtype, size)
        for tensor in tensors
    ]


def _num_shards(tensor: DTensor) -> int:
    mesh = tensor.device_mesh
    sizes = zip(mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, place in sizes if not place.is_replicate())


def _bytes(reducer: Reducer, held: Sequence[Held], unit: str, more: int = 0) -> str:
    """Return what a rank sends, where that is known before the ranks have met.

    ``more`` is added to it.
    """
    if all(size == 1 for _, _, size in held):
        return " (alone there)"
    shared = [part for part in held if part[2] > 1]
    try:
        sent = sum(reducer.bytes_on_wire(*part) for part in shared)
    except ValueError:  # who is on which host is found out at the first sync
        sent = sum(AllReduce().bytes_on_wire(*part) for part in shared)
        return f", at most {_size(sent + more)} a {unit}"
    return f", {_size(sent + more)} a {unit}"


def _saves_nothing(strategy: Strategy, topology: ConnectedTopology) -> str:
    """Return why averages cannot save anything, or nothing where they may."""
    schedule = strategy.schedule
    averaged = schedule.parameter_levels()
    if not averaged or len(topology.ranks) == 1 or strategy.sharding is not None:
        return ""
    if strategy.outer:  # it steps from where replicas are, equal ones too
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


def _never_joins(strategy: Strategy, topology: ConnectedTopology) -> str:
    """Return which ranks are left apart by what is shared, or nothing where all come together."""
    schedule, ranks = strategy.schedule, topology.ranks
    widest = [level for level in topology.levels if topology.members(level) == ranks]
    if schedule.parameter_levels() & set(widest):
        return ""
    if {level for _, level in _phases(schedule)} <= set(widest):
        return ""
    averaged = [level for level in topology.levels if level in schedule.parameter_levels()]
    most = f"over {averaged[-1]!r} at most" if averaged else "on no level"
    return (
        f"not all ranks are joined by this strategy: it averages parameters {most} and does not "
        f"share gradients with all ranks at every step, so that groups of {topology} train models "
        f"of their own. Average over {topology.widest!r} too, as "
        f"hierarchical_sgd({{'host': 4, {topology.widest!r}: 32}}) does, or where that is meant "
        "give each group a topology of its own ranks"
    )


def _nth(number: int) -> str:
    """Return ``3rd`` for 3."""
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
