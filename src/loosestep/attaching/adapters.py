"""Which adapter a model's gradients need: DDP, FSDP2 or plain; whole, or to their owners.

An adapter is what ``attach`` needs from a kind of module; a model may have several kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Reducer
from loosestep.comm.sharded_types import is_dtensor, is_fsdp
from loosestep.comm.tensors import holders_of
from loosestep.errors import NotAttachable
from loosestep.gradients.ddp import DDPAdapter, WholeBuckets, check_no_ddp_inside, free_dispatcher
from loosestep.gradients.fsdp import FSDPAdapter, mesh_ranks, sharded_later
from loosestep.gradients.in_memory import InSharedMemory
from loosestep.gradients.plain import Carrier, Meeting, Parameter, PlainAdapter, ToAll
from loosestep.gradients.reducing import ByReducer, ReducedBuckets
from loosestep.gradients.reductions import check_complex, check_no_rooms
from loosestep.gradients.sharing import GradientSharing, check_no_sparse_parts
from loosestep.sharding.gradients import ShardedBuckets, ShardedDDP, ShardGradients, ToOwners
from loosestep.sharding.plans import REDUCTIONS_UNDER_WAY
from loosestep.strategy.policies import Initial
from loosestep.strategy.schedules import Schedule
from loosestep.strategy.strategy import Strategy
from loosestep.sync.averager import Averager
from loosestep.sync.connected import ConnectedTopology
from loosestep.sync.parts import Parts
from loosestep.sync.replica import Replica, ShardedReplica

if TYPE_CHECKING:
    from loosestep.sharding.optimizer import ZeroRedundancyOptimizer

# Buckets of a plain module under way at once, by stage. Two: little is in memory twice.
BUCKETS_UNDER_WAY = {1: REDUCTIONS_UNDER_WAY, 2: 2}
STEPS_LOOKED_AT = 4096  # of a schedule, for steps that share no gradients


class Adapter(Protocol):
    """How a kind of module hands out its gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local inside the block."""

    def broadcast_buffers(self, wanted: bool) -> None:
        """Allow or forbid the framework's own broadcast of buffers."""

    def before_step(self) -> None:
        """Make sure that gradients are shared as they should be."""

    def close(self) -> None:
        """Leave the module as it was."""


def make_adapter(
    model: torch.nn.Module,
    sharing: GradientSharing,
    replica: Replica,
    topology: ConnectedTopology,
    strategy: Strategy,
) -> Adapter:
    """Connect a model's gradients."""
    check_no_ddp_inside(model)
    if strategy.schedule.gradient_levels() and not _takes_sparse(model, replica, strategy):
        check_no_sparse_parts(model)
    if isinstance(model, DistributedDataParallel):
        free_dispatcher(model)  # first: where the model is refused, nothing has been made for it
    if (sharded := replica.sharded) is not None:
        return _sharded(model, sharing, sharded, strategy)
    reducer = strategy.gradient_reducer
    if isinstance(model, DistributedDataParallel):
        if reducer is None:
            return DDPAdapter(model, sharing, WholeBuckets(sharing))
        check_complex(reducer, model.parameters())
        check_no_rooms(reducer)
        return DDPAdapter(model, sharing, ReducedBuckets(sharing, reducer))

    def find() -> list[Parameter]:
        return [(name, p) for name, p in model.named_parameters() if not is_dtensor(p)]

    def find_none_sharded() -> list[Parameter]:
        for name, parameter in model.named_parameters():
            if is_dtensor(parameter) and strategy.schedule.gradient_levels():
                raise sharded_later(name)
        return find()

    meet = _meeting(sharing, strategy)
    if any(is_fsdp(part) for part in model.modules()):
        if reducer is not None:
            raise NotAttachable(
                f"FSDP2 reduces gradients inside its mesh itself, so {reducer} cannot; leave "
                "gradient_reducer away, or wrap the model with DDP"
            )
        fsdp = FSDPAdapter(model, sharing, _levels_beyond_mesh(model, topology, strategy.schedule))
        return Together([fsdp, PlainAdapter(find, sharing, meet)])  # others may come later
    if len(find()) < len(list(model.parameters())) and strategy.schedule.gradient_levels():
        raise NotAttachable(
            "gradients of DTensors are shared for FSDP2 modules only; wrap the model with "
            "fully_shard, or let gradients stay local with gradients=None"
        )
    return PlainAdapter(find_none_sharded, sharing, meet, _carrier(sharing, reducer))


def _meeting(sharing: GradientSharing, strategy: Strategy) -> Meeting:
    """Return how parameters that come later begin: as those that ``attach`` found did."""

    def meet(level: str, new: list[Parameter], added: list[Parameter]) -> None:
        averager = Averager(sharing.peers(level))
        averager.agree(Parts(list(new)))
        if added and strategy.initial is Initial.BROADCAST:
            averager.broadcast(added)
        elif added and strategy.initial is Initial.REFUSE:
            averager.compare(added)

    return meet


def _takes_sparse(model: torch.nn.Module, replica: Replica, strategy: Strategy) -> bool:
    """Say whether gradients travel as DDP hands them out, sparse ones too."""
    by_hand = strategy.gradient_reducer is not None or replica.sharded is not None
    return isinstance(model, DistributedDataParallel) and not by_hand


def _carrier(sharing: GradientSharing, reducer: Reducer | None) -> Carrier:
    if reducer is None:
        return ToAll(sharing)
    by = InSharedMemory if reducer.resident else ByReducer
    return by(sharing, reducer)


def _sharded(
    model: torch.nn.Module, sharing: GradientSharing, replica: ShardedReplica, strategy: Strategy
) -> Adapter:
    weights = replica.group_weights()
    owners = ToOwners(replica.zero, sharing, ShardGradients(replica.zero), replica.across, weights)
    adapter: Adapter
    if isinstance(model, DistributedDataParallel):
        adapter = DDPAdapter(model, sharing, ShardedDDP(model, owners))
    else:
        carrier = ShardedBuckets(owners, BUCKETS_UNDER_WAY[_stage(strategy) or 2])
        meet = _meeting(sharing, strategy)
        adapter = PlainAdapter(model.named_parameters, sharing, meet, carrier)
    owners.take_over()  # last: where the model is refused, the optimizer stays as it was
    return adapter


def _stage(strategy: Strategy) -> int | None:
    return strategy.sharding.stage if strategy.sharding is not None else None


def check_sharded(
    model: torch.nn.Module,
    zero: ZeroRedundancyOptimizer,
    strategy: Strategy,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Raise where a sharded optimizer does not fit a model and a strategy."""
    if zero.overlap_with_ddp:
        raise NotAttachable(
            "attach takes gradients to their owners itself; make the optimizer with "
            "overlap_with_ddp=False, or use hook_with_zero_step without attach"
        )
    if scaler is not None and zero.options.scaler not in (None, scaler):
        raise NotAttachable(
            "the optimizer was given another GradScaler than attach; give ZeroOptions(scaler=...) "
            "and attach(..., scaler=...) the same one, or only attach"
        )
    if _stage(strategy) == 2 and isinstance(model, DistributedDataParallel):
        raise NotAttachable(
            "stage=2 frees gradients that a rank does not own, but DDP keeps the memory of its "
            "buckets for the whole run; attach the plain module, or use stage=1"
        )
    if strategy.gradient_reducer is not None:
        raise NotAttachable(
            f"a sharded optimizer takes gradients to their owners itself, so "
            f"{strategy.gradient_reducer} cannot; leave gradient_reducer away"
        )
    steps = range(STEPS_LOOKED_AT)
    local = next((step for step in steps if strategy.schedule(step).gradients is None), None)
    if local is not None:
        raise NotAttachable(
            f"at step {local} this schedule lets gradients stay local, but every rank of a sharded "
            "optimizer steps a part of the parameters and needs the others' gradients; give a "
            "level that holds its group, such as gradients='host'"
        )


def _levels_beyond_mesh(
    model: torch.nn.Module, topology: ConnectedTopology, schedule: Schedule
) -> dict[str, Peers]:
    """Return, for every gradient level wider than the shard mesh, who holds the same shard."""
    mesh, key = mesh_ranks(model)
    wider: dict[str, Peers] = {}
    for level in sorted(schedule.gradient_levels()):
        members = topology.members(level)
        if not set(members) >= set(mesh):
            raise NotAttachable(
                f"gradient level {level!r} (ranks {list(members)}) is narrower than the FSDP "
                f"mesh (ranks {list(mesh)}), over which FSDP reduces gradients in any case; "
                "choose a level that holds whole meshes"
            )
        if set(members) > set(mesh):
            holders = holders_of(topology.peers(level), key)
            wider[level] = topology.subset(level, holders.mine)
    return wider


class Together:
    """Several adapters as one."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local everywhere."""
        with ExitStack() as stack:
            for adapter in self._adapters:
                stack.enter_context(adapter.no_sync())
            yield

    def broadcast_buffers(self, wanted: bool) -> None:
        """Tell all."""
        for adapter in self._adapters:
            adapter.broadcast_buffers(wanted)

    def before_step(self) -> None:
        """Ask all."""
        for adapter in self._adapters:
            adapter.before_step()

    def close(self) -> None:
        """Close all."""
        for adapter in self._adapters:
            adapter.close()
