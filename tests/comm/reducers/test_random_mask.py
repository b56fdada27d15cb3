"""A random share of the parameters: what is drawn is averaged, and nothing else moves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import Initial, attach, average_, ddp, post_local_sgd
from loosestep.comm.flat.cuts import Run, Runs
from loosestep.comm.group import peers_of, world_group
from loosestep.comm.reducers import Place
from loosestep.outer import nesterov
from loosestep.reducers import ErrorFeedback, RandomMask, TwoLevel
from loosestep.testing import RankPool

SIZES = [5000, 0, 1, 37, 4096]
RUNS = Runs(tuple(Run(str(i), 0, size) for i, size in enumerate(SIZES)))
DRAWN = [41 + 10, 0, 1, 1, 41]  # 1 % of every chunk of 4096, and at least one value


def syncs(dtype: torch.dtype, weights: Any = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what was given to three syncs, and what came out; bytes are those announced."""
    peers, reducer = peers_of(world_group(), weights=weights), RandomMask(0.01)
    state, results = reducer.init([], peers), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        mine = torch.randn(sum(SIZES), generator=generator).to(dtype)
        if weights is not None and weights[dist.get_rank()] == 0.0:
            mine[::2] = math.nan
        given = mine.clone()
        handle = reducer.start(mine, peers, state, Place("slot", RUNS))
        handle.wait()
        handle.commit()
        moved = handle.traffic.bytes_sent + handle.traffic.bytes_copied
        assert moved == reducer.bytes_on_wire(SIZES, dtype, peers.size, peers.group_rank)
        results.append((given, mine))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_drawn_is_the_mean_and_the_rest_stays(pool: RankPool, dtype: torch.dtype) -> None:
    """As many of every tensor as its density says, others at every sync; no bit else changes."""
    masks = []
    for replicas in zip(*pool.run(3, syncs, dtype), strict=True):
        given, results = zip(*replicas, strict=True)
        changed = torch.stack([g != r for g, r in zip(given, results, strict=True)]).any(0)
        for part, drawn in zip(changed.split(SIZES), DRAWN, strict=True):
            assert int(part.sum()) == drawn
        mean = torch.stack(given).double().mean(0)
        for result in results:
            assert torch.equal(result[changed], results[0][changed])
            assert torch.allclose(result.double()[changed], mean[changed], atol=1e-2)
        masks.append(changed)
    assert int((masks[0] & masks[1]).sum()) < 20


def test_a_rank_without_a_say_keeps_its_own(pool: RankPool) -> None:
    """Its NaN reach nobody, and stay where they were not drawn."""
    results = pool.run(3, syncs, torch.float32, (1.0, 0.0, 1.0))
    for (given, mine), (_, silent) in zip(results[0], results[1], strict=True):
        assert bool(mine.isfinite().all())
        drawn = mine != given
        assert torch.equal(silent[drawn], mine[drawn])
        assert int(silent.isnan().sum()) > 4000


def spread() -> list[float]:
    """Return how far parameters are from their mean, after many syncs and after ``finalize``."""
    torch.manual_seed(0)
    net = torch.nn.Linear(100, 50)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with torch.no_grad():
        net.weight.add_(float(dist.get_rank()))
    found = []
    strategy = post_local_sgd(1, gradients=None, reducer=RandomMask(0.2))
    with attach(net, optimizer, replace(strategy, initial=Initial.IGNORE)) as run:
        for _ in range(12):
            optimizer.step()
        found.append(_spread(net.weight))
        with run.averaged():
            found.append(_spread(net.weight))
        found.append(_spread(net.weight))
        run.finalize()
        found.append(_spread(net.weight))
    return found


def _spread(weight: torch.Tensor) -> float:
    every = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weight.detach())
    return float(torch.stack(every).var(0, correction=0).mean())


def test_replicas_come_together_as_they_are_drawn(pool: RankPool) -> None:
    """A share of 0.8^12 = 0.07 was never drawn in 12 syncs; the last word is exact."""
    for kept, inside, after, final in pool.run(2, spread):
        assert 0.03 < kept / 0.25 < 0.12
        assert inside == final == 0.0
        assert after == kept


def silent_in_a_sync() -> tuple[bool, bool]:
    """Average where this rank's infinity has it skipped; say whether it kept the rest."""
    net = torch.nn.Linear(100, 50)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    strategy = post_local_sgd(1, gradients=None, reducer=RandomMask(0.1), on_nonfinite="skip")
    with attach(net, optimizer, strategy):
        with torch.no_grad():
            net.weight.add_(float(dist.get_rank() ** 2))
            if dist.get_rank() == 1:
                net.weight[3, 4] = math.inf
        before = net.weight.detach().clone()
        optimizer.step()
        moved = net.weight.detach() != before
    return int(moved.sum()) <= 550, int(moved.sum()) > 400


def test_a_rank_that_is_skipped_keeps_what_is_not_drawn(pool: RankPool) -> None:
    """A tenth of 5000 values is drawn, and nothing else of any rank changes."""
    assert pool.run(3, silent_in_a_sync) == [(True, True)] * 3


def test_where_it_cannot_work_it_says_so() -> None:
    """Gradients are gone after a step; outer optimizers give all the same; hosts must agree."""
    mask = RandomMask(0.1)
    with pytest.raises(ValueError, match="gradients are"):
        ddp(gradient_reducer=mask)
    with pytest.raises(ValueError, match="outer optimizer"):
        replace(post_local_sgd(1, gradients=None, reducer=mask), outer=nesterov())
    with pytest.raises(ValueError, match="ranks_of_host='equal'"):
        TwoLevel(mask)
    with pytest.raises(ValueError, match="drops nothing that could be kept"):
        ErrorFeedback(mask)
    with pytest.raises(ValueError, match="density must lie in"):
        RandomMask(0.0)
    with pytest.raises((TypeError, ValueError), match="seed"):
        RandomMask(0.1, seed=0.5)  # type: ignore[arg-type]


def one_shot() -> str:
    try:
        average_([torch.ones(3)], reducer=RandomMask(0.1))
    except ValueError as error:
        return str(error)
    return ""


def test_it_needs_somebody_who_counts(pool: RankPool) -> None:
    """``average_`` remembers nothing, so its mask would be the same each time."""
    assert all("nobody who remembers" in text for text in pool.run(2, one_shot))
