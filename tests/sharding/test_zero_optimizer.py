"""A sharded optimizer trains as the plain one on plain DDP, to the bit."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import ZeroOptions, ZeroRedundancyOptimizer
from loosestep.sharding.kinds import ELEMENTWISE
from loosestep.testing import RankPool
from tests.support.zero_case import (
    OwnHeun,
    OwnSign,
    OwnTrust,
    Pair,
    Settings,
    loss_of,
    pair,
)

optim = torch.optim
Case = tuple[str, type[torch.optim.Optimizer], Settings, str, bool | None]

INTERESTING: dict[type[torch.optim.Optimizer], Settings] = {
    optim.SGD: {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    optim.Adam: {"amsgrad": True, "weight_decay": 0.1},
    optim.AdamW: {"amsgrad": True, "maximize": True},
    optim.NAdam: {"weight_decay": 0.1, "decoupled_weight_decay": True},
    optim.RAdam: {"weight_decay": 0.1, "betas": (0.5, 0.6)},
    optim.Adamax: {"weight_decay": 0.1},
    optim.Adadelta: {"rho": 0.8, "weight_decay": 0.1},
    optim.Adagrad: {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    optim.RMSprop: {"centered": True, "momentum": 0.9},
    optim.Rprop: {"etas": (0.4, 1.3)},
    optim.ASGD: {"t0": 2, "weight_decay": 0.1},
}


def cases() -> list[Case]:
    found: list[Case] = [
        ("Muon", optim.Muon, {"lr": 0.02}, "matrices", None),
        ("Muon plain", optim.Muon, {"lr": 0.02, "nesterov": False}, "matrices", None),
        ("Adafactor", optim.Adafactor, {"lr": 0.02}, "odd", None),
        ("Adafactor foreach", optim.Adafactor, {"lr": 0.02, "foreach": True}, "odd", None),
        ("own, whole", OwnTrust, {"lr": 0.02}, "odd", None),
        ("own, unknown", OwnSign, {"lr": 0.02}, "odd", None),
        ("own, declared", OwnSign, {"lr": 0.02}, "odd", True),
        ("AdamW kept whole", optim.AdamW, {"lr": 0.02, "fused": True}, "odd", False),
        ("AdamW, mixed", optim.AdamW, {"lr": 0.02, "fused": True}, "mixed", None),
        ("SGD, mixed", optim.SGD, {"lr": 0.02, "momentum": 0.9}, "mixed", None),
        ("tensor lr", optim.AdamW, {"lr": torch.tensor(0.02), "foreach": False}, "odd", None),
    ]
    for kind in sorted(ELEMENTWISE, key=lambda kind: kind.__name__):
        takes_fused = "fused" in inspect.signature(kind).parameters
        for flags in [{"foreach": False}, {"foreach": True}] + [{"fused": True}] * takes_fused:
            settings = {"lr": 0.02, **INTERESTING[kind], **flags}
            found.append((f"{kind.__name__} {flags}", kind, settings, "odd", None))
    return found


def wrong_cases(given: list[Case]) -> list[str]:
    wrong = []
    for name, kind, settings, model, elementwise in given:
        if not pair(kind, settings, model, ZeroOptions(elementwise=elementwise)).train():
            wrong.append(name)
        gc.collect()  # an optimizer's process groups go with it
    return wrong


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_optimizer_trains_as_the_plain_one(pool: RankPool, world_size: int) -> None:
    """All classes, in all variants, are equal to the bit after each of five steps."""
    given = cases()
    assert len(given) > 35
    assert pool.run(world_size, wrong_cases, given, timeout=110) == [[]] * world_size


def two_groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    return [{"params": matrices, "lr": 0.03}, {"params": others, "weight_decay": 0.0}]


def adamw_pair(params: Callable[[torch.nn.Module], Any], **more: Any) -> Pair:
    settings: Settings = {"lr": 0.02, "weight_decay": 0.1, "fused": True}
    return Pair(
        lambda module: optim.AdamW(params(module), **settings),
        lambda module: ZeroRedundancyOptimizer(params(module), optim.AdamW, **settings),
        **more,
    )


def several_groups() -> bool:
    return adamw_pair(two_groups).train()


def named_parameters() -> bool:
    both = adamw_pair(lambda module: module.named_parameters())
    return both.train() and both.zero.param_groups[0]["param_names"][0] == "gain"


def added_group() -> bool:
    """Begin without the last layer, and add it in the middle."""
    both = adamw_pair(lambda module: [p for n, p in module.named_parameters() if "last" not in n])
    before = both.train(3)
    for net, optimizer in both.sides:
        optimizer.add_param_group({"params": net.module.last.parameters(), "lr": 0.01})
    return before and both.train(3)


def thawed() -> bool:
    """Begin with a frozen layer; DDP made after that does not reduce it, so all do the same."""
    both = adamw_pair(
        lambda module: module.parameters(), prepare=lambda module: module.wide.requires_grad_(False)
    )
    before = both.train(2)
    for net, _ in both.sides:
        net.module.wide.requires_grad_(True)
    for number in range(2, 5):
        for net, optimizer in both.sides:
            optimizer.zero_grad()
            loss_of(net.module, 0, number).backward()  # the same batch, without DDP
            optimizer.step()
    return before and both.same()


def repointed() -> bool:
    both = adamw_pair(lambda module: module.parameters())
    before = both.train(2)
    for net, _ in both.sides:
        for parameter in net.parameters():
            parameter.data = parameter.data.clone() * 1.5
    both.places = both._places()
    return before and both.train(3)


def zeroed_in_place() -> bool:
    both = adamw_pair(lambda module: module.parameters())
    same = []
    for number in range(4):
        for optimizer in (both.plain, both.zero):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        both.backward(number)
        both.plain.step()
        both.zero.step()
        same.append(both.same())
    return all(same)


def accumulated() -> bool:
    """Two backward passes a step, without zero_grad in between."""
    both = adamw_pair(lambda module: module.parameters())
    same = []
    for number in range(4):
        both.backward(2 * number)
        both.backward(2 * number + 1)
        for _, optimizer in both.sides:
            optimizer.step()
            optimizer.zero_grad()
        same.append(both.same())
    return all(same)


def nothing_for_some() -> bool:
    """Fewer elements than ranks: most own nothing."""
    both = adamw_pair(lambda module: [module.gain])
    return both.train(3)


def hooks_fire_once() -> bool:
    both = adamw_pair(lambda module: module.parameters())
    seen: list[str] = []
    both.zero.register_step_pre_hook(lambda *_: seen.append("before"))
    both.zero.register_step_post_hook(lambda *_: seen.append("after"))
    return both.train(3) and seen == ["before", "after"] * 3


WAYS = {
    body.__name__: body
    for body in [
        several_groups,
        named_parameters,
        added_group,
        thawed,
        repointed,
        zeroed_in_place,
        accumulated,
        nothing_for_some,
        hooks_fire_once,
    ]
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_use(pool: RankPool, way: str) -> None:
    """What people do with an optimizer gives the plain one's bits."""
    assert pool.run(3, WAYS[way]) == [True] * 3


def in_subgroup() -> bool:
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return True
    return pair(optim.AdamW, {"lr": 0.02, "fused": True}, group=group).train()


def test_a_subgroup_is_a_world_of_its_own(pool: RankPool) -> None:
    """Ranks 2 and 3 of 4 train by themselves."""
    assert pool.run(4, in_subgroup) == [True] * 4


def in_world() -> bool:
    return pair(optim.AdamW, {"lr": 0.02}).train() and pair(OwnTrust, {"lr": 0.02}).train()


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes(pool: RankPool, world_size: int) -> None:
    """A world of one, and one that divides nothing evenly."""
    assert pool.run(world_size, in_world) == [True] * world_size


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=7),
}


def scheduled() -> list[str]:
    wrong = []
    for name, make in SCHEDULERS.items():
        for settings in ({"lr": 0.02}, {"lr": torch.tensor(0.02), "foreach": False}):
            both = pair(optim.AdamW, settings)
            schedulers = [make(optimizer) for _, optimizer in both.sides]
            same = []
            for number in range(6):
                same.append(both.step(number))
                for scheduler in schedulers:
                    scheduler.step()
                groups = [optimizer.param_groups[0] for _, optimizer in both.sides]
                same.append(all(groups[0][key] == groups[1][key] for key in ("lr", "betas")))
            if not all(same):
                wrong.append(f"{name} {settings}")
    return wrong


def test_schedulers(pool: RankPool) -> None:
    """Learning rates, and OneCycleLR's momentum, reach the shards."""
    assert pool.run(2, scheduled) == [[], []]


def closure_of(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net, rank, number)
        loss.backward()
        return loss.item()

    return closure


def with_closure(kind: type[torch.optim.Optimizer], settings: Settings) -> bool:
    both = pair(kind, settings)
    same = []
    for number in range(4):
        losses = []
        for net, optimizer in both.sides:
            losses.append(optimizer.step(closure_of(net, optimizer, both.rank, number)))
        same += [both.same(), losses[0] == losses[1] is not None]
    return all(same)


@pytest.mark.parametrize("kind", [optim.SGD, OwnHeun])
def test_closures(pool: RankPool, kind: type[torch.optim.Optimizer]) -> None:
    """A closure may be evaluated once or twice, each time at the parameters as they are then."""
    assert pool.run(2, with_closure, kind, {"lr": 0.1}) == [True, True]


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def share_of_state() -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(501, 503) for _ in range(4)))
    plain = optim.AdamW(model.parameters())
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    zero.step()
    return bytes_of_state(zero) / bytes_of_state(plain)


def test_every_rank_keeps_its_share_of_state(pool: RankPool) -> None:
    """AdamW's state on 4 ranks is a quarter of the plain one's, to 1 %."""
    for share in pool.run(4, share_of_state):
        assert share == pytest.approx(0.25, rel=0.01)
