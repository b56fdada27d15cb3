"""Our classes are torch's to whoever asks, and what they inherit works or says what to use."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import optim as torch_optim
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torch_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_levels
from torch.nn.parallel import DistributedDataParallel

import loosestep
from loosestep import Clock, PostLocalSGDState, post_localSGD_hook
from loosestep.compat import post_local_sgd_hook as hook_module
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast

TORCH: dict[str, Any] = {
    "ModelAverager": torch_averagers.ModelAverager,
    "PeriodicModelAverager": torch_averagers.PeriodicModelAverager,
    "HierarchicalModelAverager": torch_levels.HierarchicalModelAverager,
    "PostLocalSGDState": torch_hook.PostLocalSGDState,
    "PostLocalSGDOptimizer": torch_optim.PostLocalSGDOptimizer,
    "ZeroRedundancyOptimizer": torch_optim.ZeroRedundancyOptimizer,
}
HIDDEN = [
    name
    for name in vars(torch_optim.ZeroRedundancyOptimizer)
    if name.startswith("_") and not name.startswith(("__", "_abc"))
]
MADE = [name for name in TORCH if name != "ModelAverager"]  # the base cannot be made


@pytest.mark.parametrize("name", TORCH)
def test_our_classes_are_torchs(name: str) -> None:
    """Frameworks ask ``isinstance``."""
    assert issubclass(getattr(loosestep, name), TORCH[name])


def make(library: Any, name: str) -> Any:
    """Return an object of a class, of ours or of torch's, made with torch's arguments."""
    parameter = torch.nn.Parameter(torch.ones(4))
    if name == "HierarchicalModelAverager":
        return library(name)(OrderedDict([(2, 1), (4, dist.get_world_size())]))
    if name == "PostLocalSGDState":
        return library(name)(None, dist.group.WORLD, 2)
    if name == "PostLocalSGDOptimizer":
        inner = torch.optim.SGD([parameter], lr=0.1)
        return library(name)(inner, library("PeriodicModelAverager")(2))
    if name == "ZeroRedundancyOptimizer":
        return library(name)([parameter], torch.optim.SGD, lr=0.1)
    return library(name)(2)


def ours(name: str) -> Any:
    return make(lambda of: getattr(loosestep, of), name)


def of_torch(name: str) -> Any:
    return make(TORCH.__getitem__, name)


def inherited(name: str) -> list[str]:
    """Return what torch's class has that ours does not define, but for Python's own."""
    kind = getattr(loosestep, name)
    return [
        attribute
        for attribute in dir(TORCH[name])
        if not attribute.startswith("__") and not _is_ours(kind, attribute)
    ]


def _is_ours(kind: type, attribute: str) -> bool:
    home = next(base for base in kind.__mro__ if attribute in vars(base))
    return home.__module__.startswith("loosestep")


def fires(register: str, act: str) -> Callable[[Any], bool]:
    """Return a check that a hook is called by what it is registered for."""

    def check(optimizer: Any) -> bool:
        calls: list[int] = []
        handle = getattr(optimizer, register)(lambda *_: calls.append(1))
        if act == "load_state_dict":
            optimizer.consolidate_state_dict(to=dist.get_rank())
            optimizer.load_state_dict(optimizer.state_dict())
        elif act == "state_dict":
            optimizer.consolidate_state_dict(to=dist.get_rank())
            optimizer.state_dict()
        else:
            optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
            optimizer.step()
        handle.remove()
        return calls == [1]

    return check


# How everything inherited is used. A name that is missing here fails the walk: say how it is used.
USES: dict[str, Callable[[Any], bool]] = {
    "_find_process_group": lambda averager: averager._find_process_group() is not None,
    "process_group": lambda state: state.process_group is None,
    "subgroup": lambda state: state.subgroup is dist.group.WORLD,
    "start_localSGD_iter": lambda state: state.start_localSGD_iter == 2,
    "post_local_gradient_allreduce": lambda state: state.post_local_gradient_allreduce is True,
    "OptimizerPreHook": lambda optimizer: optimizer.OptimizerPreHook is not None,
    "OptimizerPostHook": lambda optimizer: optimizer.OptimizerPostHook is not None,
    "profile_hook_step": lambda optimizer: callable(optimizer.profile_hook_step(type.mro)),
    "register_step_pre_hook": fires("register_step_pre_hook", "step"),
    "register_step_post_hook": fires("register_step_post_hook", "step"),
    "register_state_dict_pre_hook": fires("register_state_dict_pre_hook", "state_dict"),
    "register_state_dict_post_hook": fires("register_state_dict_post_hook", "state_dict"),
    "register_load_state_dict_pre_hook": fires(
        "register_load_state_dict_pre_hook", "load_state_dict"
    ),
    "register_load_state_dict_post_hook": fires(
        "register_load_state_dict_post_hook", "load_state_dict"
    ),
}


def walk(name: str) -> dict[str, bool]:
    """Use everything that is inherited, and look for what torch's objects have besides."""
    names = [n for n in inherited(name) if n[0] != "_" or n not in dir(torch.optim.Optimizer)]
    works = {n: USES[n](ours(name)) for n in names}
    made, theirs = ours(name), of_torch(name)
    return works | {n: hasattr(made, n) for n in getattr(theirs, "__dict__", {}) if n[0] != "_"}


@pytest.mark.parametrize("name", MADE)
def test_what_is_inherited_works(pool: RankPool, name: str) -> None:
    (works,) = pool.run(1, walk, name)
    assert works
    assert all(works.values()), works


def ask_inside() -> list[str]:
    """Ask a sharded optimizer for everything that torch's has inside, and return the answers."""
    zero, theirs = ours("ZeroRedundancyOptimizer"), of_torch("ZeroRedundancyOptimizer")
    there = {*vars(zero), *vars(type(zero)), *dir(torch.optim.Optimizer)} - set(HIDDEN)
    inside = {*HIDDEN, *vars(theirs)} - there
    assert not any(hasattr(zero, name) for name in inside)
    answers = []
    for name in inside:
        with pytest.raises(AttributeError) as error:
            getattr(zero, name)
        answers.append(str(error.value))
    return answers


def test_torchs_inside_is_not_there_and_says_what_to_use(pool: RankPool) -> None:
    """Nothing of torch's code runs on an object that it did not make."""
    (said,) = pool.run(1, ask_inside)
    assert len(said) > len(HIDDEN) > 20
    assert all("not its inside; under DDP use loosestep.hook_with_zero_step" in s for s in said)


def give_to_torchs_hook() -> str:
    net = DistributedDataParallel(torch.nn.Linear(2, 1))
    zero = loosestep.ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(AttributeError) as error:
        torch_zero_hook.hook_with_zero_step(allreduce_hook, net, zero)
    return str(error.value)


def test_torchs_zero_hook_says_which_to_use(pool: RankPool) -> None:
    assert "use loosestep.hook_with_zero_step" in pool.run(1, give_to_torchs_hook)[0]


# PostLocalSGDState before there is a process group


def test_a_state_can_be_made_before_there_is_a_process_group() -> None:
    """Lightning takes it as an argument and makes the process group later."""
    assert not dist.is_initialized()
    state = PostLocalSGDState(None, None, 3)
    assert (state.process_group, state.subgroup, state.iter) == (None, None, 0)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_such_a_state_can_be_copied(way: str) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    }
    state = PostLocalSGDState(None, None, 3, False, clock=Clock(5))
    clone = ways[way](state)
    assert (clone.iter, clone.start_localSGD_iter, clone.subgroup) == (5, 3, None)
    assert clone.post_local_gradient_allreduce is False
    clone.iter = 7
    assert state.iter == (7 if way == "copy" else 5)  # a copy shares the clock, as it does all


def train_in_pairs(state: PostLocalSGDState | None) -> tuple[list[float], list[bool]]:
    """Return the gradients of two steps on hosts of two ranks, and where the subgroup was found."""
    rank, groups, gradients = dist.get_rank(), [], []

    def hook(state, bucket):  # DDP refuses annotations that are text
        future = post_localSGD_hook(state, bucket)
        groups.append(state.subgroup)
        return future

    with mock.patch.object(hook_module, "host_key", return_value=f"host {rank // 2}"):
        state = PostLocalSGDState(None, None, 1) if state is None else state
        found = [state.subgroup is not None]
        net = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
        for parameter in net.parameters():
            torch.nn.init.ones_(parameter)
        ddp = DistributedDataParallel(net, bucket_cap_mb=1e-6)
        ddp.register_comm_hook(state, hook)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 1), float(rank))).sum().backward()
            gradients.append(float(next(net.parameters()).grad))  # type: ignore[arg-type]
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(groups[0]) == pair
    found += [group is groups[0] for group in groups]  # from the first bucket on, and only once
    return gradients, found


@pytest.mark.parametrize("early", [True, False], ids=["before the group", "after"])
def test_the_subgroup_is_found_in_the_first_bucket_or_at_construction(
    pool: RankPool, early: bool
) -> None:
    """The first step takes the world's mean, 1.5, the next one that of a host, 0.5 or 2.5."""
    state = PostLocalSGDState(None, None, 1) if early else None
    results = pool.run(4, train_in_pairs, state)
    assert [gradients for gradients, _ in results] == [[1.5, 0.5]] * 2 + [[1.5, 2.5]] * 2
    for _, (at_construction, *in_buckets) in results:
        assert at_construction is not early
        assert len(in_buckets) >= 2
        assert all(in_buckets)
