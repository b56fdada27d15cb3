"""What can be attached: a model, an optimizer, a strategy and a scaler that fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from loosestep.comm.reducers import check_hosts_fit
from loosestep.comm.reducers.reducer import compresses
from loosestep.comm.sharded_types import check_not_old_fsdp, is_dtensor
from loosestep.errors import NotAttachable
from loosestep.gradients.ddp import check_in_no_ddp
from loosestep.sharding.recognize import is_sharded
from loosestep.strategy.gossip import Gossip
from loosestep.strategy.strategy import Strategy
from loosestep.strategy.topology import Topology


class Attachment(Protocol):
    """What another attachment must say of itself."""

    @property
    def model(self) -> torch.nn.Module:
        """What it trains."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """By what."""

    @property
    def strategy(self) -> Strategy:
        """And how."""


def choose_scaler(
    given: torch.amp.GradScaler | None, wrapped: torch.amp.GradScaler | None
) -> torch.amp.GradScaler | None:
    """Return the scaler that steps an optimizer: the one that was given, or its wrapper's."""
    if given is not None and wrapped is not None and given is not wrapped:
        raise NotAttachable(
            "the optimizer's wrapper steps it with another GradScaler than attach was given; leave "
            "scaler away, and the wrapper's is used"
        )
    return wrapped if given is None else given


def check_fits(
    model: object,
    optimizer: torch.optim.Optimizer,
    strategy: object,
    attached: Iterable[Attachment],
) -> None:
    """Raise where these do not belong together, or not beside what is attached already."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_not_old_fsdp(model)
    check_in_no_ddp(model)
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy must be one such as post_local_sgd(period=8), got {type(strategy).__name__}"
        )
    if any(run.optimizer is optimizer for run in attached):
        raise NotAttachable("this optimizer is attached already; detach() it first")
    for run in attached:
        _check_beside(model, strategy, run)
    judged = strategy.gate or strategy.gossip
    if judged and (is_sharded(optimizer) or any(map(is_dtensor, model.parameters()))):
        raise NotAttachable(
            f"{judged} is for whole replicas, and these are sharded: each shard has its own ranks, "
            "which need not come to the same; leave it away, or do not shard"
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained and not any(id(p) in stepped for p in trained):
        raise NotAttachable(
            f"{type(optimizer).__name__} has none of the parameters of this "
            f"{type(model).__name__}, so its steps say nothing about them; make it from "
            "model.parameters()"
        )


def _check_beside(model: torch.nn.Module, strategy: Strategy, other: Attachment) -> None:
    """Raise where parameters belong to another attachment too, and the two would spoil them."""
    shared = set(model.parameters()) & set(other.model.parameters())
    if not shared:
        return
    strategies = [other.strategy, strategy]
    reducers = [strategy.gradient_reducer for strategy in strategies]
    resident = next((r for r in reducers if r is not None and r.resident), None)
    already = (
        f"parameters of this {type(model).__name__} are attached already, with another optimizer"
    )
    if resident is not None:
        raise NotAttachable(
            f"{already}, and {resident} keeps their gradients in memory that neighbours write "
            "to while the other attachment reads it; give one optimizer all parameters, or "
            "share gradients by Mean() in both attachments"
        )
    # Two means in turn do no harm, the second changes nothing. But what is added to parameters (a
    # mean's difference to a snapshot, an outer step from an anchor) would be added by both.
    averaging = all(strategy.schedule.parameter_levels() for strategy in strategies)
    adds = next((s for s in strategies if s.overlap_steps or s.outer or s.gossip), None)
    if adds is not None and averaging and any(p.requires_grad for p in shared):
        what = adds.outer or adds.gossip or f"overlap_steps={adds.overlap_steps}"
        raise NotAttachable(
            f"{already}, and {what} moves all "
            "trained parameters of a model by what all steps have done to them, whoever took "
            "those, so that two such averages would count steps twice; attach one optimizer and "
            "step the other, which is not attached, before it, or give one optimizer all "
            "parameters"
        )


def _check_gate(strategy: Strategy, known: Sequence[str]) -> None:
    """Raise where the gate's level has no anchors from which norms could be taken."""
    averaging = [level for level in known if level in strategy.schedule.parameter_levels()]
    if averaging[-1] not in strategy.outer_by_level(averaging):
        raise ValueError(
            f"{strategy.gate} stands before {averaging[-1]!r}, the widest level that averages, and "
            f"outer has {sorted(strategy.outer_by_level(averaging))} only; give that level an "
            "outer optimizer too"
        )


def _check_settles(gossip: Gossip | None, groups: Iterable[Sequence[int]]) -> None:
    """Raise where slow weights would swing apart, whoever is in such a group."""
    if gossip is None or gossip.step is None:
        return
    for num in sorted({len(ranks) for ranks in groups}):
        if not gossip.step.settles(gossip, num):
            raise ValueError(
                f"{gossip.step} lets {num} replicas swing apart, even where nobody trains: gamma "
                f"pulls too far for that momentum; give a smaller gamma than {gossip.step.gamma}, "
                "or a smaller alpha"
            )


def check_scaler(scaler: torch.amp.GradScaler | None, strategy: Strategy) -> None:
    """Raise where a scaler would never see the infinities that it looks for."""
    reducer = strategy.gradient_reducer
    if scaler is None or not scaler.is_enabled():
        return
    if compresses(reducer):
        raise NotAttachable(
            f"a GradScaler lowers its scale when it finds infinite gradients, but {reducer} "
            "does not let any through; use gradient_reducer=Cast(torch.bfloat16) or none, or no "
            "scaler"
        )


def check_levels(strategy: Strategy, topology: Topology) -> None:
    """Raise where a schedule names levels that a topology does not have, or in another order."""
    schedule, known = strategy.schedule, list(topology.levels)
    for level in sorted(schedule.gradient_levels() | schedule.parameter_levels()):
        if level not in known:
            raise ValueError(
                f"the schedule names the level {level!r}, which the topology does not have; "
                f"it has {known}"
            )
    if strategy.gate is not None:
        _check_gate(strategy, known)
    for level in schedule.parameter_levels():
        _check_settles(strategy.gossip, topology.levels[level])
    for reducer, levels in (
        (strategy.gradient_reducer, schedule.gradient_levels()),
        (strategy.reducer, schedule.parameter_levels()),
    ):
        for level in levels:
            check_hosts_fit(reducer, level, topology.levels[level])
    for chain in schedule.chains():
        if list(chain) != sorted(chain, key=known.index):
            raise ValueError(
                f"a schedule must name its levels from narrow to wide: it has {list(chain)}, the "
                f"topology {known}; give them as {sorted(chain, key=known.index)}"
            )
