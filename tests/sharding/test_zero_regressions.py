"""What a review of the sharded optimizer found, each with the behaviour that was wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    NotAttachable,
    Topology,
    ZeroOptions,
    ZeroRedundancyOptimizer,
    attach,
    hook_with_zero_step_interleaved,
    post_local_sgd,
    zero,
)
from loosestep.sharding.divided import DividedGradient
from loosestep.sharding.kinds import kind_of
from loosestep.testing import RankPool, run_ranks


def sharded(parameters: Any, **settings: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **{"lr": 1.0, **settings})


def clip_a_turned_gradient() -> float:
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    weight.grad = torch.full((3, 4), 100.0).t()
    sharded([weight], zero_options=ZeroOptions(clip_norm=1.0)).step()
    return float(weight.detach().norm())


def test_gradients_with_other_strides_are_clipped_too(pool: RankPool) -> None:
    """A clip norm holds for a gradient that lies otherwise in memory than its parameter."""
    assert pool.run(2, clip_a_turned_gradient) == [pytest.approx(1.0)] * 2


def train_locally_later() -> str:
    net = torch.nn.Linear(2, 2)
    optimizer = sharded(net.parameters())
    strategy = post_local_sgd(8, warmup_steps=5000, gradients=None)
    with attach(net, optimizer, strategy) as run:
        run.load_state_dict(run.state_dict() | {"clock": {"step": 5001}})
        try:
            net(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_a_late_local_phase_is_refused(pool: RankPool) -> None:
    """A schedule that shares no gradients after thousands of steps raises there."""
    assert all("stay local" in text for text in pool.run(2, train_locally_later))


def attach_twice_with_a_scaler(declared: bool, enabled: bool) -> list[float]:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    options = ZeroOptions(scaler=scaler if declared else None)
    optimizer = sharded(net.parameters(), zero_options=options)
    seen = []
    for _ in range(2):
        with attach(net, optimizer, zero(), scaler=scaler):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(1, 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append(net.weight.item())
    left = set(vars(scaler)) & {"step", "update"}
    assert not left
    return seen


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_a_scaler_survives_detaching(pool: RankPool, declared: bool, enabled: bool) -> None:
    """Attached a second time, gradients are unscaled as they were the first time."""
    assert pool.run(2, attach_twice_with_a_scaler, declared, enabled) == [[-1.0, -2.0]] * 2


def another_scaler() -> str:
    net = torch.nn.Linear(1, 1)
    one, other = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    optimizer = sharded(net.parameters(), zero_options=ZeroOptions(scaler=one))
    try:
        attach(net, optimizer, zero(), scaler=other)
    except NotAttachable as error:
        return str(error)
    return "nothing"


def test_two_scalers_are_refused(pool: RankPool) -> None:
    """The optimizer and attach must be given the same scaler."""
    assert all("another GradScaler" in text for text in pool.run(2, another_scaler))


def train_complex() -> complex:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    net = torch.nn.ParameterList([weight])
    topology = Topology({"world": [[0, 1]]}, weights=[1.0, 3.0])
    with attach(net, sharded(net.parameters()), zero(topology=topology)):
        (weight * (1 + 2j) * (1 + dist.get_rank())).real.sum().backward()
        # The gradient of Re(w z) is conj(z): (1 - 2j) and 2 (1 - 2j), weighted 1 to 3.
        assert isinstance(weight.grad, DividedGradient)
    optimizer = sharded(net.parameters())
    with attach(net, optimizer, zero(topology=topology)):
        (weight * (1 + 2j) * (1 + dist.get_rank())).real.sum().backward()
        optimizer.step()
    return complex(weight[0].item())


def test_weighted_complex_gradients_keep_both_parts(pool: RankPool) -> None:
    """Sums of complex numbers are complex: -(1 * (1 - 2j) + 3 * (2 - 4j)) / 4 = -1.75 + 3.5j."""
    assert pool.run(2, train_complex) == [-1.75 + 3.5j] * 2


def test_the_users_word_is_about_elements_only() -> None:
    """A class that is said to be elementwise may still count its steps: it is stepped once."""

    class Counting(torch.optim.SGD):
        pass

    assert not kind_of(Counting, elementwise=True).by_parameter


def refuse_then_step() -> float:
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, allreduce_hook)
    optimizer = sharded(model.parameters())
    with pytest.raises(NotAttachable):
        attach(model, optimizer, zero())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return net.weight.item()


def test_a_refused_attach_leaves_the_optimizer_alone(pool: RankPool) -> None:
    """After a refusal the optimizer steps with ``param.grad`` as before."""
    assert pool.run(2, refuse_then_step) == [-1.0, -1.0]


def add_after_attach() -> str:
    net = torch.nn.Linear(2, 2)
    optimizer = sharded(net.parameters())
    with attach(net, optimizer, zero()):
        late = torch.nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [late]})
        (net(torch.ones(1, 2)).sum() + late.sum()).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_parameters_added_after_attach_are_not_forgotten(pool: RankPool) -> None:
    """A gradient that nobody shared is an error and not a parameter that never moves."""
    assert all("have not been shared" in text for text in pool.run(2, add_after_attach))


def write_turned(folder: str) -> str:
    def make(layout: torch.memory_format) -> ZeroRedundancyOptimizer:
        net = torch.nn.Conv2d(4, 8, 3)
        net.weight.data = net.weight.data.contiguous(memory_format=layout)
        optimizer = sharded(net.named_parameters(), momentum=0.9)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    save({"o": make(torch.channels_last).sharded_state()}, checkpoint_id=folder)
    try:
        load({"o": make(torch.contiguous_format).sharded_state()}, checkpoint_id=folder)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_checkpoint_of_another_memory_format_is_refused(tmp_path: Path) -> None:
    """Slices of channels_last weights are no slices of contiguous ones."""
    assert all("same memory format" in text for text in run_ranks(2, write_turned, str(tmp_path)))


def hang_in_many_buckets() -> float:
    layers = [torch.nn.Linear(40, 40) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.004)
    options = ZeroOptions(timeout=1.5)
    optimizer = sharded(model.parameters(), overlap_with_ddp=True, zero_options=options)
    hook = hook_with_zero_step_interleaved(allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    for _ in range(2):
        model(torch.ones(1, 40)).sum().backward()
    if dist.get_rank() == 1:
        time.sleep(4)
        return 0.0
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 40)).sum().backward()
    del hook, model, optimizer
    return time.monotonic() - began


def test_one_time_out_is_enough() -> None:
    """After a bucket's step has failed the others give up at once, so the process can end."""
    began = time.monotonic()
    seconds = run_ranks(2, hang_in_many_buckets)[0]
    assert seconds < 4
    assert time.monotonic() - began < 25


def clip_under_join() -> str:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = sharded(model.parameters())
    with Join([model, optimizer]):
        model(torch.ones(1, 2)).sum().backward()
        try:
            optimizer.clip_grad_norm_(1.0)
        except RuntimeError as error:
            text = str(error)
        optimizer.step()
    return text


def test_clipping_under_join_is_refused(pool: RankPool) -> None:
    """Ranks without batches would not take part."""
    assert all("ZeroOptions(clip_norm" in text for text in pool.run(2, clip_under_join))


def add_on_one_rank() -> str:
    weight = torch.nn.Parameter(torch.zeros(20))
    optimizer = sharded([weight], zero_options=ZeroOptions(timeout=1.5))
    for step in range(2):
        weight.grad = torch.ones(20)
        if step == 1 and dist.get_rank() == 0:
            late = torch.nn.Parameter(torch.zeros(3), requires_grad=True)
            late.grad = torch.ones(3)
            optimizer.add_param_group({"params": [late]})
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_a_group_added_on_one_rank_is_an_error() -> None:
    """It neither hangs nor ends the process; who gives up first names the other."""
    first, second = sorted(run_ranks(2, add_on_one_rank), key=lambda text: "lost" not in text)
    assert "lost rank" in first
    assert "lost rank" in second or "the others gave this rank up" in second


def scale_an_empty_parameter() -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    empty, weight = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(1))
    options = ZeroOptions(scaler=scaler)
    optimizer = sharded([empty, weight], zero_options=options)
    scaler.scale(weight.sum() + empty.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.item()


def test_empty_parameters_can_be_scaled(pool: RankPool) -> None:
    """A parameter without elements has no infinite gradient."""
    assert pool.run(2, scale_an_empty_parameter) == [-1.0, -1.0]


class Remembering(torch.optim.Optimizer):
    """Steps by the sum of this gradient and the last one, which it keeps."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + self.state[p].get("last", torch.zeros_like(p)))
                    self.state[p]["last"] = p.grad


def remember() -> tuple[float, float]:
    ends = []
    for kind in ("plain", "sharded"):
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        optimizer: torch.optim.Optimizer = Remembering(net.parameters())
        strategy: Any = None
        if kind == "sharded":
            optimizer = ZeroRedundancyOptimizer(net.parameters(), Remembering)
            strategy = attach(net, optimizer, zero())
        for step in range(4):
            optimizer.zero_grad()
            net(torch.full((1, 1), 1.0 + step)).sum().backward()
            optimizer.step()
        if strategy is not None:
            strategy.detach()
        ends.append(net.weight.item())
    return ends[0], ends[1]


def test_an_optimizer_may_keep_its_gradients(pool: RankPool) -> None:
    """What a class of the user's keeps of a gradient is not overwritten."""
    for plain, ours in pool.run(2, remember):
        assert plain == ours
