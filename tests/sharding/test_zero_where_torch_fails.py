"""Sharded optimizers, at ``step()`` and inside DDP's backward; each control shows torch failing."""

from __future__ import annotations

import copy
import importlib
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loosestep.sharding import hooks as our_hooks
from loosestep.sharding.optimizer import ZeroRedundancyOptimizer
from loosestep.testing import RankPool
from tests.support.defects import attempt, both, torch_fails

BUCKET_MB = 0.001  # less than a layer's gradients


def make_zero(name: str, parameters: Any, cls: Any = torch.optim.Adam, **options: Any) -> Any:
    """Return torch's sharded optimizer or ours."""
    if name == "torch":
        torchs = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        return torchs(parameters, cls, **{"lr": 0.1, **options})
    return ZeroRedundancyOptimizer(parameters, cls, **{"lr": 0.1, **options})


def make_hook(name: str, kind: str, ddp: Any, zero: Any) -> Any:
    if name != "torch":
        return getattr(our_hooks, kind)(allreduce_hook, ddp, zero)
    package = "torch.distributed.algorithms.ddp_comm_hooks"
    hooks = importlib.import_module(f"{package}.ddp_zero_hook")
    return getattr(hooks, kind)(allreduce_hook, ddp, zero)


def layers(count: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(count)))


class Overlap:
    """A DDP model whose backward takes the step; torch's refusal of Gloo is stepped over."""

    def __init__(
        self,
        name: str,
        kind: str = "hook_with_zero_step",
        *,
        group: Any = None,
        groups: Any = None,
        bucket_mb: float = BUCKET_MB,
        **ddp: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(
            layers(), process_group=group, bucket_cap_mb=bucket_mb, **ddp
        )
        parameters = self.ddp.parameters() if groups is None else groups(self.ddp)
        self.zero = make_zero(name, parameters, overlap_with_ddp=True, process_group=group)
        with mock.patch.object(dist, "get_backend", return_value="stepped over"):
            hook = make_hook(name, kind, self.ddp, self.zero)
        self.ddp.register_comm_hook(group, hook)

    def iterate(self) -> bool:
        """Return whether parameters have moved."""
        before = [parameter.detach().clone() for parameter in self.ddp.parameters()]
        self.zero.zero_grad()
        self.ddp(torch.ones(2, 20)).pow(2).sum().backward()
        pairs = zip(before, self.ddp.parameters(), strict=True)
        return any(not torch.equal(a, b) for a, b in pairs)


def state_size(optimizer: Any) -> int:
    """Return how many elements of state there are on this rank, step counts aside."""
    tensors = [t for state in optimizer.optim.state.values() for t in state.values()]
    return sum(t.numel() for t in tensors if isinstance(t, torch.Tensor) and t.numel() > 1)


# Inside backward.


def register_with_gloo(name: str, kind: str) -> bool:
    ddp = DistributedDataParallel(layers())
    zero = make_zero(name, ddp.parameters(), overlap_with_ddp=True)
    return callable(make_hook(name, kind, ddp, zero))


@both
@pytest.mark.parametrize("kind", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_gloo_can_overlap(pool: RankPool, name: str, kind: str):
    """Both hooks work with Gloo, so on CPUs."""
    with torch_fails(name, "may meet hangs"):
        assert pool.run(2, attempt, name, register_with_gloo, kind) == [True, True]


def interleave(name: str) -> bool:
    overlap = Overlap(name, "hook_with_zero_step_interleaved")
    # In-tree it is a race: a few iterations may pass.
    return all([overlap.iterate() for _ in range(100)][3:])


@both
def test_interleaved_steps_do_not_deadlock(pool: RankPool, name: str):
    """With several buckets nobody waits for a broadcast on the thread that has to do it."""
    with torch_fails(name, "did not answer|[Tt]imed? ?out|broadcast handle"):
        assert all(pool.run(2, interleave, name, group_timeout=3.0, timeout=20.0))


def move(name: str, static_graph: bool) -> list[bool]:
    overlap = Overlap(name, static_graph=static_graph)
    return [overlap.iterate() for _ in range(5)]


@both
@pytest.mark.parametrize("static_graph", [False, True])
def test_every_iteration_steps(pool: RankPool, name: str, static_graph: bool):
    """The first iterations, before DDP has settled its buckets, are steps like all others."""
    with torch_fails(name, "False, False"):
        assert pool.run(2, move, name, static_graph) == [[True] * 5] * 2


def make_with(name: str, cls: str) -> str:
    parameters = layers().parameters()
    zero = make_zero(name, parameters, getattr(torch.optim, cls), overlap_with_ddp=True)
    return type(zero).__name__


@both
@pytest.mark.parametrize("cls", ["NAdam", "RAdam", "ASGD", "Adafactor"])
def test_any_optimizer_can_overlap(pool: RankPool, name: str, cls: str):
    """A step inside backward is not for a list of optimizers only."""
    with torch_fails(name, "functional optimizer"):
        assert pool.run(1, attempt, name, make_with, cls) == ["ZeroRedundancyOptimizer"]


def two_groups(ddp: torch.nn.Module) -> list[dict[str, Any]]:
    first, *others = ddp.parameters()
    return [{"params": [first], "lr": 0.2}, {"params": others}]


def train_two_groups(name: str) -> list[bool]:
    overlap = Overlap(name, groups=two_groups)
    return [overlap.iterate() for _ in range(5)][3:]


@both
def test_parameter_groups_can_overlap(pool: RankPool, name: str):
    """Two parameter groups train, and do not fail in the backward of a later iteration."""
    with torch_fails(name, "single parameter group"):
        assert pool.run(2, attempt, name, train_two_groups) == [[True, True]] * 2


def train_subgroup(name: str) -> list[bool]:
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return []
    overlap = Overlap(name, group=group)
    return [overlap.iterate() for _ in range(6)][3:]


@both
def test_a_subgroup_is_stepped(pool: RankPool, name: str):
    """Ranks are counted inside their group: one that does not begin at rank 0 trains."""
    with torch_fails(name, "False, False"):
        seen = pool.run(4, train_subgroup, name, group_timeout=5.0, timeout=20.0)
        assert seen == [[], [], [True] * 3, [True] * 3]


def overlapped_state(name: str) -> int:
    overlap = Overlap(name, bucket_mb=25)
    for _ in range(5):
        overlap.iterate()
    return state_size(overlap.zero)


@both
def test_one_bucket_is_divided(pool: RankPool, name: str):
    """A model of one DDP bucket does not put all state on rank 0."""
    with torch_fails(name, "assert"):
        sizes = pool.run(2, overlapped_state, name)
        assert max(sizes) < 0.6 * sum(sizes), sizes


def load_first(name: str) -> float:
    model = layers()
    plain = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(2, 20)).sum().backward()
    plain.step()
    overlap = Overlap(name)
    overlap.zero.load_state_dict(plain.state_dict())
    lr: float = overlap.zero.param_groups[0]["lr"]
    return lr


@both
def test_state_can_be_loaded_before_training(pool: RankPool, name: str):
    """A checkpoint is loaded before the first iteration, when it is needed."""
    with torch_fails(name, "fully initialized"):
        assert pool.run(2, attempt, name, load_first) == [0.5, 0.5]


def clip_too_late(name: str) -> str:
    overlap = Overlap(name)
    moved = [overlap.iterate() for _ in range(4)][-1]
    try:
        torch.nn.utils.clip_grad_norm_(overlap.ddp.parameters(), 1e-9)
    except RuntimeError as error:
        return str(error)
    return f"clipped nothing, moved: {moved}"


@both
def test_clipping_after_the_step_is_an_error(pool: RankPool, name: str):
    """Clipping gradients that the step has used already does not pass in silence."""
    with torch_fails(name, "clipped nothing"):
        for text in pool.run(2, clip_too_late, name):
            assert "ZeroOptions(clip_norm=1.0)" in text


# At step().


def make_mixed(name: str) -> str:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    parameters = [torch.nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in dtypes]
    zero = make_zero(name, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    return str(sorted({float(parameter.detach()[0]) < 1.0 for parameter in parameters}))


@both
def test_dtypes_may_differ(pool: RankPool, name: str):
    """Parameters of several dtypes are sharded together."""
    with torch_fails(name, "same dense type"):
        assert pool.run(2, attempt, name, make_mixed) == ["[True]"] * 2


def uneven_state(name: str) -> int:
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3000, 64, 64, 64)]
    zero = make_zero(name, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    return state_size(zero)


@both
def test_one_large_parameter_is_divided(pool: RankPool, name: str):
    """State is balanced however large a single parameter is, as embeddings are."""
    with torch_fails(name, "assert"):
        sizes = pool.run(4, uneven_state, name)
        assert max(sizes) < 1.1 * sum(sizes) / 4, sizes


def load_and_compare(name: str) -> bool:
    model = layers()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 20)).sum().backward()
    plain.step()
    given = plain.state_dict()
    before = copy.deepcopy(given)
    make_zero(name, layers().parameters()).load_state_dict(given)
    same = given["state"].keys() == before["state"].keys()
    return same and all(
        given["state"][i] is not None and torch.equal(given["state"][i]["exp_avg"], s["exp_avg"])
        for i, s in before["state"].items()
    )


@both
def test_loading_leaves_the_given_state_alone(pool: RankPool, name: str):
    """The dict that is loaded belongs to the caller, who may load it again."""
    with torch_fails(name, "assert"):
        assert pool.run(2, load_and_compare, name) == [True, True]


def move_elsewhere(name: str) -> float:
    """Give a parameter other memory, as averaging by assignment does, and step."""
    parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(2)]
    options = {"parameters_as_bucket_view": True, "lr": 1.0}
    zero = make_zero(name, parameters, torch.optim.SGD, **options)
    for parameter in parameters:
        parameter.data = parameter.data.clone()
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    return float(torch.stack([parameter.detach().mean() for parameter in parameters]).mean())


@both
def test_parameters_may_get_other_memory(pool: RankPool, name: str):
    """Parameters whose data was replaced are stepped on all ranks, not what they once were."""
    with torch_fails(name, "-0.5"):
        assert pool.run(2, move_elsewhere, name) == [-1.0, -1.0]


def mark() -> str:
    os.environ["LOOSESTEP_TEST"] = "ran"
    return "ran"


class Payload:
    """Leaves a mark in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return mark, ()


def consolidate(name: str) -> bool:
    """Return whether code that came with another rank's state has run here."""
    parameters = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    zero = make_zero(name, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    zero.step()
    for state in zero.optim.state.values():
        state["note"] = Payload()
    os.environ.pop("LOOSESTEP_TEST", None)
    try:
        zero.consolidate_state_dict(to=0)
    except TypeError:
        assert name != "torch"
    return os.environ.pop("LOOSESTEP_TEST", "") == "ran"


@both
def test_consolidation_runs_no_code(pool: RankPool, name: str):
    """Another rank's state is data: to collect it runs nothing that it brings along."""
    with torch_fails(name, "True"):
        assert pool.run(2, consolidate, name) == [False, False]
