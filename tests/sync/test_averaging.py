"""One average: exact, in place, whatever the shapes, dtypes, strides and ways of transport."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from loosestep import PeriodicModelAverager, Topology, average_
from loosestep.comm.group import peers_of, world_group
from loosestep.comm.reducers import mean_into
from loosestep.reducers import AllReduce, Cast, Int8, Mean, Reducer, SharedMemoryMean
from loosestep.sync.averager import Averager
from loosestep.sync.connected import ConnectedTopology
from loosestep.testing import RankPool, RecordingReducer

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def by_network(body: Any, *args: Any) -> Any:
    """Run a body with slices going through sockets, as between hosts."""
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0"
    return body(*args)


def values(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * seed + rank)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=kind).to(dtype)


def oracle(replicas: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean by definition, without the library."""
    first = replicas[0]
    if first.is_complex():
        return torch.view_as_complex(oracle([torch.view_as_real(r) for r in replicas]))
    if first.dtype == torch.float64:
        return first + sum((r - first for r in replicas[1:]), torch.zeros_like(first)) / len(
            replicas
        )
    wide = torch.float64 if first.dtype == torch.float32 else torch.float32
    total = first.to(wide)
    for replica in replicas[1:]:
        total = total + replica.to(wide)
    return (total / len(replicas)).to(first.dtype)


def random_shapes(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    dims = [0, 1, 2, 3, 5, 7]
    return [tuple(rng.choice(dims) for _ in range(rng.randint(0, 4))) for _ in range(12)]


def average_shapes(seed: int, window_bytes: int) -> bool:
    """Average random shapes and dtypes with a window size; compare with the oracle."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [(shape, DTYPES[i % len(DTYPES)]) for i, shape in enumerate(random_shapes(seed))]
    mine = [values(shape, dtype, rank, seed) for shape, dtype in shapes]
    named = [(f"tensor {index}", tensor) for index, tensor in enumerate(mine)]
    Averager(peers_of(world_group()), window_bytes=window_bytes).average(named)
    for (shape, dtype), result in zip(shapes, mine, strict=True):
        expected = oracle([values(shape, dtype, r, seed) for r in range(world)])
        if not torch.equal(result, expected):
            return False
    return True


@pytest.mark.parametrize("transport", ["memory", "network"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_shapes_and_window_sizes_give_the_mean_to_the_bit(
    pool: RankPool, world: int, transport: str
) -> None:
    """Whatever the buffers' size, the result is the oracle's; the ways of transport agree."""
    for seed, window_bytes in enumerate([16, 48, 100, 1000, 4096, 1 << 20]):
        arguments = (average_shapes, seed, window_bytes)
        if transport == "network":
            arguments = (by_network, *arguments)  # type: ignore[assignment]
        assert all(pool.run(world, *arguments)), (seed, window_bytes)


def average_large() -> bool:
    """Average more than a window, with slices longer than a block, in both transports."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (3, 700_001)
    mine = values(shape, torch.float32, rank)
    average_([mine])
    return torch.equal(mine, oracle([values(shape, torch.float32, r) for r in range(world)]))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_tensors(pool: RankPool, world: int) -> None:
    """Tensors of several windows come out right by memory and by network."""
    assert all(pool.run(world, average_large))
    assert all(pool.run(world, by_network, average_large))


def keep_layout() -> list[str]:
    """Return what changed about tensors of all kinds of layout."""
    rank = dist.get_rank()
    base = torch.full((4, 6), float(rank))
    tensors = {
        "contiguous": torch.full((4, 4), float(rank)),
        "channels_last": torch.full((2, 3, 4, 4), float(rank)).to(
            memory_format=torch.channels_last
        ),
        "transposed": torch.full((3, 5), float(rank)).t(),
        "strided": base[:, ::2],
        "scalar": torch.tensor(float(rank)),
        "bfloat16": torch.full((9,), float(rank), dtype=torch.bfloat16),
        "double": torch.full((9,), float(rank), dtype=torch.float64),
        "complex": torch.full((3,), complex(rank, -rank)),
    }
    view = tensors["contiguous"][1]
    before = {n: (t.data_ptr(), t.stride(), t.dtype, t.shape) for n, t in tensors.items()}
    average_(list(tensors.items()))
    changed = [
        name
        for name, t in tensors.items()
        if (t.data_ptr(), t.stride(), t.dtype, t.shape) != before[name]
    ]
    wrong = [n for n, t in tensors.items() if n != "complex" and not t.eq(1.0).all()]
    if not tensors["complex"].eq(1 - 1j).all():
        wrong.append("complex")
    if not view.eq(1.0).all():
        wrong.append("view")
    if not base[:, 1::2].eq(rank).all():
        wrong.append("holes")
    return changed + wrong


@pytest.mark.fast
@pytest.mark.parametrize("network", [False, True])
def test_storage_strides_and_dtypes_stay(pool: RankPool, network: bool) -> None:
    """Pointers, strides, dtypes, views and the holes between strides are as before."""
    arguments = (by_network, keep_layout) if network else (keep_layout,)
    assert pool.run(3, *arguments) == [[], [], []]


def mixed_layouts() -> torch.Tensor:
    """One rank keeps the weight in another memory format than the others."""
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 8, 8)
    if dist.get_rank() == 1:
        weight = weight.to(memory_format=torch.channels_last)
    average_([weight])
    return weight


@pytest.mark.fast
def test_ranks_may_differ_in_memory_format(pool: RankPool) -> None:
    """Elements meet by place, not by address: equal replicas stay equal."""
    torch.manual_seed(0)
    expected = torch.randn(4, 3, 8, 8)
    assert all(torch.equal(weight, expected) for weight in pool.run(2, mixed_layouts))


def identical(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-6, 4, 4001)
    before = (torch.randn(4001, generator=generator) * scale).to(dtype)
    after = before.clone()
    average_([after])
    return torch.equal(before, after)


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equal_replicas_never_change(pool: RankPool, dtype: torch.dtype) -> None:
    """A sync of equal replicas is the identity, to the bit, for every dtype."""
    assert pool.run(3, identical, dtype) == [True] * 3


def weighted(weights: list[float]) -> torch.Tensor:
    mine = values((1000,), torch.float32, dist.get_rank())
    average_([mine], weights=weights)
    return mine


@pytest.mark.fast
def test_weights(pool: RankPool) -> None:
    """The weighted mean is the sum of w x in rank order, in float64, over the sum of w."""
    weights = [1.0, 2.5, 0.25]
    total = torch.zeros(1000, dtype=torch.float64)
    for rank, weight in enumerate(weights):
        total += values((1000,), torch.float32, rank).double() * weight
    expected = (total / sum(weights)).float()
    assert all(torch.equal(result, expected) for result in pool.run(3, weighted, weights))


def reduce_with(name: str) -> tuple[torch.Tensor, int, int]:
    reducer: Any = {"cast": Cast(torch.bfloat16), "native": AllReduce(), "mean": Mean()}[name]
    mine = values((4097,), torch.float32, dist.get_rank())
    traffic = average_([mine], reducer=reducer)
    said = reducer.bytes_on_wire(4097, torch.float32, dist.get_world_size(), dist.get_rank())
    return mine, traffic.bytes_sent + traffic.bytes_copied, said


@pytest.mark.fast
@pytest.mark.parametrize("name", ["cast", "native", "mean"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_reducers(pool: RankPool, name: str, world: int) -> None:
    """All ranks end bit-equal, near the mean, having moved the bytes that were announced."""
    expected = oracle([values((4097,), torch.float32, rank) for rank in range(world)])
    results = pool.run(world, reduce_with, name)
    tolerance = 0.02 if name == "cast" else 1e-6
    for result, moved, said in results:
        assert torch.equal(result, results[0][0])
        assert torch.allclose(result, expected, atol=tolerance)
        assert moved == said


@pytest.mark.fast
def test_cast_halves_the_bytes() -> None:
    """bf16 needs half of float32's bytes, and what is narrow already is left alone."""
    exact, half = Mean(), Cast(torch.bfloat16)
    assert half.bytes_on_wire(1000, torch.float32, 4) * 2 == exact.bytes_on_wire(
        1000, torch.float32, 4
    )
    assert half.bytes_on_wire(10, torch.float16, 2) == exact.bytes_on_wire(10, torch.float16, 2)


def saturate() -> torch.Tensor:
    mine = torch.tensor([1e6, -1e6, float("inf"), 1.0])
    average_([mine], reducer=Cast(torch.float16))
    return mine


@pytest.mark.fast
def test_cast_saturates_instead_of_overflowing(pool: RankPool) -> None:
    """A value beyond float16's range is sent as the largest that fits; an infinity stays one."""
    for result in pool.run(2, saturate):
        assert result.tolist() == [65504.0, -65504.0, float("inf"), 1.0]


@pytest.mark.fast
@given(
    world=st.integers(1, 9),
    data=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40
    ),
    same=st.booleans(),
)
def test_the_arithmetic_by_itself(world: int, data: list[float], same: bool) -> None:
    """The mean lies between the smallest and the largest, and equal replicas are a fixed point."""
    base = torch.tensor(data, dtype=torch.float32)
    replicas = [base if same else base.roll(rank) for rank in range(world)]
    out = torch.empty_like(base)
    mean_into(out, replicas)
    if same:
        assert torch.equal(out, base)
    stacked = torch.stack(replicas)
    assert bool((out >= stacked.min(0).values).all())
    assert bool((out <= stacked.max(0).values).all())


@pytest.mark.fast
def test_the_mean_by_hand() -> None:
    """(1 + 2 + 6) / 3 = 3; weighted (1*1 + 2*1 + 6*2) / 4 = 3.75."""
    replicas = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([6.0])]
    out = torch.empty(1)
    mean_into(out, replicas)
    assert out.item() == 3.0
    mean_into(out, replicas, [1.0, 1.0, 2.0])
    assert out.item() == 3.75


def ties() -> tuple[bool, float]:
    one = torch.nn.Parameter(torch.full((4, 4), float(dist.get_rank())))
    two = torch.nn.Parameter(torch.empty(0))
    two.data = one.data.t()
    reducer = RecordingReducer()
    average_([("one", one), ("two", two)], reducer=reducer)
    assert [call[:2] for call in reducer.calls] == [("0 one", 16)]
    return one.data_ptr() == two.data_ptr(), float(two.detach().mean())


@pytest.mark.fast
def test_tied_storage_is_averaged_once(pool: RankPool) -> None:
    """Two parameters over the same memory stay tied and hold the mean."""
    assert pool.run(2, ties) == [(True, 0.5), (True, 0.5)]


def shared_in_part(overlap_steps: int = 0, reducer: Reducer | None = None) -> list[float]:
    shared = torch.nn.Parameter(torch.arange(12.0) * (dist.get_rank() + 1))
    flat = shared.detach()
    named = [torch.nn.Parameter(part) for part in (flat[4:7], flat[2:10].view(2, 4), flat[8:])]
    averager = PeriodicModelAverager(2, overlap_steps=overlap_steps, reducer=reducer)
    for parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        averager.average_parameters(named)
    averager.finalize(named)
    assert [p.data_ptr() - named[1].data_ptr() for p in named] == [8, 0, 24]
    if reducer is None or not reducer.resident:  # else they live elsewhere, together
        assert named[1].data_ptr() == flat[2:].data_ptr()
    return [*flat[:2].tolist(), *named[1].flatten().tolist(), *named[2][2:].tolist()]


@pytest.mark.fast
@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_the_union_of_what_overlaps_is_averaged(pool: RankPool, overlap_steps: int) -> None:
    """Every byte is averaged once, whichever tensors it belongs to; the others are not touched."""
    for rank, values in enumerate(pool.run(2, shared_in_part, overlap_steps)):
        # The mean of 1 and 2 times a value, but for the first two, which no tensor has.
        assert values == [0.0, rank + 1.0, *(1.5 * i for i in range(2, 12))]


@pytest.mark.fast
@pytest.mark.parametrize("reducer", [SharedMemoryMean(), Int8()], ids=str)
def test_so_it_is_by_other_reducers(pool: RankPool, reducer: Reducer) -> None:
    """In shared memory to the bit, and in few bits as near as those let it, on all ranks alike."""
    first, second = pool.run(2, shared_in_part, 0, reducer)
    assert first[2:] == second[2:]
    for rank, values in enumerate((first, second)):
        close = 0.2 if reducer.lossy else 0.0
        expected = [0.0, rank + 1.0, *(1.5 * i for i in range(2, 12))]
        assert values == pytest.approx(expected, rel=0, abs=close)


def overlap_that_cannot_be_cut(kind: str) -> str:
    memory = torch.zeros(12)
    other = {
        "dtype": memory[4:].view(torch.float16),
        "strides": memory[4:].view(2, 4).t(),
        "one rank": memory[4:] if dist.get_rank() else torch.zeros(8),
    }
    try:
        average_([("left", memory[:6]), ("right", other[kind])])
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["dtype", "strides", "one rank"])
def test_overlap_that_cannot_be_cut_is_refused(pool: RankPool, kind: str) -> None:
    """On all ranks, and both tensors are named; also where memory is shared on one rank only."""
    for text in pool.run(2, overlap_that_cannot_be_cut, kind):
        assert "'right'" in text
        assert kind == "one rank" or ("'left'" in text and "overlap" in text)


def uneven_topology() -> float:
    rank = dist.get_rank()
    topology = ConnectedTopology(Topology({"left": [[0, 2, 3], [1]], "world": [[0, 1, 2, 3]]}))
    value = torch.full((5,), float(rank))
    Averager(topology.peers("left")).average([("value", value)])
    result = float(value[0])
    topology.close()
    return result


@pytest.mark.fast
def test_uneven_groups(pool: RankPool) -> None:
    """Ranks 0, 2, 3 average to 5/3 while rank 1 stays alone."""
    third = float(torch.tensor(5 / 3, dtype=torch.float32))
    assert pool.run(4, uneven_topology) == [third, 1.0, third, third]


def remake_groups() -> list[float]:
    """Make, use and free the same groups again and again."""
    seen = []
    for _ in range(3):
        topology = ConnectedTopology(Topology({"left": [[0, 2], [1]], "world": [[0, 1, 2]]}))
        value = torch.full((3,), float(dist.get_rank()))
        Averager(topology.peers("left")).average([("value", value)])
        Averager(topology.peers("world")).average([("value", value)])
        seen.append(float(value[0]))
        topology.close()
    return seen


@pytest.mark.fast
def test_groups_can_be_freed_and_made_again(pool: RankPool) -> None:
    """Uneven groups that are made anew find each other under a new name."""
    assert pool.run(3, remake_groups) == [[1.0] * 3] * 3


def recorded() -> list[tuple[str, int, torch.dtype]]:
    reducer = RecordingReducer()
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2), "half": torch.ones(5).bfloat16()}
    average_(list(tensors.items()), reducer=reducer)
    return [(slot.split(" #")[0], numel, dtype) for slot, numel, dtype in reducer.calls]


@pytest.mark.fast
def test_small_tensors_share_a_buffer_for_each_dtype(pool: RankPool) -> None:
    """Seven float32 numbers travel as one buffer, five bfloat16 as another."""
    expected = [("0 a and 1 more", 7, torch.float32), ("0 half", 5, torch.bfloat16)]
    assert pool.run(2, recorded) == [expected] * 2
