"""Gradients in units of their own: what that is good for, and what it must not break."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from loosestep import NotFinite, attach, ddp
from loosestep.comm.codecs import in_c as codec_c
from loosestep.comm.codecs import in_torch as codec_torch
from loosestep.comm.group import peers_of, world_group
from loosestep.comm.reducers import NOTHING
from loosestep.comm.reducers.scaled import Learnt
from loosestep.reducers import (
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    Reducer,
    Scaled,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.testing import RankPool
from tests.support.codecs import floats, same_bits
from tests.support.oracle import loss_of, make_net, snapshot
from tests.support.reducing import reduce_

STEPS = 12


def noise(call: int, rank: int) -> torch.Tensor:
    """Values that differ by six orders of magnitude inside a block, a third of them zero."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    values = torch.randn(999, generator=generator) * torch.logspace(-6, 0, 999)
    return values * (torch.arange(999) % 3 != 0)


def mean_of_many(reducer: Reducer, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, by value, how far means were from the exact ones, and how large these were."""
    peers, rank = peers_of(world_group()), dist.get_rank()
    state = reducer.init([], peers)
    error, size = torch.zeros(999), torch.zeros(999)
    for call in range(calls):
        mine = noise(call, rank)
        exact = torch.stack([noise(call, r) for r in range(peers.size)]).mean(0)
        reduce_(reducer, mine, peers, state=state)
        if call >= calls // 2:
            error += (mine - exact).square()
            size += exact.square()
    return error, size


@pytest.mark.parametrize("world", [2, 3])
def test_small_values_are_heard_beside_large_ones(pool: RankPool, world: int) -> None:
    """Errors are in proportion to every value; without units small ones are lost altogether."""
    used = torch.arange(999) % 3 != 0
    for scaled, share in ((Scaled(Ternary()), 0.6), (Scaled(Int4()), 0.1)):
        error, size = pool.run(world, mean_of_many, scaled, 80)[0]
        assert float((error / size)[used].max()) < 4 * share
        assert float((error / size)[used].mean()) < share
    error, size = pool.run(world, mean_of_many, Ternary(), 60)[0]
    assert float((error / size)[:60][used[:60]].min()) > 0.9


@pytest.mark.parametrize("world", [2, 3])
def test_zeros_stay_zero(pool: RankPool, world: int) -> None:
    """What nobody has used has no gradient afterwards, where Int2 would make some up."""
    error, _ = pool.run(world, mean_of_many, Scaled(Ternary()), 20)[0]
    assert float(error[::3].max()) == 0.0
    error, _ = pool.run(world, mean_of_many, Int2(), 20)[0]
    assert float(error[::3].max()) > 0.0


def wakes(reducer: Reducer) -> list[float]:
    """Return a value's means, which was zero for long and then is one of the largest."""
    peers, found = peers_of(world_group()), []
    state = reducer.init([], peers)
    for call in range(160):
        mine = noise(call, dist.get_rank())
        mine[600] = 0.5 if call >= 40 else 0.0
        reduce_(reducer, mine, peers, state=state)
        found.append(float(mine[600]))
    return found


def test_a_value_that_wakes_up_is_heard(pool: RankPool) -> None:
    """At once at more than a sixteenth of its size, and its unit grows to it and no further."""
    for found in pool.run(2, wakes, Scaled(Ternary())):
        assert found[:40] == [0.0] * 40
        assert found[40] > 0.5 / 16
        assert sum(found[-20:]) / 20 == pytest.approx(0.5, rel=0.3)


class Counting(torch.nn.Module):
    """An embedding of which most rows are never used, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = torch.nn.Embedding(50, 7), torch.nn.Linear(7, 3)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.rows(numbers))
        return result


def rows_after_adam(reducer: Reducer) -> tuple[float, float]:
    """Return how far Adam has moved rows that were used, and rows that never were."""
    net = Counting()
    before = net.rows.weight.detach().clone()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with attach(net, optimizer, ddp(gradient_reducer=reducer)):
        for step in range(10):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            net(torch.randint(10, (8,), generator=generator)).square().mean().backward()
            optimizer.step()
    moved = (net.rows.weight.detach() - before).abs()
    return float(moved[:10].max()), float(moved[10:].max())


def test_adam_leaves_rows_alone_that_nobody_used(pool: RankPool) -> None:
    """Noise in place of zeros would be made into steps as large as any other."""
    for used, unused in pool.run(2, rows_after_adam, Scaled(Ternary())):
        assert used > 0.02
        assert unused == 0.0
    assert pool.run(2, rows_after_adam, Int2(7))[0][1] > 0.02  # else this says nothing


def not_finite(reducer: Reducer, bad: float) -> tuple[tuple[int, ...], bool, list[torch.Tensor]]:
    """Reduce, fail, and reduce again; return who was blamed, and whether units were left alone."""
    peers, rank = peers_of(world_group()), dist.get_rank()
    state = reducer.init([], peers)
    for call in range(2):
        reduce_(reducer, noise(call, rank), peers, state=state)
    before = state.state_dict()
    mine = noise(2, rank)
    if rank == 1:
        mine[17] = bad
    blamed: tuple[int, ...] = ()
    try:
        reduce_(reducer, mine, peers, state=state)
    except NotFinite as error:
        blamed = error.ranks
    after = state.state_dict()
    same = before["calls"] == after["calls"] and torch.equal(
        before["squares"]["slot"], after["squares"]["slot"]
    )
    mine = noise(3, rank)
    reduce_(reducer, mine, peers, state=state)
    return blamed, same, [mine]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused_and_forgotten(pool: RankPool, bad: float) -> None:
    """All ranks raise, nobody's units have learnt from it, and all go on bit-equal."""
    results = pool.run(3, not_finite, Scaled(Ternary()), bad)
    assert [blamed for blamed, _, _ in results] == [(1,)] * 3
    assert all(same for _, same, _ in results)
    assert all(torch.equal(mean, results[0][2][0]) for _, _, (mean,) in results)


def by_hosts(reducer: TwoLevel) -> tuple[dict[str, torch.Tensor], dict[str, Any], int]:
    """Train on two hosts of two ranks; return parameters, what is kept, and bytes sent."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with attach(net, optimizer, ddp(gradient_reducer=reducer)) as run:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
        sent = run.metrics()["gradients/world"]["bytes_sent"]
        return snapshot(net), run.state_dict()["gradients"]["world"], int(sent)


def test_hosts_train_as_one_model_in_few_bytes(pool: RankPool) -> None:
    """Four ranks on two hosts stay bit-equal; a host sends 1.6 bits a value, and scales."""
    results = pool.run(4, by_hosts, TwoLevel(Scaled(Ternary(64)), ranks_per_host=2))
    first, _, _ = results[0]
    numel = sum(first[name].numel() for name, _ in make_net().named_parameters())
    for state, _, _ in results:
        for name, _ in make_net().named_parameters():
            assert torch.equal(state[name], first[name])
    owned = [sum(kept.numel() for kept in one["squares"].values()) for _, one, _ in results]
    assert owned[0] + owned[1] == owned[2] + owned[3] == numel
    sent = sum(bytes_sent for _, _, bytes_sent in results[:2])
    assert STEPS * numel / 5 < sent < STEPS * (numel / 5 + 4 * numel / 64 + 32)


@given(
    values=floats(),
    squares=floats(),
    least=st.sampled_from([2.0**-60, 1e-12, 1.0]),
    keep=st.sampled_from([0.0, 0.5, 2 / 3, 0.95]),
)
def test_c_and_torch_have_the_same_units(
    values: torch.Tensor, squares: torch.Tensor, least: float, keep: float
) -> None:
    """To the bit, for any values, and nothing finite becomes infinite on the way back."""
    size = min(values.numel(), squares.numel())
    values, squares = values[:size].clone(), squares[:size].abs()
    out = torch.empty(size)
    codec_c.to_units(values, squares, least, out)
    assert same_bits(out, codec_torch.to_units(values, squares, least))
    plain, learnt = codec_torch.from_units(values, squares, least, keep)
    largest = codec_c.from_units(values, squares, least, keep)
    assert same_bits(values, plain)
    assert same_bits(squares, learnt)
    assert bool(plain.isfinite().all())
    assert largest == (float(learnt.max()) if size else 0.0)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Scaled(Mean()), "is none; give Ternary"),
        (lambda: Scaled(ErrorFeedback(Int8())), "is none; give Ternary"),
        (lambda: Scaled(Int2()), "no level at zero.*give Ternary"),
        (lambda: Scaled(Int8(), memory=1.0), "memory must be at least 0 and less than 1, got 1.0"),
        (lambda: Scaled(Int8(), memory=-0.1), "got -0.1"),
        (lambda: Learnt(NOTHING).load_state_dict({"sent": {}}), "another reducer"),
        (
            lambda: Learnt(NOTHING).load_state_dict({"inner": {"calls": {"slot": 1}}}),
            "keeps no state",
        ),
    ],
)
def test_bad_input_is_refused(make: Any, rule: str) -> None:
    """With the rule and the way out."""
    with pytest.raises(ValueError, match=rule):
        make()


def other_size() -> str:
    reducer, peers = Scaled(Ternary()), peers_of(world_group())
    state = reducer.init([], peers)
    reduce_(reducer, torch.ones(10), peers, state=state)
    try:
        reduce_(reducer, torch.ones(11), peers, state=state)
    except ValueError as error:
        return str(error)
    return ""


def test_units_of_another_model_are_refused(pool: RankPool) -> None:
    """On all ranks, before anything is sent."""
    for text in pool.run(2, other_size):
        assert "keeps 10 units for 'slot', but there are 11 values" in text


def test_top_values_can_be_scaled_too() -> None:
    """Any lossy reducer will do, and the name says all that ranks must agree on."""
    assert repr(Scaled(TopK(0.1), memory=0.9)).endswith(", memory=0.9)")
