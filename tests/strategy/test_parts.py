"""The small parts, in one process, with answers worked out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from loosestep import Clock, Topology, post_local_sgd
from loosestep.comm.flat import Pool, pack, slices, unpack, windows
from loosestep.schedules import Due, after, always, every, levels
from loosestep.strategy.schedules import next_sync
from loosestep.strategy.topology import Partition
from loosestep.sync.connected import ConnectedTopology, resolve
from loosestep.testing import RankPool, run_ranks

pytestmark = pytest.mark.fast


def test_a_clock_counts_and_resumes() -> None:
    """Two ticks, saved and loaded, are two."""
    clock = Clock()
    clock.tick()
    clock.tick()
    other = Clock()
    other.load_state_dict(clock.state_dict())
    assert other.step == 2
    with pytest.raises(ValueError, match=">= 0"):
        other.load_state_dict({"step": -1})


def test_levels_by_hand() -> None:
    """Periods 2 and 6: host at 2, 4, 8, 10; world at 6, 12; never at 0."""
    schedule = levels({"host": 2, "world": 6})
    due = {step: schedule(step).parameters for step in range(13)}
    assert {s: level for s, level in due.items() if level} == {
        2: "host",
        4: "host",
        6: "world",
        8: "host",
        10: "host",
        12: "world",
    }


def test_after_by_hand() -> None:
    """Three steps of warm-up, then every second step counted from there: 5, 7, 9."""
    schedule = after(3, every(2, gradients="host"))
    assert [schedule(step).gradients for step in range(5)] == ["world"] * 3 + ["host"] * 2
    assert [step for step in range(10) if schedule(step).parameters] == [5, 7, 9]


def test_next_sync() -> None:
    """The next due step and its level, or None where parameters are never averaged."""
    schedule = post_local_sgd(4, warmup_steps=10).schedule
    assert next_sync(schedule, 0) == (14, "world")
    assert next_sync(schedule, 14) == (18, "world")
    assert next_sync(always(gradients="world"), 0) is None


@given(period=st.integers(1, 50), start=st.integers(0, 50), step=st.integers(0, 500))
def test_a_schedule_is_a_pure_function(period: int, start: int, step: int) -> None:
    """Asking twice gives the same, and due steps lie a period apart after the start."""
    schedule = after(start, every(period))
    assert schedule(step) == schedule(step)
    expected = step > start and (step - start) % period == 0
    assert (schedule(step).parameters is not None) == expected
    if step < start:
        assert schedule(step) == Due(gradients="world")


@given(numel=st.integers(0, 1000), parts=st.integers(1, 17))
def test_slices_cover_without_overlap(numel: int, parts: int) -> None:
    """Slices follow each other, cover everything and differ in length by at most one."""
    cut = slices(numel, parts)
    assert cut[0][0] == 0
    assert cut[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    lengths = [stop - start for start, stop in cut]
    assert max(lengths) - min(lengths) <= 1


shapes = st.lists(
    st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple), min_size=1, max_size=8
)


@given(shapes=shapes, window_bytes=st.integers(1, 400), transpose=st.booleans())
def test_windows_hold_every_element_once(
    shapes: list[tuple[int, ...]], window_bytes: int, transpose: bool
) -> None:
    """Packing and unpacking through windows of any size is the identity on every element."""
    dtypes = [torch.float32, torch.float64]
    tensors = [torch.randn(shape).to(dtypes[i % 2]) for i, shape in enumerate(shapes)]
    if transpose:
        tensors = [t.mT if t.ndim > 1 else t for t in tensors]
    cut = windows([(str(i), t) for i, t in enumerate(tensors)], window_bytes)
    assert sum(window.numel for window in cut) == sum(t.numel() for t in tensors)
    for window in cut:
        assert window.numel * window.dtype.itemsize <= max(window_bytes, window.dtype.itemsize)
    before = [t.clone() for t in tensors]
    for window in cut:
        buffer = pack(window, torch.empty(window.numel, dtype=window.dtype))
        unpack(window, buffer + 1)
    assert all(torch.equal(t, b + 1) for t, b in zip(tensors, before, strict=True))


@given(shapes=shapes, window_bytes=st.integers(1, 400))
def test_the_cut_depends_on_shapes_only(shapes: list[tuple[int, ...]], window_bytes: int) -> None:
    """Two ranks with other strides and addresses cut alike."""
    dense = [(str(i), torch.randn(shape)) for i, shape in enumerate(shapes)]
    strided = [(n, t.mT.contiguous().mT if t.ndim > 1 else t.clone()) for n, t in dense]
    names = [[p.name for p in w.pieces] for w in windows(dense, window_bytes)]
    assert names == [[p.name for p in w.pieces] for w in windows(strided, window_bytes)]


def test_a_pool_gives_the_same_memory_again() -> None:
    """What was given back is taken again, also as another dtype."""
    pool = Pool()
    first = pool.take(100, torch.float32, torch.device("cpu"))
    address = first.data_ptr()
    pool.give(first)
    second = pool.take(50, torch.float64, torch.device("cpu"))
    assert second.data_ptr() == address
    assert second.numel() == 50


def test_peers_across_by_hand() -> None:
    """In hosts (0 1)(2 3)(4 5) rank 3 is the second: its peers are 1, 3, 5."""
    topology = Topology.from_sizes({"host": 2, "world": 6}, ranks=range(6))
    assert topology.peers_across("world", within="host", global_rank=3) == (1, 3, 5)
    uneven = Topology({"host": [[0, 1], [2]], "world": [[0, 1, 2]]})
    with pytest.raises(ValueError, match="one size"):
        uneven.peers_across("world", within="host", global_rank=0)


def test_hosts_by_name() -> None:
    """Interleaved host names give non-contiguous groups."""
    topology = Topology.from_hosts(["a", "b", "a", "b", "b"])
    assert topology.levels["host"] == ((0, 2), (1, 3, 4))
    assert topology.widest == "world"


def mesh_levels() -> dict[str, Partition]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return dict(Topology.from_mesh(mesh).levels)


def test_levels_of_a_mesh() -> None:
    """A 2 x 2 mesh gives pairs of neighbours and the whole."""
    expected = {"shard": ((0, 1), (2, 3)), "replicate": ((0, 1, 2, 3),)}
    assert run_ranks(4, mesh_levels) == [expected] * 4


def real_hosts() -> tuple[tuple[int, ...], float]:
    topology = ConnectedTopology(resolve(Topology.from_hosts()))
    peers = topology.peers("world", within="host")
    topology.close()
    return topology.members("host"), float(dist.get_world_size() + peers.size)


def test_ranks_of_one_machine_share_a_host(pool: RankPool) -> None:
    """Local workers are one host, whose peers across hosts are themselves alone."""
    assert pool.run(3, real_hosts) == [((0, 1, 2), 4.0)] * 3
