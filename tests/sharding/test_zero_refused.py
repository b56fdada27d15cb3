"""What a sharded optimizer refuses, with the rule, the value and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from loosestep import RankMismatch, ZeroOptions, ZeroRedundancyOptimizer
from loosestep.testing import RankPool, run_ranks
from tests.support.zero_case import OwnSign

pytestmark = pytest.mark.fast

optim = torch.optim


def zero(params: Any, kind: Any = optim.SGD, *args: Any, **settings: Any) -> Any:
    return ZeroRedundancyOptimizer(params, kind, *args, **{"lr": 0.1, **settings})


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape or (4, 3)))


def expanded() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(4, 1).expand(4, 3))


def added_in_backward() -> None:
    zero([weight()], overlap_with_ddp=True).add_param_group({"params": [weight()]})


def other_memory_format() -> None:
    parameter = weight(2, 3, 5, 5)
    optimizer = zero([parameter])
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def clipped_by_order_0() -> None:
    parameter = weight()
    parameter.grad = torch.zeros_like(parameter)
    zero([parameter]).clip_grad_norm_(1.0, norm_type=0)


def closure_in_backward() -> None:
    zero([weight()], overlap_with_ddp=True).step(lambda: 0.0)


CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "not a class": (lambda: zero([weight()], "SGD"), ["subclass", "'SGD'", "AdamW"]),
    "not an optimizer": (lambda: zero([weight()], dict), ["subclass", "dict"]),
    "an instance": (
        lambda: zero([weight()], optim.SGD([weight()], lr=0.1)),
        ["subclass", "SGD (", "give the class"],
    ),
    "LBFGS": (lambda: zero([weight()], optim.LBFGS), ["LBFGS", "history", "unsharded"]),
    "SparseAdam": (lambda: zero([weight()], optim.SparseAdam), ["SparseAdam", "sparse"]),
    "Muon sliced": (
        lambda: zero([weight()], optim.Muon, zero_options=ZeroOptions(elementwise=True)),
        ["Muon", "whole matrices", "leave"],
    ),
    "Muon with a vector": (lambda: zero([weight(3)], optim.Muon), ["2D", "[3]"]),
    "no parameters": (lambda: zero([]), ["empty parameter list"]),
    "sparse": (lambda: zero([torch.eye(3).to_sparse()]), ["'0'", "sparse_coo", "only dense"]),
    "meta": (lambda: zero([torch.empty(3, device="meta")]), ["'0'", "meta", "materialise"]),
    "expanded": (lambda: zero([expanded()]), ["'0'", "(4, 3)", "(1, 0)", ".contiguous()"]),
    "expanded, named": (lambda: zero([("fc.weight", expanded())]), ["'fc.weight'"]),
    "expanded, added": (
        lambda: zero([weight()]).add_param_group({"params": [expanded()]}),
        [".contiguous()"],
    ),
    "added in backward": (added_in_backward, ["overlap_with_ddp=True", "anew"]),
    "other memory format": (other_memory_format, ["(2, 3, 5, 5)", "strides", "before making it"]),
    "order 0": (clipped_by_order_0, ["norm_type", "> 0", "0"]),
    "closure in backward": (closure_in_backward, ["inside backward", "call backward"]),
    "hooks without overlap": (
        lambda: zero([weight()]).in_backward,
        ["step()", "overlap_with_ddp=True"],
    ),
    "not a group": (lambda: zero([weight()], optim.SGD, "gloo"), ["process_group", "'gloo'"]),
    "clip norm 0": (lambda: ZeroOptions(clip_norm=0.0), ["clip_norm", "> 0", "0.0", "None"]),
    "clip norm true": (lambda: ZeroOptions(clip_norm=True), ["clip_norm", "True"]),
    "clip norm nan": (lambda: ZeroOptions(clip_norm=torch.nan), ["clip_norm", "nan"]),
    "norm type": (lambda: ZeroOptions(norm_type=-1), ["norm_type", "-1", "inf"]),
    "timeout": (lambda: ZeroOptions(timeout=-2), ["timeout", "-2"]),
    "scaler": (lambda: ZeroOptions(scaler=8), ["GradScaler", "int"]),  # type: ignore[arg-type]
}


def messages() -> dict[str, str]:
    said = {}
    for name, (action, _) in CASES.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            action()
        said[name] = str(error.value)
    return said


def test_bad_input(pool: RankPool) -> None:
    """Every rank refuses, whichever of them would own the parameter."""
    for said in pool.run(2, messages):
        for name, (_, words) in CASES.items():
            assert all(word in said[name] for word in words), said[name]


def test_no_process_group() -> None:
    """Without a process group the error says how to make one."""
    with pytest.raises((ValueError, RuntimeError), match="init_process_group"):
        zero([weight()])


def outside() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        zero([weight()], optim.SGD, group)
        return "rank 1"
    with pytest.raises(ValueError, match="process_group") as error:
        zero([weight()], optim.SGD, group)
    return str(error.value)


def test_a_rank_outside_the_group(pool: RankPool) -> None:
    """Only members of the group make the optimizer."""
    assert all("rank 1" in message for message in pool.run(2, outside))


def sharded_already() -> str:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError) as error:
        zero([torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh))])
    return str(error.value)


def test_dtensors() -> None:
    """FSDP2's parameters are sharded already."""
    assert all("DTensor" in message for message in run_ranks(2, sharded_already))


DIFFERENT: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "shape": (lambda rank: zero([weight(3 + rank)]), ["(3,)", "(4,)"]),
    "number": (lambda rank: zero([weight() for _ in range(1 + rank)]), ["nothing more"]),
    "lr": (lambda rank: zero([weight()], lr=0.1 + rank), ["lr=0.1 ", "lr=1.1 "]),
    "momentum": (lambda rank: zero([weight()], momentum=rank / 2), ["momentum=0.5"]),
    "class": (
        lambda rank: zero([weight()], [OwnSign, optim.SGD, optim.SGD][rank]),
        ["OwnSign", "SGD"],
    ),
    "frozen": (
        lambda rank: zero([weight().requires_grad_(rank == 0)]),
        ["trained", "frozen"],
    ),
    "clipping": (
        lambda rank: zero([weight()], zero_options=ZeroOptions(clip_norm=1.0 + rank)),
        ["clip_norm=1.0", "clip_norm=2.0"],
    ),
}


def disagree() -> dict[str, str]:
    said = {}
    for name, (make, _) in DIFFERENT.items():
        optimizer = make(dist.get_rank())
        for parameter in optimizer.parameters:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RankMismatch) as error:
            optimizer.step()
        assert not any(parameter.any() for parameter in optimizer.parameters)
        said[name] = str(error.value)
    return said


def test_ranks_that_differ(pool: RankPool) -> None:
    """At the first step every rank says who has what, and nothing has been changed."""
    for said in pool.run(3, disagree):
        for name, (_, words) in DIFFERENT.items():
            assert all(word in said[name] for word in [*words, "build the same"]), said[name]
