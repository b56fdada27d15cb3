"""Gradients between backward and a sharded step: scalers, clipping, gradients that are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import RankMismatch, ZeroOptions, ZeroRedundancyOptimizer
from loosestep.testing import RankPool
from tests.support.zero_case import loss_of, make_model, pair

optim = torch.optim


def scaled(declared: bool, unscale: bool, fused: bool) -> list[Any]:
    """Train with a GradScaler, infinite gradients at step 2; return what differs from plain."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    options = ZeroOptions(scaler=scalers[1] if declared else None)
    both = pair(optim.AdamW, {"lr": 0.02, "fused": fused}, options=options)
    differs: list[Any] = []
    for number in range(6):
        for scaler, (net, optimizer) in zip(scalers, both.sides, strict=True):
            optimizer.zero_grad()
            loss = loss_of(net, both.rank, number)
            scaler.scale(loss * torch.inf if number == 2 else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales = [scaler.get_scale() for scaler in scalers]
        if not both.same() or scales[0] != scales[1]:
            differs.append((number, scales))
    return differs


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(pool: RankPool, declared: bool, unscale: bool, fused: bool) -> None:
    """Steps are skipped and scales go back and grow as with the plain optimizer."""
    assert pool.run(2, scaled, declared, unscale, fused) == [[], []]


def infinite_on_one_rank(declared: bool, unscale: bool) -> Any:
    """Give only rank 1 infinite gradients, without DDP; return scale, same and moved by step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = make_model()
    options = ZeroOptions(scaler=scaler if declared else None)
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, zero_options=options, lr=0.1)
    report = []
    for number in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        zero.zero_grad()
        loss = scaler.scale(loss_of(model, 0, number))
        (loss * torch.inf if number == 1 and dist.get_rank() == 1 else loss).backward()
        if unscale:
            scaler.unscale_(zero)
        try:
            scaler.step(zero)
        except RankMismatch as error:
            return str(error)
        scaler.update()
        moved = [not torch.equal(*p) for p in zip(before, model.parameters(), strict=True)]
        report.append((scaler.get_scale(), all(moved), any(moved)))
    return report


@pytest.mark.parametrize("unscale", [False, True])
def test_a_declared_scaler_makes_ranks_agree(pool: RankPool, unscale: bool) -> None:
    """Infinite gradients on one rank make all ranks skip and lower the scale."""
    expected = [(4.0, True, True), (2.0, False, False), (2.0, True, True)]
    assert pool.run(3, infinite_on_one_rank, True, unscale) == [expected] * 3


@pytest.mark.parametrize("unscale", [False, True])
def test_an_undeclared_scaler_that_disagrees_is_refused(pool: RankPool, unscale: bool) -> None:
    """All ranks raise, those with infinite gradients too, and say how to declare it."""
    for message in pool.run(3, infinite_on_one_rank, False, unscale):
        assert "ZeroOptions(scaler=scaler)" in message


def clipped(norm_type: float, way: str) -> list[bool]:
    """Clip with torch on the plain side, and in one of two ways on the other."""
    options = ZeroOptions(clip_norm=0.02, norm_type=norm_type) if way == "declared" else None
    both = pair(optim.SGD, {"lr": 0.5, "momentum": 0.9}, options=options)
    fine: list[bool] = []
    for number in range(4):
        both.plain.zero_grad()
        both.zero.zero_grad()
        both.backward(number)
        norm = torch.nn.utils.clip_grad_norm_(both.nets[0].parameters(), 0.02, norm_type)
        fine.append(bool(norm > 0.02))
        if way == "method":
            ours = both.zero.clip_grad_norm_(0.02, norm_type)  # type: ignore[attr-defined]
            fine.append(torch.allclose(ours, norm))
        both.plain.step()
        both.zero.step()
        grads = [[p.grad for p in net.parameters()] for net in both.nets]
        fine += [both.close(), all(map(torch.allclose, *grads))]
    return fine


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
@pytest.mark.parametrize("way", ["method", "declared"])
def test_clipping(pool: RankPool, norm_type: float, way: str) -> None:
    """Norms taken over shards clip as torch's own clip_grad_norm_ does."""
    assert all(map(all, pool.run(2, clipped, norm_type, way)))


def clipped_mixed() -> list[bool]:
    """Clip gradients of three dtypes by their largest element, which is the same however taken."""
    both = pair(optim.SGD, {"lr": 0.1}, "mixed")
    both.backward(0)
    torch.nn.utils.clip_grad_norm_(both.nets[0].parameters(), 0.1, torch.inf)
    both.zero.clip_grad_norm_(0.1, torch.inf)  # type: ignore[attr-defined]
    one, other = ([p.grad for p in net.parameters() if p.grad is not None] for net in both.nets)
    return [torch.allclose(a, b, rtol=1e-6) for a, b in zip(one, other, strict=True)]


def test_clipping_in_mixed_precision(pool: RankPool) -> None:
    """Gradients of 16 bits are multiplied by the whole factor, as torch does."""
    assert all(map(all, pool.run(2, clipped_mixed)))


def clipped_bad(value: float) -> tuple[str, bool]:
    """Put one bad value into the last gradient, which not every rank owns."""
    both = pair(optim.SGD, {"lr": 0.1})
    both.backward(0)
    for net, _ in both.sides:
        net.module.last.bias.grad[-1] = value
    try:
        both.zero.clip_grad_norm_(1.0, error_if_nonfinite=True)  # type: ignore[attr-defined]
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    torch.nn.utils.clip_grad_norm_(both.nets[0].parameters(), 1.0)
    both.zero.clip_grad_norm_(1.0)  # type: ignore[attr-defined]
    one, other = (
        [p.grad.isnan() for p in net.parameters() if p.grad is not None] for net in both.nets
    )
    return message, all(map(torch.equal, one, other))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_clipping_what_is_not_finite(pool: RankPool, value: float) -> None:
    """All ranks raise where asked to, else gradients become what torch makes of them."""
    for message, same in pool.run(3, clipped_bad, value):
        assert "norm of order 2.0" in message
        assert str(value) in message
        assert same


def one_gradient_missing() -> str:
    model = make_model()
    zero = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    loss_of(model, 0, 0).backward()
    if dist.get_rank() == 1:
        model.get_parameter("narrow.bias").grad = None
    with pytest.raises(RankMismatch) as error:
        zero.step()
    return str(error.value)


def test_a_gradient_that_one_rank_lacks(pool: RankPool) -> None:
    """Every rank names the parameter and the rank."""
    for message in pool.run(3, one_gradient_missing):
        assert "'narrow.bias'" in message
        assert "[1]" in message
        assert "DistributedDataParallel" in message
