"""What a sync does with the mean: outer optimizers, their anchors and state."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LinearLR

from loosestep import Strategy, Topology, attach, ddp, diloco, hierarchical_sgd, snoo
from loosestep.outer import Outer, nesterov, slowmo
from loosestep.reducers import ErrorFeedback, Int4, Mean, Reducer
from loosestep.schedules import every, levels
from loosestep.sync.outer_steps import OuterState
from loosestep.testing import RankPool
from tests.support.oracle import equal, exact_mean, loss_of, make_net, sgd, snapshot

# By hand: one weight on two ranks; rank 1 adds what it is told at every step, rank 0 nothing.


def walk(strategy: Strategy, sizes: list[float], lr: float = 1.0) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=lr)
    seen = []
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy) as run:
        for size in sizes:
            weight.grad = torch.full((1,), -size * dist.get_rank())
            optimizer.step()
            seen.append(float(weight))
        run.finalize()
    return seen


def test_sign_and_scale_by_hand(pool: RankPool) -> None:
    """The pseudo-gradient is anchor - mean, and SGD goes against it."""
    # Anchor 0, replicas at 0 and 4, mean 2: gradient -2, so 0 + 0.5 * 2 = 1. Then replicas at 1 and
    # 5, mean 3: gradient 1 - 3 = -2, so 1 + 0.5 * 2 = 2.
    strategy = diloco(2, outer=Outer(torch.optim.SGD, lr=0.5))
    zero, one = pool.run(2, walk, strategy, [2.0] * 4)
    assert zero == [0, 1, 1, 2]
    assert one == [2, 1, 3, 2]


def test_nesterov_by_hand(pool: RankPool) -> None:
    """Buffer b = 0.5 b + g, step against g + 0.5 b, at a rate of 0.5."""
    # g = -2, b = -2: 0 + 0.5 * (2 + 1) = 1.5. Replicas at 1.5 and 5.5, mean 3.5: g = -2,
    # b = -1 - 2 = -3: 1.5 + 0.5 * (2 + 1.5) = 3.25.
    zero, one = pool.run(2, walk, diloco(2, outer=nesterov(0.5, 0.5)), [2.0] * 4)
    assert zero == [0, 1.5, 1.5, 3.25]
    assert one == [2, 1.5, 3.5, 3.25]


def test_slow_momentum_by_hand(pool: RankPool) -> None:
    """Heavy ball: b = 0.5 b + g, step against b, at a rate of 1."""
    # g = -2, b = -2: 2. Replicas at 2 and 6, mean 4: g = -2, b = -1 - 2 = -3: 2 + 3 = 5.
    zero, one = pool.run(2, walk, diloco(2, outer=slowmo(1.0, 0.5)), [2.0] * 4)
    assert zero == [0, 2, 2, 5]
    assert one == [2, 2, 4, 5]


def test_the_rate_follows_a_schedule(pool: RankPool) -> None:
    """Counted in syncs: 0.25, then 0.5 on the way to 0.75 in all of it."""
    warm = partial(LinearLR, start_factor=0.25, end_factor=0.75, total_iters=2)
    strategy = diloco(1, outer=Outer(torch.optim.SGD, lr=1.0, scheduler=warm))
    # Every sync the replicas are a and a + 4, so the mean leads by 2 times the rate.
    zero, _ = pool.run(2, walk, strategy, [4.0] * 4)
    assert zero == [0.5, 1.5, 3.0, 4.5]


def test_a_rate_of_0_is_safe_on_either_side(pool: RankPool) -> None:
    """Outside nothing moves; inside there is nothing to move."""
    assert pool.run(2, walk, diloco(2, outer=nesterov(0.0)), [2.0] * 4) == [
        [0, 0, 0, 0],
        [2, 0, 2, 0],
    ]
    still = pool.run(2, walk, diloco(2), [2.0] * 4, 0.0)
    assert still == [[0.0] * 4] * 2


def test_levels_have_outer_optimizers_of_their_own(pool: RankPool) -> None:
    """The plain mean inside, a doubled step outside, from where the inner level has led."""
    topology = Topology({"pair": [[0, 1]], "world": [[0, 1]]})
    schedule = levels({"pair": 1, "world": 2})
    double = Outer(torch.optim.SGD, lr=2.0)
    outside = Strategy(schedule=schedule, topology=topology, outer={"world": double})
    # Step 1: mean of 0 and 2 is 1. Step 2: 1 and 3, mean 2; from the anchor 0 twice as far: 4.
    # Step 3: mean of 4 and 6 is 5. Step 4: 5 and 7, mean 6; from 4 twice as far: 8.
    assert pool.run(2, walk, outside, [2.0] * 4) == [[1, 4, 5, 8]] * 2
    inside = Strategy(schedule=schedule, topology=topology, outer={"pair": double})
    # Step 1: twice as far as 1 is 2. Step 2: plain mean of 2 and 4 is 3, where the pair goes on
    # from. Step 3: 3 and 5, mean 4, twice as far from 3: 5. Step 4: mean of 5 and 7.
    assert pool.run(2, walk, inside, [2.0] * 4) == [[2, 3, 5, 6]] * 2


# Against a plain loop, and against the plain mean.


def train(strategy: Strategy, steps: int) -> dict[str, torch.Tensor]:
    net = make_net()
    with attach(net, sgd(net), strategy) as run:
        for step in range(steps):
            run.optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            run.optimizer.step()
        run.finalize()
    return snapshot(net)


def plain_diloco(steps: int) -> dict[str, torch.Tensor]:
    """DiLoCo as one would write it."""
    net = make_net()
    inner, anchors = sgd(net), [p.detach().clone() for p in net.parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(steps):
        inner.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        inner.step()
        if (step + 1) % 4 == 0:
            for anchor, parameter in zip(anchors, net.parameters(), strict=True):
                everyones = [torch.empty_like(anchor) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, parameter.detach())
                anchor.grad = anchor - exact_mean(everyones)
            outer.step()
            for anchor, parameter in zip(anchors, net.parameters(), strict=True):
                parameter.data.copy_(anchor)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
def test_diloco_is_the_plain_loop(pool: RankPool, world: int) -> None:
    """To the bit, parameter by parameter."""
    ours, plain = pool.run(world, train, diloco(4), 8), pool.run(world, plain_diloco, 8)
    for one, other in zip(ours, plain, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


NULLS = {
    "sgd": Outer(torch.optim.SGD, lr=1.0),
    "nesterov": nesterov(1.0, 0.0),
    "slowmo": slowmo(1.0, 0.0),
    "elsewhere": Outer(torch.optim.SGD, lr=1.0, device="cpu"),
}
PLAIN: dict[str, Callable[[], Strategy]] = {
    "every": lambda: Strategy(schedule=every(3)),
    "levels": lambda: hierarchical_sgd({"host": 2, "world": 4}),
    "few bits": lambda: Strategy(schedule=every(3), reducer=ErrorFeedback(Int4())),
    "overlapped": lambda: Strategy(schedule=every(3), reducer=Mean(), overlap_steps=2),
}


@pytest.mark.parametrize(
    ("null", "kind"), [("sgd", kind) for kind in PLAIN] + [(null, "every") for null in NULLS]
)
def test_sgd_at_a_rate_of_1_is_the_plain_mean(pool: RankPool, null: str, kind: str) -> None:
    """Bit for bit, whatever the rule is called."""
    strategy = PLAIN[kind]()
    plain = pool.run(2, train, strategy, 8)
    stepped = pool.run(2, train, dataclasses.replace(strategy, outer=NULLS[null]), 8)
    assert all(equal(one, other) for one, other in zip(plain, stepped, strict=True))


def test_a_warm_up_is_no_part_of_the_first_step(pool: RankPool) -> None:
    """Outside, a rate of 0 leads back to where the warm-up has led, and not to the start."""
    back = diloco(3, warmup_steps=2, outer=nesterov(0.0))
    found, warm = pool.run(2, train, back, 5)[0], pool.run(2, train, ddp(), 2)[0]
    trained = [name for name, _ in make_net().named_parameters()]
    assert all(torch.equal(found[name], warm[name]) for name in trained)


def apart_after_a_warm_up() -> dict[str, torch.Tensor]:
    """Move one rank's replica in the warm-up, where nobody should; lead back by a rate of 0."""
    net = make_net()
    with attach(net, sgd(net), diloco(3, warmup_steps=2, outer=nesterov(0.0))) as run:
        for step in range(5):
            run.optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            run.optimizer.step()
            if step == 0 and dist.get_rank() == 1:
                next(net.parameters()).data.add_(0.5)
        run.finalize()
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def test_replicas_that_a_warm_up_leaves_apart_have_no_anchor_there(pool: RankPool) -> None:
    """They go on from where all were equal: anchors that differ would keep them apart for good."""
    start = dict(make_net().named_parameters())
    for found in pool.run(2, apart_after_a_warm_up):
        assert all(torch.equal(found[name], value) for name, value in start.items())


def test_one_worker_is_enough(pool: RankPool) -> None:
    """Its own steps are the mean: SNOO."""
    [ours], [plain] = pool.run(1, train, snoo(4, outer=nesterov()), 8), pool.run(1, plain_diloco, 8)
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_any_optimizer_of_torch_may_be_outside(pool: RankPool) -> None:
    """Adam, whose state counts steps, and AdamW; replicas are equal and finite."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        one, other = pool.run(2, train, diloco(2, outer=Outer(kind, lr=0.01)), 6)
        assert equal(one, other)
        assert all(value.isfinite().all() for value in one.values())


class Last(torch.optim.Optimizer):
    """An optimizer of one's own that goes by the gradient before, which it keeps as it is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step against the gradient before."""
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            parameter.sub_(state.get("last", gradient), alpha=self.param_groups[0]["lr"])
            state["last"] = gradient


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (
        torch.optim.SGD,
        {"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "Muon": (torch.optim.Muon, {"lr": 0.1}),  # of matrices, which are not cut
    "one's own": (Last, {"lr": 0.5}),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "usual": lambda tensor: tensor.clone(),
    "transposed": lambda tensor: tensor.t().clone().t(),
    "every second": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
}


@pytest.mark.fast
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_tensors_are_stepped_in_pieces_that_do_not_show(kind: str, layout: str) -> None:
    """To the bit as whole ones, in any memory order, and across a save."""
    (make, settings), lay = OPTIMIZERS[kind], LAYOUTS[layout]
    rule = Outer(make, **settings)
    start = {"large": torch.randn(700, 400), "small": torch.randn(3, 5)}
    whole = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = make(list(whole.values()), **settings)
    state = OuterState(rule)
    state.anchor([(name, lay(tensor)) for name, tensor in start.items()])
    for step in range(4):
        means = {name: lay(torch.randn(tensor.shape)) for name, tensor in start.items()}
        for name, parameter in whole.items():
            parameter.grad = parameter.detach() - means[name]
        optimizer.step()
        if step == 2:
            saved = state.state_dict()
            state = OuterState(rule)
            state.load_state_dict(saved)
        state.apply(list(means.items()))
        assert all(torch.equal(means[name], p) for name, p in whole.items()), step


def buffers() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what buffers are after a sync with an outer optimizer, and their mean before it."""
    net = make_net()
    with attach(net, sgd(net), diloco(3, outer=nesterov(5.0, 0.0))) as run:
        for step in range(3):
            run.optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            own = {name: value.clone() for name, value in net.named_buffers()}
            run.optimizer.step()
        found = {name: value.clone() for name, value in net.named_buffers()}
    means = {}
    for name, value in own.items():
        everyones = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everyones, value)
        floats = value.is_floating_point()
        means[name] = exact_mean(everyones) if floats else torch.stack(everyones).max()
    return found, means


def test_buffers_never_go_through_it(pool: RankPool) -> None:
    """BatchNorm's statistics take their mean, counters their largest, whatever the outer rate."""
    for found, means in pool.run(2, buffers):
        assert found.keys() == means.keys()
        assert all(torch.equal(found[name], mean) for name, mean in means.items())


# What comes and goes.


def come_and_go() -> list[list[float]]:
    """Freeze, thaw, add and widen parameters between syncs at every step; return them after each.

    The outer step doubles, and rank 1 adds 2 to all that is trained at every step.
    """
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    net, rank = torch.nn.ParameterList(weights), dist.get_rank()
    optimizer = torch.optim.SGD(weights, lr=1.0)
    strategy = Strategy(schedule=every(1), reducer=Mean(), outer=Outer(torch.optim.SGD, lr=2.0))
    seen = []
    with attach(net, optimizer, strategy):
        for step in range(6):
            weights[0].requires_grad_(step not in (1, 2))
            if step == 4:
                net.append(torch.nn.Parameter(torch.zeros(1)))
                optimizer.add_param_group({"params": [net[2]]})
            if step == 5:
                weights[1].data = weights[1].data.double()
            for weight in net:
                own = torch.full_like(weight, -2.0 * rank)
                weight.grad = own if weight.requires_grad else None
            optimizer.step()
            seen.append([float(weight) for weight in net])
    return seen


def test_parameters_may_be_frozen_thawed_added_and_widened(pool: RankPool) -> None:
    """One that was left out, or is new, starts from the mean of its next sync."""
    one, other = pool.run(2, come_and_go)
    assert one == other
    # The mean leads by 1 and the outer step by 2. The first weight is frozen in steps 1 and 2 and
    # thawed in step 3: there it takes the mean (2 + 1 = 3) for a new anchor, and then goes on by 2.
    assert [values[0] for values in one] == [2, 2, 2, 3, 5, 7]
    assert [values[1] for values in one] == [2, 4, 6, 8, 10, 12]  # in float64 at the end
    assert [values[2] for values in one[4:]] == [1, 3]


def resumed(saved: bytes | None) -> tuple[list[float], bytes]:
    """Take four steps of nesterov by hand, from a saved state or the start; return all of it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen = []
    with attach(
        torch.nn.ParameterList([weight]), optimizer, diloco(2, outer=nesterov(0.5, 0.5))
    ) as run:
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            weight.data.copy_(state["weight"])
            run.load_state_dict(state["run"])
        for _ in range(2):
            weight.grad = torch.full((1,), -2.0 * (dist.get_rank() == 1))
            optimizer.step()
            seen.append(float(weight))
        file = io.BytesIO()
        torch.save({"weight": weight.detach(), "run": run.state_dict()}, file)
    return seen, file.getvalue()


def test_anchor_and_momentum_go_on_over_other_numbers_of_workers(pool: RankPool) -> None:
    """Saved by two, loaded by four: one step of momentum is not lost."""
    _, saved = pool.run(2, resumed, None)[0]
    # As above 1.5 after two steps, b = -2. With four ranks, of which one adds 4: mean 2.5, g = -1,
    # b = -1 - 1 = -2: 1.5 + 0.5 * (1 + 1) = 2.5.
    for seen, _ in pool.run(4, resumed, saved):
        assert seen[-1] == 2.5


def kept(reducer: Reducer) -> tuple[int, int]:
    net = torch.nn.Linear(100, 10)
    with attach(net, sgd(net), diloco(1, reducer=reducer)) as run:
        net(torch.ones(2, 100)).sum().backward()
        run.optimizer.step()
        return run.metrics()["parameters/world"]["bytes_kept"], sum(
            p.nbytes for p in net.parameters()
        )


def test_memory_is_counted(pool: RankPool) -> None:
    """Anchor and momentum, and with few bits references and residuals, by level."""
    for found, size in pool.run(2, kept, Mean()):
        assert found == 2 * size
    for found, size in pool.run(2, kept, ErrorFeedback(Int4())):
        assert found >= 4 * size
