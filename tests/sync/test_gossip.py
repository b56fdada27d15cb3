"""Averages with one peer at a time, who rotates; and NoLoCo's step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from loosestep import (
    NotAttachable,
    Strategy,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    hierarchical_sgd,
    noloco,
)
from loosestep.outer import Gossip, NoLoCo, nesterov
from loosestep.reducers import Int4, Mean
from loosestep.schedules import every, qsr, streaming
from loosestep.testing import RankPool
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot, train_replicas

# Who meets whom.


@given(st.integers(1, 40), st.integers(0, 10_000))
def test_everyone_is_in_one_pair(num: int, sync: int) -> None:
    """Or alone, where the number is odd, and then one only."""
    pairs = Gossip().pairs(num, sync)
    assert sorted(itertools.chain(*pairs)) == list(range(num))
    assert sum(len(pair) == 1 for pair in pairs) == num % 2


@pytest.mark.parametrize("num", [3, 5, 6, 7, 10, 13])
def test_everyone_meets_everyone_once_a_cycle(num: int) -> None:
    """And sits out once, where the number is odd; in every cycle, in another order."""
    gossip = Gossip()
    cycle = gossip.num_rounds(num)
    orders = set()
    for first in (0, cycle, 5 * cycle):
        rounds = [gossip.pairs(num, first + turn) for turn in range(cycle)]
        met = sorted(itertools.chain(*rounds))
        alone = [(index,) for index in range(num)] if num % 2 else []
        assert met == sorted([*itertools.combinations(range(num), 2), *alone])
        orders.add(tuple(rounds))
    assert num == 3 or len(orders) == 3


@pytest.mark.parametrize("num", [1, 2, 4, 8, 16])
def test_powers_of_two_mix_completely(num: int) -> None:
    """After log2 n syncs everybody has the mean of all."""
    values = [float(2**index) for index in range(num)]
    for sync in range(num.bit_length() - 1):
        for one, other in Gossip().pairs(num, sync):
            values[one] = values[other] = (values[one] + values[other]) / 2
    assert values == [(2**num - 1) / num] * num


# By hand, on real ranks.


def move(strategy: Strategy, sizes: list[list[float]]) -> tuple[list[float], float, list[int]]:
    """Take steps of these sizes by rank; return where a weight was, in the end, and local steps."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen, local = [], []
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy, timeout=20) as run:
        for by_rank in sizes:
            weight.grad = torch.full((1,), -by_rank[dist.get_rank()])
            optimizer.step()
            seen.append(float(weight))
            local.append(run.local_steps)
        run.finalize()
        local.append(run.local_steps)
    return seen, float(weight), local


def test_four_ranks_have_the_mean_after_two_syncs(pool: RankPool) -> None:
    """And replicas count as different until the end."""
    strategy = Strategy(schedule=every(1), reducer=Mean(), gossip=Gossip())
    results = pool.run(4, move, strategy, [[0.0, 2.0, 4.0, 10.0], [0.0] * 4])
    # (0, 1) and (2, 3): 1, 1, 7, 7. Then (0, 2) and (1, 3): 4 everywhere.
    assert [seen for seen, _, _ in results] == [[1.0, 4.0]] * 2 + [[7.0, 4.0]] * 2
    assert [(last, local) for _, last, local in results] == [(4.0, [1, 2, 0])] * 4


def test_of_three_one_sits_out(pool: RankPool) -> None:
    """And keeps what it has; the mean of all is what it was, and ``finalize`` gives it to all."""
    strategy = Strategy(schedule=every(1), reducer=Mean(), gossip=Gossip())
    results = pool.run(3, move, strategy, [[3.0, 6.0, 15.0]])
    ((_, other), (alone,)) = sorted(Gossip().pairs(3, 0), key=len, reverse=True)
    means = [(3.0, 6.0, 15.0)[alone] if rank == alone else 0.0 for rank in range(3)]
    shared = (24.0 - means[alone]) / 2
    assert other != alone
    for rank, (seen, last, _) in enumerate(results):
        assert seen == [means[alone] if rank == alone else shared]
        assert last == 8.0


def test_nolocos_step_by_hand(pool: RankPool) -> None:
    """Of momentum: delta <- alpha delta - beta mean(slow - weight) - gamma (slow - mean(slow))."""
    strategy = Strategy(
        schedule=every(1), reducer=Mean(), gossip=Gossip(NoLoCo(alpha=0.5, beta=0.5, gamma=1.0))
    )
    results = pool.run(2, move, strategy, [[2.0, 6.0], [4.0, 0.0]])
    # 1: Delta is -2 and -6, mean -4: delta 2, slow 2, both equal. 2: Delta -4 and 0, mean -2:
    # delta 1 + 1 = 2, slow 4.
    assert [seen for seen, _, _ in results] == [[2.0, 4.0]] * 2
    results = pool.run(4, move, strategy, [[2.0, 6.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4])
    # 1: ranks 0 and 1 as before, 2 and 3 stay at 0. 2: pairs (0, 2), (1, 3): all Delta are 0; slow
    # 2 and 0, mean 1: rank 0 has delta 1 - 1 = 0, rank 2 has 0 + 1, slow 2 and 1. 3: pairs (0, 1)
    # and (2, 3), equal inside: rank 0 has delta 0, rank 2 has 0.5, slow 2 and 1.5.
    assert [seen for seen, _, _ in results] == [[2.0, 2.0, 2.0]] * 2 + [[0.0, 1.0, 1.5]] * 2
    assert [last for _, last, _ in results] == [1.75] * 4


def slow_weights(n: int) -> float:
    """Return how far the step is from the formula as the paper has it, relative to the values."""
    torch.manual_seed(dist.get_rank())
    weight = torch.nn.Parameter(torch.randn(50))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rule, gossip = NoLoCo(), Gossip(NoLoCo())
    strategy = Strategy(schedule=every(1), reducer=Mean(), gossip=gossip, initial="ignore")
    slow, delta, worst = weight.detach().double(), torch.zeros(50).double(), 0.0
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy, timeout=20) as run:
        for sync in range(6):
            weight.grad = torch.randn(50)
            moved = weight.detach().double() - weight.grad.double()
            both = [torch.zeros(2, 50).double() for _ in range(n)]
            dist.all_gather(both, torch.stack([slow, slow - moved]))
            pair = next(p for p in gossip.pairs(n, sync) if dist.get_rank() in p)
            mean = torch.stack([both[rank] for rank in pair]).mean(0)
            delta = rule.alpha * delta - rule.beta * mean[1] - rule.gamma * (slow - mean[0])
            slow = slow + delta
            optimizer.step()
            worst = max(worst, float((weight - slow).abs().max() / slow.abs().max()))
        run.finalize()
    return worst


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_one_vector_is_as_good_as_two(pool: RankPool, world: int) -> None:
    """What a pair sends in one sum is what the paper's formula comes to, but for rounding."""
    assert max(pool.run(world, slow_weights, world)) < 1e-5


# Against replicas in one process.

KINDS: dict[str, Callable[[], Strategy]] = {
    "gossip": lambda: Strategy(schedule=every(2), reducer=Mean(), gossip=Gossip()),
    "gossip, with momentum": lambda: Strategy(
        schedule=every(2), gossip=Gossip(), optimizer_state={"momentum_buffer": 2}
    ),
    "noloco": lambda: noloco(2),
    "noloco after a warm-up": lambda: noloco(1, warmup_steps=2, alpha=0.3, beta=1.0, gamma=0.5),
}


def train(strategy: Strategy, steps: list[int], stop: int = -1) -> tuple[Any, Any, Any]:
    """Train; at ``stop`` save and go on in another model. Return parameters before the end and
    after, and what ``averaged`` held.
    """
    rank, net = dist.get_rank(), make_net()
    run = attach(net, sgd(net), strategy, timeout=20)
    for step in range(steps[rank]):
        if step == stop:
            saved = snapshot(net), run.optimizer.state_dict(), run.state_dict()
            run.detach()
            net = make_net(1)
            run = attach(net, sgd(net), strategy, timeout=20)
            net.load_state_dict(saved[0])
            run.optimizer.load_state_dict(saved[1])
            run.load_state_dict(saved[2])
        run.optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        run.optimizer.step()
    before, held = snapshot(net), {}
    if len(set(steps)) == 1:
        with run.averaged():
            held = snapshot(net)
        assert equal(before, snapshot(net))
    run.finalize()
    run.detach()
    return before, snapshot(net), held


EXACT = [
    *itertools.product(["gossip, with momentum", "noloco"], [1, 2, 3, 4]),
    ("noloco after a warm-up", 2),  # the order of Gloo's sum of 3 or 4 gradients is its own
]


@pytest.mark.parametrize(("kind", "world"), EXACT)
def test_ranks_equal_the_replicas_of_one_process(pool: RankPool, kind: str, world: int) -> None:
    """Bit for bit; ``finalize`` and ``averaged`` give their exact mean to all."""
    topology, strategy = Topology({"world": [list(range(world))]}), KINDS[kind]()
    results = pool.run(world, train, strategy, [9] * world)
    nets = train_replicas(strategy, topology, 9)
    values = [snapshot(nets[rank]) for rank in range(world)]
    for (before, after, held), expected in zip(results, values, strict=True):
        assert equal(before, expected)
        assert equal(after, held)
        mean = torch.stack([value["first.weight"] for value in values]).double().mean(0)
        assert torch.equal(after["first.weight"], mean.float())


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_goes_on_to_the_bit(pool: RankPool, kind: str) -> None:
    """The turn, slow weights and momentum are saved."""
    whole = pool.run(3, train, KINDS[kind](), [9] * 3)
    for stop in (1, 4, 6, 7):
        again = pool.run(3, train, KINDS[kind](), [9] * 3, stop)
        for one, other in zip(whole, again, strict=True):
            assert equal(one[0], other[0]), stop
            assert equal(one[1], other[1]), stop


@pytest.mark.parametrize("kind", ["gossip", "gossip, with momentum", "noloco"])
def test_ranks_may_run_out_of_batches(pool: RankPool, kind: str) -> None:
    """Whoever is through answers its partners until all are."""
    for steps in ([3, 12, 7, 8], [1, 6, 6]):
        (_, first, _), *others = pool.run(len(steps), train, KINDS[kind](), steps)
        assert all(equal(first, other) for _, other, _ in others)


def finalized_state() -> list[Any]:
    net = make_net()
    with attach(net, sgd(net), noloco(2), timeout=20) as run:
        for step in range(5):
            run.optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            run.optimizer.step()
        run.finalize()
        slow = run.state_dict()["kept"]["world"]["slow"]
        syncs = run.metrics()["parameters/world"]["syncs"]
        run.finalize()  # changes nothing, and sends nothing
        assert run.metrics()["parameters/world"]["syncs"] == syncs
    return [slow["slow"], slow["momentum"]]


def test_all_is_equal_in_the_end(pool: RankPool) -> None:
    """Slow weights and momentum too, so that training may go on from one checkpoint."""
    first, *others = pool.run(3, finalized_state)
    for other in others:
        assert all(equal(one, same) for one, same in zip(first, other, strict=True))


def means_of_all(strategy: Strategy) -> list[torch.Tensor]:
    """Train with a rate of 0 from different points; return the mean of all after every sync."""
    torch.manual_seed(dist.get_rank())
    weight = torch.nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    strategy, means = dataclasses.replace(strategy, initial="ignore"), []
    with attach(torch.nn.ParameterList([weight]), optimizer, strategy, timeout=20) as run:
        for _ in range(30):
            total = weight.detach().double().clone()
            dist.all_reduce(total)
            means.append(total / dist.get_world_size())
            weight.grad = torch.zeros(1000)
            optimizer.step()
        spread = weight.detach().double() - means[-1]
        run.finalize()
    return [*means, spread]


@pytest.mark.parametrize("world", [3, 4])
def test_the_mean_over_all_ranks_is_kept(pool: RankPool, world: int) -> None:
    """To rounding, while replicas come together."""
    for strategy in (noloco(1), Strategy(schedule=every(1), gossip=Gossip())):
        for *means, spread in pool.run(world, means_of_all, strategy):
            assert all(torch.allclose(mean, means[0], rtol=0, atol=3e-6) for mean in means)
            assert spread.abs().max() < 0.02


def num_bytes(strategy: Strategy, steps: int) -> tuple[int, int]:
    """Return the bytes that ``steps`` syncs took, by sockets, and what a mean of two takes."""
    weight = torch.nn.Parameter(torch.zeros(4001))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOSESTEP_SHARED_MEMORY", "0")
        with attach(torch.nn.ParameterList([weight]), optimizer, strategy, timeout=20) as run:
            for _ in range(steps):
                weight.grad = torch.ones(4001)
                optimizer.step()
            sent = run.metrics()["parameters/world"]["bytes_sent"]
            run.finalize()
    rounds = [Gossip().pairs(dist.get_world_size(), sync) for sync in range(steps)]
    mine = [pair.index(dist.get_rank()) for pairs in rounds for pair in pairs if _in(pair)]
    return sent, sum(Mean().bytes_on_wire(4001, torch.float32, 2, place) for place in mine)


def _in(pair: tuple[int, ...]) -> bool:
    return dist.get_rank() in pair


def test_bytes_are_those_of_a_mean_of_two(pool: RankPool) -> None:
    """However many ranks there are, and with slow weights too."""
    for strategy in (noloco(1), Strategy(schedule=every(1), reducer=Mean(), gossip=Gossip())):
        for sent, expected in pool.run(4, num_bytes, strategy, 3):
            assert sent == expected > 0


def groups_made() -> int:
    """Return how many c10d groups are made after attach."""
    made: list[object] = []
    net = make_net()
    with attach(net, sgd(net), noloco(1), timeout=20) as run:
        original = dist.distributed_c10d._new_process_group_helper
        with pytest.MonkeyPatch.context() as patch:

            def counted(*args: Any, **kwargs: Any) -> Any:
                made.append(args)
                return original(*args, **kwargs)

            patch.setattr(dist.distributed_c10d, "_new_process_group_helper", counted)
            for step in range(7):
                run.optimizer.zero_grad()
                loss_of(net, dist.get_rank(), step).backward()
                run.optimizer.step()
            run.finalize()
    return len(made)


def test_nothing_is_made_in_mid_training(pool: RankPool) -> None:
    """All pairs have met when training begins."""
    assert pool.run(4, groups_made) == [0] * 4


# What cannot be.


def refused(kind: str) -> str:
    net = torch.nn.Linear(2, 2)
    optimizer, strategy = sgd(net), noloco(2, alpha=0.9, gamma=0.97)
    if kind == "sharded":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        strategy = Strategy(schedule=every(4, gradients="world"), gossip=Gossip())
    with pytest.raises((NotAttachable, ValueError)) as told:
        attach(net, optimizer, strategy)
    return str(told.value)


def test_what_does_not_settle_is_not_attached(pool: RankPool) -> None:
    """Constants with which this many ranks swing apart, and shards."""
    for text in pool.run(3, refused, "gamma"):
        assert "lets 3 replicas swing apart" in text
        assert "a smaller gamma than 0.97" in text
    for text in pool.run(2, refused, "sharded"):
        assert "is for whole replicas" in text


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 9, 10, 14, 16, 20, 33, 64])
def test_the_papers_constants_settle(num: int) -> None:
    """For any number of ranks; by the order of the ring they would not from 9 on."""
    assert NoLoCo().settles(Gossip(), num)


GOSSIP: dict[str, Any] = {"gossip": Gossip()}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "several levels": (
        lambda: dataclasses.replace(hierarchical_sgd({"host": 2, "world": 4}), **GOSSIP),
        "on one level",
    ),
    "parts": (lambda: Strategy(schedule=streaming(4, 2), **GOSSIP), "all parameters at once"),
    "an adaptive period": (lambda: Strategy(schedule=every(qsr(4, 0.1)), **GOSSIP), "fixed period"),
    "an outer optimizer": (
        lambda: Strategy(schedule=every(4), outer=nesterov(), **GOSSIP),
        r"give gossip=Gossip\(NoLoCo\(\)\)",
    ),
    "few bits": (lambda: Strategy(schedule=every(4), reducer=Int4(), **GOSSIP), "reducer=Mean"),
    "a delay": (lambda: Strategy(schedule=every(4), overlap_steps=1, **GOSSIP), "overlap_steps=0"),
    "skipping": (
        lambda: Strategy(schedule=every(4), on_nonfinite="skip", **GOSSIP),
        "both are skipped",
    ),
    "an alpha of 1": (lambda: NoLoCo(alpha=1.0), r"alpha must lie in \[0, 1\), got 1.0"),
    "a beta below 0": (lambda: NoLoCo(beta=-0.1), "beta must be a number >= 0"),
    "no gamma": (lambda: NoLoCo(gamma=0.0), r"gamma must lie in \(0, 3\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    """At construction, with the way out."""
    make, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        make()
