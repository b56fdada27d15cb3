"""A sharded step inside DDP's backward is the plain optimizer's step, after every iteration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from loosestep.testing import RankPool
from tests.support.pairs import in_pairs
from tests.support.zero_hooks import (
    NUM_STEPS,
    OPTIMIZERS,
    Overlapped,
    Setup,
    Side,
    both,
    halve,
    narrow,
)
from tests.support.zero_models import WIDTH

for function in (narrow, halve):  # DDP wants the classes, and finds strings here
    function.__annotations__["bucket"] = GradBucket
    function.__annotations__["return"] = torch.futures.Future[torch.Tensor]


def compare(hook: str, setup: Setup, group: Any = None) -> list[tuple[bool, bool]]:
    """Train both ways; return after every iteration whether they are equal, and close."""
    plain, overlapped = Side(setup, group), Overlapped(setup, group, hook)
    noise = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(NUM_STEPS):
        shape = (setup.micro_batches, 3, WIDTH)
        batches = list(torch.randn(shape, generator=noise))
        if setup.scaled and step == 2 and dist.get_rank() == 1:
            batches[-1] *= torch.inf
        plain.iterate(batches, step)
        overlapped.iterate(batches, step)
        pairs = list(zip(plain.ddp.parameters(), overlapped.ddp.parameters(), strict=True))
        close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs]
        seen.append((all(torch.equal(a, b) for a, b in pairs), all(close)))
    scale = 2.0**15 if setup.scaled else 1.0  # half of what it was: one step was skipped
    assert plain.scaler.get_scale() == overlapped.scaler.get_scale() == scale
    facts: Any = overlapped.ddp._get_ddp_logging_data()
    sizes = facts.get("rebuilt_bucket_sizes", facts["bucket_sizes"])  # no rebuilding: no such key
    assert len(sizes.split(",")) >= setup.min_buckets, sizes
    return seen


def check(pool: RankPool, world: int, hook: str, setup: Setup) -> None:
    """Require equal parameters on two ranks; on more, sums are rounded in another order."""
    for seen in pool.run(world, compare, hook, setup):
        print(seen)
        exact = world <= 2 and setup.clip_norm is None  # a norm is a sum too
        assert all(equal if exact else close for equal, close in seen), seen
        assert len(seen) == NUM_STEPS


UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
VARIANTS = {
    "default": Setup(),
    "gradient_as_bucket_view": Setup(ddp=VIEWS),
    "static_graph": Setup(ddp={"static_graph": True}),
    "static_graph, one idle": Setup("idle", ddp={"static_graph": True}),
    "find_unused_parameters": Setup("experts", ddp=UNUSED),
    "find_unused_parameters, views": Setup("experts", ddp=UNUSED | VIEWS),
    "find_unused_parameters, one idle": Setup("idle", ddp=UNUSED),
    "no_sync": Setup(micro_batches=3),
    "no_sync, views": Setup(ddp=VIEWS, micro_batches=3),
    "no_sync, unused": Setup("experts", ddp=UNUSED, micro_batches=3),
    "shard_buckets": Setup(hook={"shard_buckets": True}),
    "step() left out": Setup(calls_step=False),
    "zeroed gradients": Setup(zero_grad="zeros"),
    "no zero_grad": Setup(zero_grad="never", calls_step=False),
    "two groups": Setup(group_lrs=(1e-2, 3e-3)),
    "two dtypes": Setup("two dtypes"),
    "recomputed": Setup("recomputed"),
    "recomputed, reentrant": Setup("reentrant", ddp={"static_graph": True}),
    "tied": Setup("tied"),
    "images": Setup("images", ddp={"bucket_cap_mb": 0.0005}),
    "150 buckets": Setup("many", ddp={"bucket_cap_mb": 1e-4}),
    "OneCycleLR": Setup(one_cycle=True),
    "scaler": Setup(scaled=True),
    "scaler, SGD": Setup(scaled=True, optimizer="SGD"),
    "clipping": Setup(clip_norm=0.05),
    "clipping, unused": Setup("experts", ddp=UNUSED, clip_norm=0.05),
    "clipping, scaler": Setup(scaled=True, clip_norm=0.05),
}


@pytest.mark.parametrize(("variant", "hook"), in_pairs(VARIANTS, ["last", "interleaved"], each=1))
def test_equals_the_plain_optimizer(pool: RankPool, hook: str, variant: str) -> None:
    """Parameters are those of DDP and a plain optimizer to the bit, from the first step on."""
    check(pool, 2, hook, VARIANTS[variant])


@pytest.mark.parametrize("hook", ["last", pytest.param("interleaved", marks=pytest.mark.long)])
def test_a_compiled_model(pool: RankPool, hook: str) -> None:
    """The same for one that is compiled, which takes its time."""
    check(pool, 2, hook, Setup("compiled", ddp={"bucket_cap_mb": 25}, min_buckets=1))


@both
@pytest.mark.parametrize(
    ("variant", "world"),
    in_pairs(
        ["default", "find_unused_parameters", "static_graph", "no_sync, unused", "two dtypes"],
        [4, 3, 1],
        each=1,
    ),
)
def test_any_number_of_ranks(pool: RankPool, hook: str, world: int, variant: str) -> None:
    """One rank, three and four train as with the plain optimizer."""
    check(pool, world, hook, VARIANTS[variant])


@both
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_any_optimizer(pool: RankPool, hook: str, optimizer: str) -> None:
    """Any optimizer class can be stepped inside backward, a user's own included."""
    check(pool, 2, hook, Setup("matrices", optimizer))


@both
@pytest.mark.parametrize(
    ("variant", "user_hook"),
    in_pairs(["default", "find_unused_parameters", "no_sync"], ["fp16", "bf16", "own"], each=1),
)
def test_a_hook_of_the_users(pool: RankPool, hook: str, user_hook: str, variant: str) -> None:
    """Gradients are those of the hook that was given, whatever it does to them."""
    check(pool, 2, hook, replace(VARIANTS[variant], user_hook=user_hook))


@both
def test_a_hook_that_returns_narrow_gradients(pool: RankPool, hook: str) -> None:
    """Gradients that a wrapper hands back in 16 bits get the parameters' dtype, as in DDP."""
    for variant in ("default", "no_sync"):  # DDP itself fails with parameters that are not used
        check(pool, 2, hook, replace(VARIANTS[variant], user_hook="fp16 wrapper"))


@both
@pytest.mark.parametrize("variant", ["default", "no_sync"])
def test_power_sgd(pool: RankPool, hook: str, variant: str) -> None:
    """So are those of PowerSGD, which with Gloo can have one bucket only: by itself it hangs."""
    one_bucket = replace(VARIANTS[variant], ddp={"bucket_cap_mb": 25}, min_buckets=1)
    check(pool, 2, hook, replace(one_bucket, user_hook="powerSGD"))


def compare_in_subgroup(hook: str) -> list[tuple[bool, bool]]:
    group = dist.new_group([2, 3])
    return compare(hook, Setup(), group) if dist.get_rank() >= 2 else []


@both
def test_a_subgroup_trains_alone(pool: RankPool, hook: str) -> None:
    """Two of four ranks, which are not the first ones, train as with the plain optimizer."""
    seen = pool.run(4, compare_in_subgroup, hook)
    assert seen == [[], [], [(True, True)] * NUM_STEPS, [(True, True)] * NUM_STEPS]
