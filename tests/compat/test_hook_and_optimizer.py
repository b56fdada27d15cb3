"""The gradient hook counts what the averager counts, and the optimizer is a whole one."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from loosestep import LoosestepWarning, PostLocalSGDState, attach
from loosestep.errors import forget_warnings
from loosestep.schedules import every
from loosestep.strategy.strategy import Strategy
from loosestep.testing import RankPool
from tests.support.defects import Loop, all_three, attempt, both, library, torch_fails


def share_inside_host(name: str) -> list[float]:
    """Return the gradients of one step before the start of local SGD and of one after."""
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model)
    state = library(name).PostLocalSGDState(None, None, start_localSGD_iter=1)
    ddp.register_comm_hook(state, library(name).post_localSGD_hook)
    gradients = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 1), 2.0 * dist.get_rank())).sum().backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.item())
    return gradients


@both
def test_the_default_subgroup_works_without_a_gpu(pool: RankPool, name: str):
    """subgroup=None is this host, also where torch looks for GPUs in the middle of backward."""
    with torch_fails(name, "CUDA"):
        assert pool.run(2, attempt, name, share_inside_host) == [[1.0, 1.0]] * 2


def accumulate(name: str) -> list[tuple[float, float]]:
    """Return gradient and parameter after every step of four micro-batches."""
    model = torch.nn.Linear(1, 1, bias=False)
    loop = Loop(name, model, period=1, warmup_steps=3)
    seen = []
    for _ in range(5):
        loop.optimizer.zero_grad()
        for _ in range(4):
            loop.backward(torch.full((1, 1), float(dist.get_rank())))
        assert model.weight.grad is not None
        gradient = model.weight.grad.item()
        loop.optimizer.step()
        seen.append((gradient, model.weight.item()))
    return seen


@all_three
def test_accumulation_leaves_no_step_unshared(pool: RankPool, name: str):
    """Gradients turn local at the step at which averaging starts, not at that micro-batch."""
    first, second = pool.run(2, accumulate, name)
    gradients = [a == b for (a, _), (b, _) in zip(first, second, strict=True)]
    parameters = [a == b for (_, a), (_, b) in zip(first, second, strict=True)]
    with torch_fails(name, "assert"):
        assert gradients == [True, True, True, False, False]
    with torch_fails(name, "assert"):
        assert all(either for either in map(any, zip(gradients, parameters, strict=True)))


def count_clock_warnings() -> list[str]:
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            PostLocalSGDState(None, None, 4)
    return [str(w.message) for w in caught if issubclass(w.category, LoosestepWarning)]


def test_a_hook_without_a_clock_says_so_once(pool: RankPool):
    """A state that must count backward passes says what to pass instead, once."""
    for said in pool.run(2, count_clock_warnings):
        assert len(said) == 1
        assert "clock=averager.clock" in said[0]


def resume_hook(name: str) -> tuple[int, int, bool]:
    names, file = library(name), io.BytesIO()
    state = names.PostLocalSGDState(None, dist.group.WORLD, 5, False)
    state.iter = 3
    torch.save(state if name == "torch" else state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = names.PostLocalSGDState(None, dist.group.WORLD, 1)
    resumed.load_state_dict(saved)
    return resumed.iter, resumed.start_localSGD_iter, resumed.post_local_gradient_allreduce


@both
def test_the_hook_can_be_saved(pool: RankPool, name: str):
    """Its state is plain data that loads without running code."""
    with torch_fails(name, "pickle"):
        assert pool.run(2, attempt, name, resume_hook) == [(3, 5, False)] * 2


def make_optimizer(name: str, kind: str = "AdamW", **options: Any) -> tuple[torch.nn.Linear, Any]:
    """Return a model whose only weight is this rank's number, and its optimizer."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(dist.get_rank())
    inner = getattr(torch.optim, kind)(model.parameters(), lr=0.1, weight_decay=0.0)
    averager = library(name).PeriodicModelAverager(**({"period": 4, "warmup_steps": 2} | options))
    return model, library(name).PostLocalSGDOptimizer(inner, averager)


def take_step(model: torch.nn.Linear, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def uses_closure(model: torch.nn.Linear, optimizer: Any) -> bool:
    def closure() -> float:
        loss = model(torch.ones(1, 1)).sum()
        loss.backward()
        return float(loss)

    before = float(model.weight)
    return optimizer.step(closure) == before and float(model.weight) != before


def fires_hooks(model: torch.nn.Linear, optimizer: Any) -> bool:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    take_step(model, optimizer)
    return calls == ["pre", "post"]


def has_defaults(model: torch.nn.Linear, optimizer: Any) -> bool:
    return bool(optimizer.defaults["lr"] == 0.1)


def survives_pickle(model: torch.nn.Linear, optimizer: Any) -> bool:
    take_step(model, optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    return bool(twin.averager.step == 1 and twin.state_dict() == optimizer.state_dict())


def survives_deepcopy(model: torch.nn.Linear, optimizer: Any) -> bool:
    take_step(model, optimizer)
    twin = copy.deepcopy(optimizer)
    take_step(model, optimizer)
    return (twin.averager.step, optimizer.averager.step) == (1, 2)


def follows_one_cycle(model: torch.nn.Linear, optimizer: Any) -> bool:
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)
    rates = []
    for _ in range(3):
        take_step(model, optimizer)
        plan.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return len(set(rates)) == 3 and optimizer.averager.step == 3


ABILITIES: list[Callable[[torch.nn.Linear, Any], bool]] = [
    uses_closure,
    fires_hooks,
    has_defaults,
    survives_pickle,
    survives_deepcopy,
    follows_one_cycle,
]


def try_ability(name: str, index: int) -> bool:
    try:
        return ABILITIES[index](*make_optimizer(name))
    except (AttributeError, TypeError):
        return False


@both
@pytest.mark.parametrize("index", range(len(ABILITIES)), ids=[a.__name__ for a in ABILITIES])
def test_the_optimizer_is_a_whole_one(pool: RankPool, name: str, index: int):
    """What a torch optimizer can do, the averaging one can."""
    with torch_fails(name, "False"):
        assert pool.run(2, try_ability, name, index) == [True, True]


def save_and_load(name: str, kind: str, route: str, directory: str) -> int:
    """Train three steps, save, load into a new optimizer and return its averager's step."""
    model, optimizer = make_optimizer(name, kind)
    for _ in range(3):
        take_step(model, optimizer)
    again, resumed = make_optimizer(name, kind)
    if route == "stateful":
        state_dict_saver.save({"optimizer": optimizer}, checkpoint_id=directory)
        take_step(again, resumed)  # DCP loads into state that is there
        state_dict_loader.load({"optimizer": resumed}, checkpoint_id=directory)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=route == "flat")
        saved: Any = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        state_dict_saver.save(saved, checkpoint_id=directory)
        take_step(again, resumed)
        target: Any = {"optimizer": get_optimizer_state_dict(again, resumed, options=options)}
        state_dict_loader.load(target, checkpoint_id=directory)
        set_optimizer_state_dict(again, resumed, target["optimizer"], options=options)
    step: int = resumed.averager.step
    return step


@both
@pytest.mark.parametrize("route", ["nested", "flat"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])  # the second has no state of its own
def test_a_distributed_checkpoint_keeps_the_step(
    pool: RankPool, tmp_path: Path, name: str, kind: str, route: str
):
    """State taken by parameter name has the averager's step in it, nested or flat."""
    with torch_fails(name, r"\[0, 0\]"):
        assert pool.run(2, save_and_load, name, kind, route, str(tmp_path)) == [3, 3]


@both
def test_a_stateful_checkpoint_keeps_the_step(pool: RankPool, tmp_path: Path, name: str):
    """The optimizer itself may be handed to torch.distributed.checkpoint; torch's may, too."""
    assert pool.run(2, save_and_load, name, "AdamW", "stateful", str(tmp_path)) == [3, 3]


def checkpoint_before_training(name: str) -> tuple[int, float]:
    """Return the step and the parameter after a look at an optimizer that has no state yet."""
    if name != "attach":
        model, optimizer = make_optimizer(name, warmup_steps=0)
        get_optimizer_state_dict(model, optimizer)
        return optimizer.averager.step, model.weight.item()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with attach(model, optimizer, Strategy(schedule=every(1))) as run:
        model.weight.data.fill_(dist.get_rank())
        get_optimizer_state_dict(model, optimizer)
        return run.clock.step, model.weight.item()


@all_three
def test_a_checkpoint_is_no_step(pool: RankPool, name: str):
    """Torch takes an empty step to make an optimizer's state; it neither counts nor averages."""
    with torch_fails(name, "closure"):
        assert pool.run(2, attempt, name, checkpoint_before_training) == [(0, 0.0), (0, 1.0)]
