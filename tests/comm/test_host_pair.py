"""Gradients in few bits between two hosts whose ranks share memory: two passes, the same bits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from loosestep import NotAttachable, NotFinite, Strategy, Topology, attach, ddp, post_local_sgd
from loosestep.comm.codecs import in_c as codec_c
from loosestep.comm.codecs.blocks import Blocks
from loosestep.comm.group import Group, peers_of
from loosestep.comm.reducers.host_pair import HostPair, Route, can_pair
from loosestep.comm.reducers.mean import mean_into
from loosestep.reducers import (
    ErrorFeedback,
    Int4,
    Int8,
    Mean,
    Reducer,
    Resident,
    Scaled,
    Ternary,
    TwoLevel,
)
from loosestep.schedules import after, always
from loosestep.testing import RankPool, RanksFailed
from tests.support.codecs import floats, same_bits
from tests.support.gradients import parameters
from tests.support.gradients import train as train_in_phases
from tests.support.oracle import Experts, equal, snapshot
from tests.support.pairs import in_pairs
from tests.support.resident import Mixed, backward, loss_of

STEPS = 6
PLACE = "loosestep.comm.reducers.two_level"
INNER: dict[str, Callable[[], Reducer]] = {
    "ternary, scaled": lambda: Scaled(Ternary(64)),
    "int8, scaled": lambda: Scaled(Int8()),
    "ternary": Ternary,
    "int4": lambda: Int4(100),
    "feedback": lambda: ErrorFeedback(Int4()),  # which the two passes do not know
}
WAYS = ("copied", "resident", "paired")


def hosts_of_two(inner: str, way: str) -> TwoLevel:
    """Return the reducer of a way."""
    inside = Mean() if way == "copied" else Resident()
    return TwoLevel(INNER[inner](), inside=inside, ranks_per_host=2)


def train(inner: str, way: str, loop: str = "plain") -> tuple[dict[str, torch.Tensor], Any, int]:
    """Train; return parameters, what the reducer keeps, and how many buffers took two passes."""
    launched = []

    def counted(*args: Any) -> HostPair:
        launched.append(HostPair(*args))
        return launched[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{PLACE}.HostPair", counted)
        if way == "resident":
            patch.setattr(f"{PLACE}.can_pair", lambda *_: False)
        net, reducer = Mixed(), hosts_of_two(inner, way)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        with attach(net, optimizer, ddp(gradient_reducer=reducer)) as run:
            for step in range(STEPS):
                optimizer.zero_grad(set_to_none=loop != "kept")
                backward(net, run, step, loop)
                optimizer.step()
            return snapshot(net), run.state_dict()["gradients"], len(launched)


@pytest.mark.parametrize(
    "inner",
    [
        "ternary, scaled",
        "feedback",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("int8, scaled", "ternary", "int4")),
    ],
)
def test_two_passes_have_the_bits_of_many(pool: RankPool, inner: str) -> None:
    """Copied through windows, resident, or in two passes: parameters and what is kept are equal."""
    results = {way: pool.run(4, train, inner, way) for way in WAYS}
    for way in WAYS:
        for rank in range(4):
            state, kept, launched = results[way][rank]
            assert equal(state, results["copied"][0][0]), way
            assert _same(kept, results["copied"][rank][1]), way
            assert (launched > 0) == (way == "paired" and inner != "feedback")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("loop", ["kept", "micro-batches", "two losses", "clipped"])
def test_whatever_the_loop_does(pool: RankPool, loop: str) -> None:
    """Kept gradients, micro-batches and second losses are shared as without two passes."""
    copied, paired = (pool.run(4, train, "int8, scaled", way, loop) for way in ("copied", "paired"))
    assert equal(copied[0][0], paired[0][0])
    assert all(equal(paired[0][0], state) for state, _, _ in paired)


def train_experts(way: str) -> dict[str, torch.Tensor]:
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two("int8, scaled", way))):
        for step in range(5):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4), int(dist.get_rank() == step % 4)).square().sum().backward()
            optimizer.step()
    return snapshot(net)


def test_unused_parameters(pool: RankPool) -> None:
    """What one rank of one host used gets the mean on all; what nobody used does not decay."""
    copied, paired = (pool.run(4, train_experts, way) for way in ("copied", "paired"))
    assert all(equal(copied[0], state) for state in paired)
    assert torch.equal(paired[0]["unused.weight"], snapshot(Experts())["unused.weight"])


def thaw(way: str) -> dict[str, torch.Tensor]:
    net = Mixed()
    net.first.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two("int8, scaled", way))):
        for step in range(STEPS):
            net.first.requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    return snapshot(net)


def test_thawed_parameters(pool: RankPool) -> None:
    """Those that are trained later have no room, and are copied."""
    assert equal(*(pool.run(4, thaw, way)[0] for way in ("copied", "paired")))


def not_finite(bad: float, on: tuple[int, ...]) -> tuple[tuple[int, ...], bool, torch.Tensor]:
    """Return who was blamed, whether gradients were left alone, and parameters after more steps."""
    torch.manual_seed(3)
    net = torch.nn.Linear(31, 29)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    blamed: tuple[int, ...] = ()
    rank, alone = dist.get_rank(), False
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two("ternary, scaled", "paired"))):
        for step in range(5):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            inputs = torch.randn(4, 31)
            if step == 2 and rank in on:
                inputs[0, rank] = bad
            own = torch.autograd.grad(net(inputs).square().sum(), list(net.parameters()))
            try:
                net(inputs).square().sum().backward()
                optimizer.step()
            except NotFinite as error:
                blamed = error.ranks
                mine = [p.grad for p in net.parameters() if p.grad is not None]
                alone = all(same_bits(a, b) for a, b in zip(mine, own, strict=True))
    return blamed, alone, net.weight.detach().clone()


@pytest.mark.parametrize(
    ("bad", "on"), in_pairs([math.inf, math.nan], [(0,), (1, 2), (3,)], each=1)
)
def test_what_is_not_finite_is_refused(pool: RankPool, bad: float, on: tuple[int, ...]) -> None:
    """All ranks name those that had it, nobody's gradients have changed, and all go on equal."""
    results = pool.run(4, not_finite, bad, on)
    assert [blamed for blamed, _, _ in results] == [on] * 4
    assert all(alone for _, alone, _ in results)
    assert all(torch.equal(weight, results[0][2]) for _, _, weight in results)
    assert bool(results[0][2].isfinite().all())


def interrupted(stop: int | None) -> dict[str, torch.Tensor]:
    """Train, and begin anew from a state at step ``stop``."""
    net = Mixed()
    kept: dict[str, Any] = {}
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    for start, end in [(0, STEPS)] if stop is None else [(0, stop), (stop, STEPS)]:
        reducer = hosts_of_two("ternary, scaled", "paired")
        with attach(net, optimizer, ddp(gradient_reducer=reducer)) as run:
            if kept:
                run.load_state_dict(kept)
            for step in range(start, end):
                optimizer.zero_grad()
                loss_of(net, step).backward()
                optimizer.step()
            kept = run.state_dict()
    return snapshot(net)


@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_is_uninterrupted(pool: RankPool, stop: int) -> None:
    """To the bit: units are in the state of every rank."""
    whole, resumed = pool.run(4, interrupted, None), pool.run(4, interrupted, stop)
    assert all(equal(*pair) for pair in zip(whole, resumed, strict=True))


def test_resuming_in_either_phase(pool: RankPool) -> None:
    """First all share gradients, then pairs on one host each: from any step it goes on alike."""
    everybody = [0, 1, 2, 3]
    whole = pool.run(4, train_in_phases, "in rooms", "plain", everybody)
    for stop in (1, 3, 5):
        resumed = pool.run(4, train_in_phases, "in rooms", "plain", everybody, stop)
        for (one, _), (other, _) in zip(whole, resumed, strict=True):
            assert equal(parameters(one), parameters(other)), stop


def sent() -> tuple[int, int]:
    """Return bytes sent in a step, and how many values there are."""
    net = torch.nn.Linear(1000, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(gradient_reducer=hosts_of_two("ternary", "paired"))) as run:
        net(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
        return run.metrics()["gradients/world"]["bytes_sent"], 1000 * 64 + 64


def test_bytes(pool: RankPool) -> None:
    """A host sends 1.6 bits a value and a scale for 256 of them, once; and little else."""
    results = pool.run(4, sent)
    numel = results[0][1]
    values = numel / 5 + 4 * numel / 256
    for first in (0, 2):
        # Behind every slice there is a bit for every rank, and who used which of two tensors.
        assert values < sum(count for count, _ in results[first : first + 2]) < 1.02 * values


def refuse_on_one_host(levels: int) -> str:
    if dist.get_rank() >= 2:
        os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"
    topology = Topology({"pair": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}, timeout=60)
    wide = always(gradients="world")
    net, schedule = Mixed(), wide if levels == 1 else after(2, always(gradients="pair"), wide)
    reducer = hosts_of_two("int4", "paired")
    strategy = Strategy(schedule=schedule, topology=topology, gradient_reducer=reducer)
    try:
        attach(net, torch.optim.SGD(net.parameters(), lr=1e-3), strategy)
    except NotAttachable as error:
        return str(error)
    finally:
        os.environ.pop("LOOSESTEP_SHARED_MEMORY", None)
    return ""


@pytest.mark.parametrize("levels", [1, 2])
def test_all_hosts_hear_why_one_cannot(pool: RankPool, levels: int) -> None:
    """Nobody waits for a host that has left, whichever level it refuses on."""
    for text in pool.run(4, refuse_on_one_host, levels, timeout=40):
        assert "gradients cannot be resident" in text


def said_to_be_near() -> bool:
    """Call four ranks that share no memory a host, of which two such would be."""
    group = dist.new_group()
    Group.of(group).use_network()
    peers = peers_of(group)
    try:
        return can_pair(Int4(), Route(peers, peers, peers, [(0, 1, 2, 3), (4, 5, 6, 7)]))
    finally:
        dist.destroy_process_group(group)


def test_a_host_that_is_several_is_none(pool: RankPool) -> None:
    """Slices of those that are not near would never be written."""
    assert pool.run(4, said_to_be_near) == [False] * 4


def one_host_cannot() -> tuple[dict[str, torch.Tensor], int]:
    able = dist.get_rank() < 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{PLACE}.can_pair", lambda *args: able and can_pair(*args))
        state, _, launched = train("int4", "paired")
    return state, launched


def test_hosts_that_differ_take_the_way_that_all_can(pool: RankPool) -> None:
    """The messages of two passes are others, so all take them or none."""
    results = pool.run(4, one_host_cannot, timeout=60)
    wanted, _, _ = pool.run(4, train, "int4", "copied")[0]
    assert all(equal(wanted, state) and launched == 0 for state, launched in results)


def lose(who: int) -> None:
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    topology = Topology({"world": [[0, 1, 2, 3]]}, timeout=15)
    reducer = hosts_of_two("ternary", "paired")
    with attach(net, optimizer, ddp(gradient_reducer=reducer, topology=topology)):
        for step in range(3):
            if dist.get_rank() == who and step == 1:
                os.kill(os.getpid(), 9)
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()


@pytest.mark.parametrize("who", [1, 2])
def test_a_dead_rank_is_named(pool: RankPool, who: int) -> None:
    """A neighbour or the twin on the other host: an error that says who, on all that are left."""
    with pytest.raises(RanksFailed) as failure:
        pool.run(4, lose, who, timeout=90)
    for rank in set(range(4)) - {who}:
        assert "PeerLost" in failure.value.failures[rank]
        assert "sharing gradients" in failure.value.failures[rank]
    assert f"lost rank {who}" in failure.value.failures[0]


@given(
    values=floats(),
    others=floats(),
    squares=floats(),
    bits=st.sampled_from([8, 4, 2, 1.6]),
    block=st.sampled_from([1, 7, 64, 256]),
    unit=st.booleans(),
    num=st.integers(1, 5),
)
def test_c_does_in_one_pass_what_it_does_in_many(
    values: torch.Tensor,
    others: torch.Tensor,
    squares: torch.Tensor,
    bits: float,
    block: int,
    unit: bool,
    num: int,
) -> None:
    """To the bit: means, units, codes, and back."""
    size = min(values.numel(), others.numel(), squares.numel())
    replicas, squares = [values[:size], others[:size]] * num, squares[:size].abs()
    replicas = replicas[:num]
    codec, least, keep = Blocks(bits, block), 1e-12, 0.75
    wanted, there, found = (torch.zeros(codec.nbytes(size), dtype=torch.uint8) for _ in range(3))
    mean = torch.empty(size)
    mean_into(mean, replicas)
    if unit:
        codec_c.to_units(mean, squares, least, mean)
        mean.clamp_(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    codec.encode(mean, wanted, None)
    codec.encode(values[:size], there, None)
    if size:
        kept = (squares, least) if unit else None
        assert codec_c.pack_host(replicas, kept, block, bits, codec.cut(found, size))
    assert torch.equal(found, wanted)

    codec.decode(wanted, size, mean, 0.5)
    codec.add(there, mean, 0.5)
    outs, learnt = [torch.empty(size), torch.empty(size)], squares.clone()
    largest = codec_c.from_units(mean, squares, least, keep) if unit else 0.0
    if size:
        parts = [codec.cut(message, size) for message in (wanted, there)]
        moved = (learnt, least, keep) if unit else None
        assert codec_c.unpack_pair(parts, moved, block, bits, outs) == largest
    assert all(same_bits(out, mean) for out in outs)
    assert torch.equal(learnt, squares)


def test_a_value_that_is_not_finite_is_seen() -> None:
    """Wherever it is, also where two of them cancel."""
    codec = Blocks(8)
    for bad in (math.inf, -math.inf, math.nan):
        replicas = [torch.ones(700), torch.ones(700)]
        replicas[1][650], replicas[0][650] = bad, -bad
        message = codec.cut(torch.zeros(codec.nbytes(700), dtype=torch.uint8), 700)
        assert not codec_c.pack_host(replicas, None, 256, 8, message)


def test_bad_input() -> None:
    """With the rule, the value and the way out."""
    with pytest.raises(TypeError, match=r"inside must be Mean\(\) or Resident\(\), got Int8"):
        TwoLevel(Int4(), inside=Int8())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nothing is compressed between hosts.*use Resident"):
        TwoLevel(inside=Resident())
    with pytest.raises(ValueError, match=r"moves gradients.*give it without inside=Resident\(\)"):
        post_local_sgd(2, reducer=TwoLevel(Int8(), inside=Resident(), ranks_per_host=1))


def test_its_name_says_what_ranks_must_agree_on() -> None:
    """Also where gradients live."""
    assert repr(TwoLevel(Int8(), inside=Resident())).endswith("differ, inside=Resident())")
