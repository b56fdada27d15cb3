"""What users of torch's own sharded optimizer rely on beside its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import NotShardable, ZeroRedundancyOptimizer
from loosestep.testing import RankPool

pytestmark = pytest.mark.fast


class Curious(torch.optim.SGD):
    """Takes one argument more, and adds a setting at its first step."""

    def step(self, closure: Any = None, *, seen: list[Any], factor: float = 1.0) -> Any:  # type: ignore[override]
        seen.append(closure)
        for group in self.param_groups:
            group["factor"] = factor
        return super().step(closure if callable(closure) else None)


class Deaf(torch.optim.SGD):
    """Never calls its closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def arguments_of_step() -> dict[str, bool]:
    weight = torch.nn.Parameter(torch.ones(40))
    optimizer = ZeroRedundancyOptimizer([weight], Curious, lr=0.1)
    seen: list[Any] = []
    weight.grad = torch.ones_like(weight)
    optimizer.step(seen=seen, factor=2.0)
    optimizer.step(0, seen=seen)  # type: ignore[arg-type]
    twice = torch.full_like(weight, 0.8)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return float(loss)

    after_two = weight.detach().clone()
    loss = optimizer.step(closure, seen=seen, factor=3.0)
    return {
        "handed on": seen[:2] == [None, 0] and callable(seen[2]),
        "stepped twice": torch.allclose(after_two, twice),
        "loss": loss == pytest.approx(32.0),
        "stepped by the closure": torch.allclose(weight.detach(), torch.full_like(weight, 0.7)),
        "settings": optimizer.param_groups[0]["factor"] == 3.0,
    }


def refused_steps() -> list[str]:
    said = []
    weight = torch.nn.Parameter(torch.ones(40))
    for make, arguments in (
        (lambda: ZeroRedundancyOptimizer([weight], Deaf, lr=0.1), {"closure": lambda: 0.0}),
        (
            lambda: ZeroRedundancyOptimizer([weight], Curious, overlap_with_ddp=True, lr=0.1),
            {"seen": []},
        ),
        (lambda: ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1), {"seen": []}),
    ):
        with pytest.raises((RuntimeError, TypeError)) as error:
            make().step(**arguments)
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("world", [1, 3])
def test_arguments_of_step_reach_the_wrapped_optimizer(pool: RankPool, world: int) -> None:
    """``step(closure, **kwargs)`` hands over what it does not know; what cannot be is said."""
    for result in pool.run(world, arguments_of_step):
        assert all(result.values()), result
    for deaf, overlapped, unknown in pool.run(world, refused_steps):
        assert "never called its closure" in deaf
        assert "come too late" in overlapped
        assert "unexpected keyword argument 'seen'" in unknown


def state_by_parameter() -> dict[str, bool]:
    """Look parameters' state up, with the world as the group and with this rank alone."""
    result: dict[str, bool] = {}
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for name, group in (("alone", alone), ("sharded", None)):
        torch.manual_seed(0)
        net = torch.nn.Linear(30, 20)
        twin = torch.nn.Linear(30, 20)
        twin.load_state_dict(net.state_dict())
        plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, process_group=group, lr=0.1
        )
        for model, stepped in ((net, optimizer), (twin, plain)):
            model(torch.ones(1, 30)).square().sum().backward()
            stepped.step()
        found, expected = optimizer.optim.state[net.weight], plain.state[twin.weight]
        result[f"{name}: step"] = bool(found["step"] == expected["step"])
        size = optimizer.state[net.weight]["exp_avg"].numel()
        result[f"{name}: part"] = (size == 600) == (name == "alone")
        if name == "alone":
            result["values"] = torch.equal(found["exp_avg"], expected["exp_avg"])
            optimizer.consolidate_state_dict()
            optimizer.load_state_dict(optimizer.state_dict())
            again = optimizer.optim.state[net.weight]["exp_avg"]
            result["loaded"] = torch.equal(again, expected["exp_avg"])
        copied = copy.deepcopy(optimizer.optim).state
        result[f"{name}: copied"] = len(copied) == len(optimizer.state)
        result[f"{name}: nothing added"] = len(optimizer.state) == len(optimizer.shards.of)
        try:
            found["exp_avg"] = 0
        except TypeError:
            result[f"{name}: for reading only"] = True
    return result


def test_state_is_found_by_the_parameter(pool: RankPool) -> None:
    """A parameter finds its state, shaped like itself where this rank owns all of it."""
    for result in pool.run(2, state_by_parameter):
        assert len(result) == 12, result
        assert all(result.values()), result


UNDIVIDED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "expanded": lambda: torch.zeros(4, 1).expand(4, 3),
}


def refused_tensors() -> int:
    for make in UNDIVIDED.values():
        for first in ([], [torch.zeros(1)]):
            for kind in (ValueError, TypeError, NotShardable):
                with pytest.raises(kind):
                    ZeroRedundancyOptimizer([*first, make()], torch.optim.SGD, lr=0.1)
    return len(UNDIVIDED)


def test_what_cannot_be_sharded_raises_what_torch_raises(pool: RankPool) -> None:
    """``except ValueError`` catches it, and ``except TypeError`` as before."""
    assert pool.run(2, refused_tensors) == [3, 3]
