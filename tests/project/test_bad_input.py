"""Bad input is refused at construction, on every rank, with the rule, the value and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    Strategy,
    Topology,
    attach,
    average_,
    ddp,
    hierarchical_sgd,
    post_local_sgd,
    schedules,
)
from loosestep.reducers import Cast
from loosestep.schedules import after, always, every, levels
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast

NO_GROUP_NEEDED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "period 0": (lambda: every(0), ["period", "0", ">= 1"]),
    "period negative": (lambda: every(-3), ["period", "-3", ">= 1"]),
    "period a float": (lambda: every(2.5), ["period", "2.5"]),  # type: ignore[arg-type]
    "period true": (lambda: every(True), ["period", "True"]),
    "no levels": (lambda: levels({}), ["empty", "world"]),
    "wrong order": (lambda: levels({"world": 8, "host": 4}), ["narrow", "8", "4", ">= 8"]),
    "start negative": (lambda: after(-1, every(2)), ["start", "-1", ">= 0"]),
    "level twice": (lambda: Topology({"a": [[0, 1], [1]]}), ["twice", "'a'"]),
    "level empty": (lambda: Topology({}), ["empty"]),
    "group empty": (lambda: Topology({"a": [[0], []]}), ["empty group"]),
    "other ranks": (
        lambda: Topology({"a": [[0, 1]], "b": [[0, 1, 2]]}),
        ["same ranks", "[0, 1, 2]"],
    ),
    "not nested": (
        lambda: Topology({"a": [[0, 1], [2]], "b": [[0], [1, 2]]}),
        ["nest", "[0, 1]"],
    ),
    "sizes not nested": (
        lambda: Topology.from_sizes({"host": 4, "rack": 6, "world": 12}, ranks=range(12)),
        ["nest", "6", "4", "host=3"],
    ),
    "size 0": (lambda: Topology.from_sizes({"host": 0}, ranks=range(2)), [">= 1", "0"]),
    "size too small": (
        lambda: Topology.from_sizes({"world": 2}, ranks=range(4)),
        ["all 4 ranks", "world=4"],
    ),
    "weights too few": (
        lambda: Topology({"a": [[0, 1]]}, weights=[1.0]),
        ["one weight a rank", "1", "2"],
    ),
    "weight 0": (lambda: Topology({"a": [[0, 1]]}, weights=[1.0, 0.0]), ["rank 1", "> 0"]),
    "weight nan": (lambda: Topology({"a": [[0]]}, weights=[float("nan")]), ["rank 0", "nan"]),
    "weights of others": (
        lambda: Topology({"a": [[0, 1]]}, weights={0: 1.0, 5: 1.0}),
        ["one weight a rank", "5"],
    ),
    "unknown policy": (
        lambda: Strategy(schedule=every(2), buffers="meen"),
        ["'mean'", "'broadcast'", "'meen'"],
    ),
    "cast to int": (lambda: Cast(torch.int8), ["floating", "int8"]),
    "schedule a number": (lambda: Strategy(schedule=4), ["schedule", "4", "every(8)"]),  # type: ignore[arg-type]
    "reducer a string": (
        lambda: Strategy(schedule=every(2), reducer="mean"),  # type: ignore[arg-type]
        ["reducer", "'mean'", "Mean()"],
    ),
    "no process group": (lambda: PeriodicModelAverager(4), ["init_process_group"]),
    "no process group, attach": (
        lambda: attach(torch.nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)]), ddp()),
        ["init_process_group"],
    ),
    "no process group, average": (lambda: average_([torch.zeros(1)]), ["init_process_group"]),
}


@pytest.mark.parametrize("case", NO_GROUP_NEEDED)
def test_refused_without_a_process_group(case: str) -> None:
    """What can be seen in one process is refused there."""
    make, words = NO_GROUP_NEEDED[case]
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


class Odd(schedules.Schedule):
    """A schedule without a name of its own."""

    def __call__(self, step: int) -> schedules.Due:
        return schedules.Due()

    def gradient_levels(self) -> frozenset[str]:
        return frozenset()

    def parameter_levels(self) -> frozenset[str]:
        return frozenset()


def test_a_part_without_a_repr_is_refused() -> None:
    """Ranks compare strategies by their text, which must not hold an address."""
    with pytest.raises(TypeError, match="frozen dataclass"):
        Strategy(schedule=Odd())


def net() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def with_sgd(module: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return module, sgd(module)


def attach_to(module: torch.nn.Module, strategy: Strategy) -> None:
    attach(module, sgd(module), strategy, timeout=10).detach()


class Empty(torch.nn.Module):
    """A model without a parameter."""


def frozen() -> torch.nn.Module:
    module = net()
    module.requires_grad_(False)
    return module


def sparse() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.eye(3).to_sparse())]


def quantised() -> list[torch.Tensor]:
    return [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)]


def two_devices() -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(3, device="meta")]


def foreign_hook() -> None:
    module = DistributedDataParallel(net())
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    module.register_comm_hook(None, allreduce_hook)
    attach_to(module, ddp())


def twice() -> None:
    module = DistributedDataParallel(net())
    optimizer = sgd(module)
    with attach(module, optimizer, ddp()):
        attach(module, optimizer, ddp())


def twice_plain() -> None:
    module = net()
    optimizer = sgd(module)
    with attach(module, optimizer, ddp()):
        attach(module, optimizer, ddp())


ON_RANKS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "periodic 0": (lambda: PeriodicModelAverager(0), ["period", "0"]),
    "periodic warm-up": (lambda: PeriodicModelAverager(2, -1), ["warmup_steps", "-1"]),
    "hierarchical empty": (lambda: HierarchicalModelAverager({}), ["empty"]),
    "hierarchical none": (lambda: HierarchicalModelAverager(), ["empty", "None"]),
    "hierarchical 0": (lambda: HierarchicalModelAverager({0: 1, 4: 2}), [">= 1", "got 0"]),
    "periodic a float": (lambda: PeriodicModelAverager(2.5), ["whole", "2.5"]),  # type: ignore[arg-type]
    "levels out of order": (
        lambda: attach_to(net(), hierarchical_sgd({"world": 4, "host": 8})),
        ["narrow to wide", "['host', 'world']"],
    ),
    "optimizer attached twice": (twice_plain, ["attached already", "detach"]),
    "weight 0, average": (lambda: average_([torch.ones(2)], weights=[0.0, 1.0]), ["> 0"]),
    "hierarchical order": (
        lambda: HierarchicalModelAverager({8: 1, 2: 2}),
        ["grow", "[8, 2]", "[2, 8]"],
    ),
    "hierarchical size": (lambda: HierarchicalModelAverager({2: 1, 4: 4}), ["4", "2"]),
    "hierarchical shrinks": (lambda: HierarchicalModelAverager({2: 2, 4: 1}), ["shrink"]),
    "hook negative": (lambda: PostLocalSGDState(None, None, -1), ["start_localSGD_iter", "-1"]),
    "unknown option": (
        lambda: PeriodicModelAverager(4, modul=None),  # type: ignore[call-arg]
        ["modul", "module"],
    ),
    "no optimizer": (
        lambda: PostLocalSGDOptimizer(net(), PeriodicModelAverager(4)),  # type: ignore[arg-type]
        ["optim", "Linear"],
    ),
    "no averager": (
        lambda: PostLocalSGDOptimizer(sgd(net()), 4),  # type: ignore[arg-type]
        ["averager", "int"],
    ),
    "attach no model": (lambda: attach(4, sgd(net()), ddp()), ["model", "int"]),  # type: ignore[arg-type]
    "attach no optimizer": (lambda: attach(net(), 4, ddp()), ["optimizer", "int"]),  # type: ignore[arg-type]
    "attach no strategy": (
        lambda: attach(net(), sgd(net()), every(4)),  # type: ignore[arg-type]
        ["strategy", "Levels", "post_local_sgd"],
    ),
    "unknown level": (
        lambda: attach_to(net(), hierarchical_sgd({"rack": 4, "world": 8})),
        ["'rack'", "['host', 'world']"],
    ),
    "unknown gradient level": (
        lambda: attach_to(net(), post_local_sgd(gradients="rack")),
        ["'rack'", "['host', 'world']"],
    ),
    "empty model": (lambda: attach(Empty(), sgd(net()), ddp()), ["nothing to average"]),
    "frozen model": (lambda: attach(frozen(), sgd(net()), ddp()), ["nothing to average"]),
    "sparse": (lambda: average_(sparse()), ["'tensor 0'", "sparse", "dense"]),
    "quantised": (lambda: average_(quantised()), ["quantised", "float"]),
    "integers": (lambda: average_([torch.ones(2, dtype=torch.int64)]), ["int64", "floating"]),
    "meta": (lambda: average_([torch.ones(2, device="meta")]), ["meta", "materialise"]),
    "two devices": (lambda: average_(two_devices()), ["meta"]),
    "nothing": (lambda: average_([]), ["nothing to average"]),
    "not a tensor": (lambda: average_([4]), ["tensor", "int"]),  # type: ignore[arg-type]
    "weights": (lambda: average_([torch.ones(2)], weights=[1.0]), ["one weight", "1", "2"]),
    "not a parameter": (
        lambda: PeriodicModelAverager(4).average_parameters([4]),  # type: ignore[arg-type]
        ["param_groups", "int"],
    ),
    "foreign hook": (foreign_hook, ["hook", "wrap the model anew"]),
    "attached twice": (twice, ["attached already", "detach"]),
    "gradients on an unknown level": (
        lambda: attach_to(net(), Strategy(schedule=always(gradients="x"))),
        ["'x'"],
    ),
    "a state of another version": (
        lambda: attach(*with_sgd(net()), ddp()).load_state_dict({"version": 0}),
        ["version", "0"],
    ),
}


def refused(case: str) -> str:
    """Return the text of the refusal."""
    make, _ = ON_RANKS[case]
    try:
        make()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("case", ON_RANKS)
def test_refused_on_every_rank(pool: RankPool, case: str) -> None:
    """Every rank gets the refusal, with the rule and the value in it."""
    for text in pool.run(2, refused, case, timeout=30):
        assert text != "accepted"
        assert all(word in text for word in ON_RANKS[case][1]), text


def outsider() -> str:
    group = dist.new_group([0])
    try:
        average_([torch.ones(1)], group)
    except (ValueError, TypeError) as error:
        return str(error)
    return "fine"


def test_only_members_average(pool: RankPool) -> None:
    """A rank outside the group is told so."""
    inside, outside = pool.run(2, outsider)
    assert inside == "fine"
    assert "rank 1 is not in the group" in outside
