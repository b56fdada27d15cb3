"""Compressing reducers on real ranks: the oracle's bits, exact bytes, memories, bad values."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loosestep import NonFinite, NotFinite, average_
from loosestep.comm.codecs import in_c as codec_c
from loosestep.comm.flat.cuts import Run, Runs
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.comm.peers import Message, Peers, Transfer
from loosestep.comm.reducers import NOTHING, Place
from loosestep.comm.reducers.feedback import Residuals
from loosestep.reducers import (
    AllReduce,
    Cast,
    ErrorFeedback,
    Int2,
    Int4,
    Int8,
    Mean,
    ReplicaFeedback,
    Rounding,
    Ternary,
    TopK,
    TwoLevel,
)
from loosestep.testing import RankPool
from tests.support.compressed import by_steps, oracle
from tests.support.pairs import in_pairs
from tests.support.reducing import reduce_

SIZES = [0, 1, 2, 3, 5, 255, 257, 1000, 4999]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
REDUCERS: dict[str, Callable[[], Any]] = {
    "int8": Int8,
    "int8 of 7": lambda: Int8(7),
    "int4": Int4,
    "int2": Int2,
    "ternary": Ternary,
    "topk": lambda: TopK(0.1),
    "topk back": lambda: TopK(0.1, gather=False),
    "topk in 2 bits": lambda: TopK(0.1, bits=2),
    "all": lambda: TopK(1.0),
}

MEMORIES: list[Callable[[], Any]] = [
    lambda: ErrorFeedback(Int2()),
    lambda: ErrorFeedback(Int8()),
]


def values(
    rank: int, numel: int, dtype: torch.dtype = torch.float32, call: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * call + 31 * numel + rank)
    return (torch.randn(numel, generator=generator) * (1 + rank)).to(dtype)


# The oracle: what every codec does to values, written plainly, and the mean of two phases.


class Counting:
    """Counts the bytes of all outgoing messages of this process."""

    def __init__(self) -> None:
        self.bytes, self._post = 0, Peers.post

    def post(self, peers: Peers, messages: Sequence[Message], tag: int) -> list[Transfer]:
        self.bytes += sum(m.tensor.nbytes for m in messages if m.outgoing)
        return self._post(peers, messages, tag)


def reduced(
    reducer: Any, buffer: torch.Tensor, peers: Peers, slot: str = "slot", state: Any = None
) -> Any:
    """Reduce with all messages counted; check that bytes are what was said."""
    counting, begun = Counting(), reducer.init([], peers) if state is None else state
    with mock.patch.object(Peers, "post", lambda *args: counting.post(*args)):
        handle = reducer.start(buffer, peers, begun, Place(slot))
        handle.advance()
        handle.wait()
        result = buffer.clone()
        handle.wait()
        assert torch.equal(buffer, result), "to wait again changes nothing"
        handle.commit()
    said = reducer.bytes_on_wire(buffer.numel(), buffer.dtype, peers.size, peers.group_rank)
    assert handle.traffic.bytes_sent == said == counting.bytes, (said, counting.bytes)
    return handle


def all_sizes(
    name: str, members: tuple[int, ...] | None = None, combinations: str = "pairs"
) -> list[str]:
    """Return what does not equal the oracle, over sizes, dtypes and weights."""
    ranks = tuple(range(dist.get_world_size())) if members is None else members
    if dist.get_rank() not in ranks:
        return []
    group = world_group() if members is None else Group.make(ranks)
    wrong = []
    for weighted, weights in enumerate((None, tuple(float(r + 1) for r in range(len(ranks))))):
        peers = peers_of(group, weights=weights)
        for size, numel in enumerate(SIZES):
            for kind, dtype in enumerate(DTYPES):
                if combinations == "pairs" and (size + kind + weighted) % 2:
                    continue  # the other weights have it
                mine = values(dist.get_rank(), numel, dtype)
                expected = oracle([values(r, numel, dtype) for r in ranks], name, weights)
                reduced(REDUCERS[name](), mine, peers)
                if not torch.equal(mine, expected):
                    wrong.append(f"{numel} {dtype} {weights}")
    return wrong


@pytest.mark.parametrize(("name", "world"), in_pairs(REDUCERS, [2, 4, 3, 1], each=1))
@pytest.mark.parametrize("combinations", ["pairs", pytest.param("all", marks=pytest.mark.long)])
def test_the_oracles_bits(pool: RankPool, name: str, world: int, combinations: str) -> None:
    """All ranks hold the oracle's mean to the bit, having sent the bytes that were announced."""
    assert pool.run(world, all_sizes, name, None, combinations) == [[]] * world


MANY = [300, 1, 0, 4100, 256, 7]


def many_tensors() -> list[str]:
    """Return which reducers send other bytes for a buffer of many tensors than they say."""
    wrong, rank = [], dist.get_rank()
    inner = {name: make() for name, make in {**REDUCERS, **FEEDBACK}.items()}
    between = {f"{n} in two levels": TwoLevel(r, ranks_per_host=2) for n, r in inner.items()}
    for name, reducer in {**inner, **between}.items():
        peers = peers_of(world_group())
        buffer = values(rank, sum(MANY))
        place = Place("slot", Runs(tuple(Run(str(i), 0, size) for i, size in enumerate(MANY))))
        handle = reducer.start(buffer, peers, reducer.init([], peers), place)
        handle.wait()
        if handle.traffic.bytes_sent != reducer.bytes_on_wire(MANY, buffer.dtype, peers.size, rank):
            wrong.append(name)
    return wrong


def test_bytes_of_many_tensors_are_known(pool: RankPool) -> None:
    """Blocks begin anew at each, which costs bytes that are announced."""
    assert pool.run(4, many_tensors) == [[]] * 4


def wrong_place() -> str:
    try:
        place = Place("slot", Runs.of([3, 4]))
        Int8().start(torch.ones(8), peers_of(world_group()), NOTHING, place)
    except ValueError as error:
        return str(error)
    return ""


def test_a_place_says_what_the_buffer_holds(pool: RankPool) -> None:
    """Otherwise blocks would lie where no tensor has them."""
    for text in pool.run(2, wrong_place):
        assert "'slot' has runs of 7 elements, and the buffer 8" in text


def one_size(name: str, numel: int, dtype: torch.dtype, call: int) -> torch.Tensor:
    mine = values(dist.get_rank(), numel, dtype, call)
    reduced(REDUCERS[name](), mine, peers_of(world_group()))
    return mine


@pytest.mark.parametrize("name", REDUCERS)
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the pool is the session's
)
@given(
    world=st.integers(1, 4),
    numel=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    call=st.integers(0, 1000),
)
def test_the_oracles_bits_of_any_size(
    pool: RankPool, name: str, world: int, numel: int, dtype: torch.dtype, call: int
) -> None:
    """So they do for sizes that nobody has thought of."""
    expected = oracle([values(r, numel, dtype, call) for r in range(world)], name)
    for result in pool.run(world, one_size, name, numel, dtype, call):
        assert result.dtype == dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("members", [(2, 3), (1, 2, 3)])
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_subgroups(pool: RankPool, name: str, members: tuple[int, ...]) -> None:
    """So it is in groups that do not begin with rank 0."""
    assert pool.run(4, all_sizes, name, members) == [[]] * 4


def plainly(name: str) -> list[str]:
    """Do the same without loops in C, as on a machine without a compiler."""
    with mock.patch.object(codec_c, "available", return_value=False):
        return all_sizes(name)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "ternary", "topk"])
def test_a_compiler_is_not_needed(pool: RankPool, name: str) -> None:
    """Plain torch gives the oracle's bits too."""
    assert pool.run(2, plainly, name) == [[], []]


def by_averager(name: str) -> torch.Tensor:
    mine = values(dist.get_rank(), 1000)
    traffic = average_([mine], reducer=REDUCERS[name]())
    assert traffic.bytes_sent > 0
    return mine


@pytest.mark.parametrize("name", REDUCERS)
def test_averagers_take_them(pool: RankPool, name: str) -> None:
    """``average_`` leaves the same values on all ranks."""
    one, two, three = pool.run(3, by_averager, name)
    assert torch.equal(one, two)
    assert torch.equal(two, three)


def measure_drift() -> tuple[float, float]:
    mine = torch.full((1000,), 1.0 + 2 * dist.get_rank())
    traffic = reduced(Int8(), mine, peers_of(world_group())).traffic
    return traffic.deviation / traffic.samples, traffic.magnitude / traffic.samples


def test_drift_is_measured(pool: RankPool) -> None:
    """Replicas of 1 and 3 are 1 away from their mean of 2, whose square is 4."""
    for deviation, magnitude in pool.run(2, measure_drift):
        assert deviation == pytest.approx(1.0, rel=0.01)
        assert magnitude == pytest.approx(4.0, rel=0.01)


# Values that are not finite.


def try_bad(policy: str, bad: dict[int, tuple[int, float]], weights: Any = None) -> dict[str, Any]:
    """Put a value at a place of some ranks; reduce; then reduce something else on the group."""
    rank = dist.get_rank()
    peers = peers_of(world_group(), weights=weights)
    outcome: dict[str, Any] = {"text": "", "ranks": (), "tensor": ""}
    for name in ("int8", "topk", "feedback"):
        reducer: Any = {
            "int8": Int8(on_nonfinite=policy),
            "topk": TopK(0.5, on_nonfinite=policy),
            "feedback": ErrorFeedback(Int4(on_nonfinite=policy)),
        }[name]
        mine = values(rank, 600)
        if rank in bad:
            mine[bad[rank][0]] = bad[rank][1]
        state = reducer.init([], peers)
        before, kept = mine.clone(), repr(state.state_dict())
        try:
            reduced(reducer, mine, peers, "fc.weight", state)
        except NotFinite as error:
            assert torch.equal(mine.view(torch.int32), before.view(torch.int32))
            assert repr(state.state_dict()) == kept
            outcome |= {"text": str(error), "ranks": error.ranks, "tensor": error.tensor}
        if weights is not None and weights[rank] == 0 and name == "feedback":
            assert "sent" not in state.state_dict(), "what does not count is not carried"
        outcome[name] = mine
        again = values(rank, 600)
        reduced(Int8(), again, peers, "other")
        outcome["again"] = again
    return outcome


@pytest.mark.parametrize(
    ("value", "place"), in_pairs([math.inf, -math.inf, math.nan], [0, 599], each=1)
)
def test_every_rank_raises_and_the_group_lives(pool: RankPool, place: int, value: float) -> None:
    """The error names rank and slot everywhere, nothing changed, and the next mean is right."""
    expected = oracle([values(r, 600) for r in range(3)], "int8")
    for rank, outcome in enumerate(pool.run(3, try_bad, "raise", {1: (place, value)})):
        assert outcome["text"].startswith(f"rank {rank}: ")
        assert "on rank 1 while" in outcome["text"]
        assert "'fc.weight'" in outcome["text"]
        assert outcome["ranks"] == (1,)
        assert outcome["tensor"] == "fc.weight"
        assert torch.equal(outcome["again"], expected)


def test_bad_ranks_can_be_skipped(pool: RankPool) -> None:
    """All ranks get the mean of the good ones, as if the bad had a weight of 0."""
    outcomes = pool.run(3, try_bad, "skip", {1: (5, math.nan)})
    expected = oracle([values(r, 600) for r in range(3)], "int8", [1.0, 0.0, 1.0])
    for outcome in outcomes:
        assert outcome["text"] == ""
        assert torch.equal(outcome["int8"], expected)
        assert bool(outcome["feedback"].isfinite().all())


def test_when_all_are_bad_there_is_nothing_to_skip_to(pool: RankPool) -> None:
    """That is an error even under 'skip', and it names everybody."""
    bad = {rank: (rank, math.inf) for rank in range(3)}
    for outcome in pool.run(3, try_bad, "skip", bad):
        assert outcome["ranks"] == (0, 1, 2)


def test_a_weight_of_zero_leaves_a_rank_out(pool: RankPool) -> None:
    """Its NaN is neither an error nor a part of the mean."""
    weights = (2.0, 0.0, 1.0)
    expected = oracle([values(r, 600) for r in range(3)], "int8", weights)
    for outcome in pool.run(3, try_bad, "raise", {1: (0, math.nan)}, weights):
        assert outcome["text"] == ""
        assert torch.equal(outcome["int8"], expected)


def bad_in_subgroup() -> tuple[tuple[int, ...], str]:
    """Put a NaN on global rank 3, which is group rank 1 of its pair."""
    rank = dist.get_rank()
    if rank < 2:
        return (), ""
    mine = torch.full((10,), math.nan if rank == 3 else 1.0)
    try:
        reduce_(Int8(), mine, peers_of(Group.make((2, 3))))
    except NotFinite as error:
        return error.ranks, str(error)
    return (), ""


def test_global_ranks_are_named(pool: RankPool) -> None:
    """In a subgroup the error counts as the job does."""
    for rank, (ranks, text) in list(enumerate(pool.run(4, bad_in_subgroup)))[2:]:
        assert ranks == (3,)
        assert text.startswith(f"rank {rank}: ")
        assert "on rank 3 while" in text


def too_large() -> tuple[int, ...]:
    mine = torch.ones(10, dtype=torch.float64)
    mine[3] = 1e300 if dist.get_rank() == 0 else 1.0
    try:
        reduce_(Int8(), mine, peers_of(world_group()))
    except NotFinite as error:
        return error.ranks
    return ()


def test_float64_beyond_float32_is_refused(pool: RankPool) -> None:
    """What would become an infinity on the way is not sent."""
    assert pool.run(2, too_large) == [(0,), (0,)]


def extremes(dtype: torch.dtype) -> bool:
    """Reduce the largest and the smallest numbers with every reducer."""
    finfo = torch.finfo(dtype)
    for make in (*REDUCERS.values(), *MEMORIES):
        reducer = make()
        for _ in range(3):
            for value in (finfo.max, -finfo.max, finfo.tiny, finfo.smallest_normal / 4):
                mine = torch.full((700,), value, dtype=dtype)
                mine[::3] = value / 2
                reduced(reducer, mine, peers_of(world_group()))
                if not mine.isfinite().all():
                    return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_finite_stays_finite(pool: RankPool, dtype: torch.dtype) -> None:
    """Neither the largest numbers nor denormal ones become infinite or NaN."""
    assert pool.run(3, extremes, dtype) == [True] * 3


# Memory.

FEEDBACK: dict[str, Callable[[], Any]] = {
    "int8": lambda: ErrorFeedback(Int8()),
    "int4": lambda: ErrorFeedback(Int4(rounding="stochastic", seed=3)),
    "int2": lambda: ErrorFeedback(Int2()),
    "topk": lambda: ErrorFeedback(TopK(0.05)),
    "topk back": lambda: ErrorFeedback(TopK(0.05, gather=False)),
    "topk in 2 bits": lambda: ErrorFeedback(TopK(0.05, bits=2)),
    "bf16": lambda: ErrorFeedback(Cast(torch.bfloat16)),
}


def conserve(name: str, members: tuple[int, ...], num_calls: int) -> dict[str, Any] | None:
    """Return what was given, what came out, and what is kept at the end, all summed over time."""
    if dist.get_rank() not in members:
        return None
    peers = peers_of(Group.make(members), level="pair")
    reducer = FEEDBACK[name]()
    state = reducer.init([], peers)
    given = torch.zeros(1001, dtype=torch.float64)
    got = torch.zeros_like(given)
    for call in range(num_calls):
        mine = values(dist.get_rank(), 1001, call=call)
        given += mine
        reduced(reducer, mine, peers, state=state)
        got += mine
    return {"given": given, "got": got, **state.state_dict()}


@pytest.mark.parametrize(("name", "members"), in_pairs(FEEDBACK, [(0, 1), (1, 2, 3)], each=1))
def test_nothing_is_lost(pool: RankPool, name: str, members: tuple[int, ...]) -> None:
    """What came out, what the owners keep and the mean of what ranks keep is the mean given."""
    results = [r for r in pool.run(4, conserve, name, members, 40) if r is not None]
    given = torch.stack([r["given"] for r in results]).mean(0)
    kept = torch.stack([r["sent"]["slot"].double() for r in results]).mean(0)
    owned = torch.zeros_like(given)
    if "mean" in results[0]:  # nobody owns what two ranks swap, or all gather
        owned = torch.cat([r["mean"]["slot"] for r in results]).double()
    for result in results:
        assert torch.equal(result["got"], results[0]["got"])
        assert torch.allclose(result["got"] + owned + kept, given, atol=1e-4, rtol=1e-4)
    assert float(kept.abs().max()) > 0  # else this test would say nothing


def faded() -> list[list[float]]:
    """Send the largest of two values three times, where what is kept fades by a half."""
    peers, reducer = peers_of(world_group()), ErrorFeedback(TopK(0.5), decay=0.5)
    state, results = reducer.init([], peers), []
    for pair in ([4.0, 3.0], [0.0, 1.0], [2.0, 0.0]):
        mine = torch.tensor(pair)
        reduced(reducer, mine, peers, state=state)
        results.append([*mine.tolist(), *state.state_dict()["sent"]["slot"].tolist()])
    return results


def test_what_is_kept_can_fade(pool: RankPool) -> None:
    """By hand: e = x + e / 2, of which the largest is sent; then what comes out and what is kept.

    [4, 3] sends 4 and keeps 3; [0, 1 + 1.5] sends 2.5; [2, 0] sends 2.
    """
    steps = [[4.0, 0.0, 0.0, 3.0], [0.0, 2.5, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    assert pool.run(3, faded) == [steps] * 3


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5, math.nan, True, "half"])
def test_a_decay_is_a_share(decay: Any) -> None:
    """Nothing kept, or more than there was, is no feedback; and a replica does not fade."""
    with pytest.raises(ValueError, match="decay must lie in"):
        ErrorFeedback(Int4(), decay=decay)
    with pytest.raises(ValueError, match="would shrink what was learnt"):
        ReplicaFeedback(Int4(), decay=0.9)


def both_sides() -> list[tuple[bool, bool]]:
    """Say for two calls whether sent = given + kept before - kept after, here and at the owner."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = peers_of(world_group())
    reducer = ErrorFeedback(Int4())
    residuals = reducer.init([], peers)
    start, stop = [0, 256, 768, 999][rank : rank + 2]  # the cuts between blocks nearest to thirds
    kept, owned = torch.zeros(999), torch.zeros(stop - start)
    checks = []
    for call in range(3):
        mine = values(rank, 999, call=call)
        wanted = mine + kept
        sent = by_steps(wanted, 7, 256)
        everyone = [torch.empty(999) for _ in range(world)]
        dist.all_gather(everyone, sent)
        total = torch.zeros(stop - start)
        for replica in everyone:
            total = total + torch.tensor(1 / world) * replica[start:stop]
        result = by_steps(total + owned, 7, 256)
        kept, owned = wanted - sent, total + owned - result
        reduced(reducer, mine, peers, state=residuals)
        state = residuals.state_dict()
        memory = torch.equal(state["sent"]["slot"], kept)
        checks.append(
            (
                memory and torch.equal(state["mean"]["slot"], owned),
                torch.equal(mine[start:stop], result),
            )
        )
    return checks


def test_feedback_written_out(pool: RankPool) -> None:
    """Residuals on both sides and results equal the definition to the bit, call after call."""
    assert pool.run(3, both_sides) == [[(True, True)] * 3] * 3


def resume(name: str) -> bool:
    """Run six calls at once, and three and three with a checkpoint in between."""
    peers = peers_of(world_group())

    def run(state: Any, calls: range) -> list[torch.Tensor]:
        results = []
        for call in calls:
            for slot in ("one", "two"):
                mine = values(dist.get_rank(), 500, call=call)
                reduced(reducer, mine, peers, slot, state)
                results.append(mine)
        return results

    reducer = FEEDBACK[name]() if name in FEEDBACK else Int8(rounding="stochastic")
    whole = run(reducer.init([], peers), range(6))
    first, second = reducer.init([], peers), reducer.init([], peers)
    halves = run(first, range(3))
    state = first.state_dict()
    run(first, range(3, 4))  # what goes on must not change what was taken
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    halves += run(second, range(3, 6))
    return all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))


@pytest.mark.parametrize("name", [*FEEDBACK, "chance"])
def test_resumed_is_uninterrupted(pool: RankPool, name: str) -> None:
    """With the state loaded, the bits go on as if nothing had happened."""
    assert pool.run(2, resume, name) == [True, True]


def chances() -> torch.Tensor:
    peers = peers_of(world_group())
    reducer, other = (Int4(rounding="stochastic", seed=seed) for seed in (0, 1))
    state, others = reducer.init([], peers), other.init([], peers)
    results = []
    for one, slot in ((reducer, "a"), (reducer, "a"), (reducer, "b"), (other, "a")):
        mine = torch.linspace(-1, 1, 300)
        reduced(one, mine, peers, slot, state if one is reducer else others)
        results.append(mine)
    assert len({tuple(r.tolist()) for r in results}) == 4, "calls, slots and seeds differ"
    return torch.stack(results)


def test_chances_differ_and_ranks_agree(pool: RankPool) -> None:
    """Every call, slot and seed rounds in its own way; all ranks end equal in each."""
    one, two = pool.run(2, chances)
    assert torch.equal(one, two)


def wrong_size() -> str:
    reducer = ErrorFeedback(Int8())
    peers = peers_of(world_group())
    state = reducer.init([], peers)
    reduce_(reducer, torch.ones(10), peers, state=state)
    try:
        reduce_(reducer, torch.ones(12), peers, state=state)
    except ValueError as error:
        state.load_state_dict({})
        reduce_(reducer, torch.ones(12), peers, state=state)
        return str(error)
    return ""


def test_a_memory_that_does_not_fit(pool: RankPool) -> None:
    """The error has both sizes and the way out, which works."""
    for text in pool.run(2, wrong_size):
        assert "10 values for 'slot'" in text
        assert "12 now" in text
        assert "load_state_dict({})" in text


# By construction.


@pytest.mark.parametrize("inner", [Mean(), AllReduce(), Cast(torch.bfloat16, AllReduce())])
def test_feedback_needs_something_lossy(inner: Any) -> None:
    """Where nothing is dropped, or somebody else drops it, there is nothing to keep."""
    with pytest.raises(ValueError, match="drops nothing that could be kept"):
        ErrorFeedback(inner)


def test_reducers_say_what_they_are() -> None:
    """Ranks compare strategies by repr, so settings are in it; lossy ones say so."""
    assert repr(Int8()) == "Int8(block=256, rounding='nearest', on_nonfinite='raise')"
    assert "seed=7" in repr(Int4(rounding=Rounding.STOCHASTIC, seed=7))
    assert repr(TopK(0.1, on_nonfinite="skip")) == (
        "TopK(0.1, chunk=4096, bits=None, gather=True, on_nonfinite='skip')"
    )
    assert repr(ErrorFeedback(Int2(64))).startswith("ErrorFeedback(Int2(block=64, ")
    lossy: list[Any] = [Int8(), Int4(), Int2(), TopK(0.1), Cast(torch.float16)]
    assert all(reducer.lossy for reducer in [*lossy, *map(ErrorFeedback, lossy)])
    assert not AllReduce().lossy
    assert not Mean().lossy


def test_names_are_checked_at_once() -> None:
    """A wrong name lists the right ones."""
    with pytest.raises(ValueError, match=r"'nearest', 'stochastic'.*'random'"):
        Int8(rounding="random")
    with pytest.raises(ValueError, match=r"'raise', 'skip'.*'ignore'"):
        TopK(0.1, on_nonfinite="ignore")
    assert TopK(0.1, on_nonfinite=NonFinite.SKIP).on_nonfinite is NonFinite.SKIP


def test_strange_states_are_refused() -> None:
    """A state of another reducer is not taken silently."""
    with pytest.raises(ValueError, match="another reducer"):
        NOTHING.load_state_dict({"calls": {"a": 1}})
    with pytest.raises(ValueError, match="another reducer"):
        Residuals(NOTHING).load_state_dict({"calls": {}})


def integers() -> str:
    try:
        reduce_(Int8(), torch.ones(4, dtype=torch.int64), peers_of(world_group()), "count")
    except TypeError as error:
        return str(error)
    return ""


def test_integers_are_refused(pool: RankPool) -> None:
    """Only floating values are encoded."""
    for text in pool.run(2, integers):
        assert "int64 in 'count'" in text
        assert "Mean()" in text
