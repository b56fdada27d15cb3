"""Which adapter a model's gradients need: DDP, FSDP2 or plain; whole, or to their owners."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from loosestep.errors import NotAttachable
from loosestep.hooks.adapters import Adapter, Together
from loosestep.hooks.ddp import DDPAdapter, WholeBuckets, free_dispatcher
from loosestep.hooks.fsdp import FSDPAdapter, mesh_ranks
from loosestep.hooks.gradients import GradientSharing
from loosestep.hooks.plain import Carrier, PlainAdapter, ToAll
from loosestep.hooks.plans import REDUCTIONS_UNDER_WAY
from loosestep.hooks.reduced import ByReducer, ReducedBuckets
from loosestep.hooks.resident import InRooms
from loosestep.hooks.sharded import ShardedBuckets, ShardedDDP, ShardGradients, ToOwners
from loosestep.optim.zero import ZeroRedundancyOptimizer
from loosestep.peers import Peers
from loosestep.replica import Replica, ShardedReplica
from loosestep.schedule import Schedule
from loosestep.sharded_types import is_dtensor, is_fsdp
from loosestep.strategy import Strategy
from loosestep.tensors import holders_of
from loosestep.topology import Topology
from loosestep.wire import Reducer, lives_in_rooms

# Buckets of a plain module under way at once, by stage. Two: little is in memory twice.
BUCKETS_UNDER_WAY = {1: REDUCTIONS_UNDER_WAY, 2: 2}
STEPS_LOOKED_AT = 4096  # of a schedule, for steps that share no gradients


def make_adapter(
    model: torch.nn.Module,
    sharing: GradientSharing,
    replica: Replica,
    topology: Topology,
    strategy: Strategy,
) -> Adapter:
    """Connect a model's gradients."""
    if isinstance(model, DistributedDataParallel):
        free_dispatcher(model)  # first: where the model is refused, nothing has been made for it
    if isinstance(replica, ShardedReplica):
        return _sharded(model, sharing, replica, strategy)
    reducer = strategy.gradient_reducer
    if isinstance(model, DistributedDataParallel):
        whole_buckets = WholeBuckets(sharing)
        return DDPAdapter(model, ReducedBuckets(sharing, reducer) if reducer else whole_buckets)
    parameters = list(model.parameters())
    whole = [p for p in parameters if not is_dtensor(p)]
    if any(is_fsdp(part) for part in model.modules()):
        if reducer is not None:
            raise NotAttachable(
                f"FSDP2 reduces gradients inside its mesh itself, so {reducer} cannot; leave "
                "gradient_reducer away, or wrap the model with DDP"
            )
        fsdp = FSDPAdapter(model, sharing, _levels_beyond_mesh(model, topology, strategy.schedule))
        return Together([fsdp, PlainAdapter(whole, sharing)]) if whole else fsdp
    if len(whole) < len(parameters) and strategy.schedule.gradient_levels():
        raise NotAttachable(
            "gradients of DTensors are shared for FSDP2 modules only; wrap the model with "
            "fully_shard, or let gradients stay local with gradients=None"
        )
    return PlainAdapter(whole, sharing, _carrier(sharing, reducer))


def _carrier(sharing: GradientSharing, reducer: Reducer | None) -> Carrier:
    if reducer is None:
        return ToAll(sharing)
    by = InRooms if lives_in_rooms(reducer) else ByReducer
    return by(sharing, reducer)


def _sharded(
    model: torch.nn.Module, sharing: GradientSharing, replica: ShardedReplica, strategy: Strategy
) -> Adapter:
    weights = replica.group_weights()
    owners = ToOwners(replica.zero, sharing, ShardGradients(replica.zero), replica.across, weights)
    adapter: Adapter
    if isinstance(model, DistributedDataParallel):
        adapter = DDPAdapter(model, ShardedDDP(model, owners))
    else:
        carrier = ShardedBuckets(owners, BUCKETS_UNDER_WAY[_stage(strategy) or 2])
        adapter = PlainAdapter(model.parameters(), sharing, carrier)
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
    model: torch.nn.Module, topology: Topology, schedule: Schedule
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
