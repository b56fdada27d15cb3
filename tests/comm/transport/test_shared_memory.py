"""Ranks of one host average through memory that they share, and leave none behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from loosestep import (
    PeerLost,
    PeriodicModelAverager,
    Topology,
    attach,
    average_,
    hierarchical_sgd,
)
from loosestep.comm import native
from loosestep.comm.group import Group, peers_of
from loosestep.comm.reducers import NOTHING, Place, mean_into
from loosestep.comm.reducers.mean import _reduce_plainly, reduce_into
from loosestep.comm.transport import meeting, segments
from loosestep.comm.transport.segments import Segment
from loosestep.comm.transport.shared_memory import ARENA_BYTES, WINDOW_BYTES, Layout
from loosestep.reducers import Mean, SharedMemoryMean
from loosestep.sync.averager import Averager
from loosestep.testing import RankPool
from tests.support.lines import find_line
from tests.support.oracle import equal, exact_mean, loss_of, make_net, sgd, snapshot
from tests.support.pairs import in_pairs
from tests.support.values import values

SIZES = [1, 2, 3, 1023, 4097, WINDOW_BYTES // 4 - 1, WINDOW_BYTES // 4 + 5, 1_500_001]


# The arithmetic: C and torch give the same bits.

numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)
replica_lists = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(numbers, min_size=7, max_size=7), min_size=n, max_size=n)
)


@given(rows=replica_lists, weighted=st.booleans(), data=st.data())
def test_the_loop_in_c_gives_the_bits_of_torch(
    rows: list[list[float]], weighted: bool, data: st.DataObject
) -> None:
    """Whatever the values, one pass in C and ten in torch end with the same bits."""
    for dtype in (torch.float32, torch.bfloat16):
        replicas = [torch.tensor(row).to(dtype) for row in rows]
        weight = st.floats(0.25, 8, width=32)
        weights = [data.draw(weight) for _ in rows] if weighted else None
        ours, plain = [torch.empty(7, dtype=dtype) for _ in range(2)], torch.empty(7, dtype=dtype)
        reduce_into(ours, replicas, weights)
        _reduce_plainly([plain], replicas, weights)
        for result in ours:
            same = (result == plain) | (result.isnan() & plain.isnan())
            assert same.all(), (rows, weights, result, plain)
            assert torch.equal(result.signbit()[~result.isnan()], plain.signbit()[~plain.isnan()])


@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 5000])
def test_long_means_equal_the_definition(numel: int) -> None:
    """Blocks and their ends do not show."""
    replicas = [values(rank, numel, torch.float32) for rank in range(3)]
    outs = [torch.empty(numel), replicas[1]]
    expected = exact_mean(replicas)
    reduce_into(outs, replicas)
    assert all(torch.equal(out, expected) for out in outs)


# Windows.


def memory_and_network(dtype_name: str) -> bool:
    """Average buffers of many sizes both ways and say whether the bits are equal."""
    dtype, rank = getattr(torch, dtype_name), dist.get_rank()
    ranks = tuple(range(dist.get_world_size()))
    near, far = Group.make(ranks, 20), Group.make(ranks, 20)
    far.use_network()
    same = True
    for numel in SIZES:
        one, other = values(rank, numel, dtype), values(rank, numel, dtype)
        copied = average_([one], near.process_group)
        sent = average_([other], far.process_group)
        same = same and torch.equal(one, other)
        same = same and (copied.bytes_sent, sent.bytes_copied) == (0, 0)
        same = same and (numel < 10 or copied.bytes_copied > 0)
    return same


@pytest.mark.parametrize(
    ("dtype", "world"),
    in_pairs(["float32", "bfloat16", "float16", "float64"], [2, 3, 4], each=1),
)
def test_memory_equals_the_network_to_the_bit(pool: RankPool, world: int, dtype: str) -> None:
    """Through windows of shared memory or through sockets: the same mean."""
    assert pool.run(world, memory_and_network, dtype) == [True] * world


def buffers_beyond_a_window() -> bool:
    """Hand reducers a buffer of several windows at once."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    peers = peers_of(Group.make(ranks, 20), timeout=20)
    numel = 3 * WINDOW_BYTES // 4 + 17
    buffer = values(rank, numel, torch.float32)
    expected = exact_mean([values(r, numel, torch.float32) for r in ranks])
    handle = Mean().start(buffer, peers, NOTHING, Place("large"))
    handle.advance()
    handle.wait()
    moved = Mean().bytes_on_wire(numel, torch.float32, len(ranks), rank)
    return torch.equal(buffer, expected) and handle.traffic.bytes_copied == moved


def test_a_buffer_may_be_larger_than_a_window(pool: RankPool) -> None:
    """A reducer cuts it, and counts the bytes as if it had not."""
    assert pool.run(3, buffers_beyond_a_window) == [True] * 3


def test_windows_of_a_host_stay_within_their_budget() -> None:
    """However many ranks a host has, their windows together are bounded."""
    for ranks in (1, 2, 3, 4, 8, 16, 64):
        layout = Layout.of(ranks)
        assert ranks * layout.arena_bytes <= 2 * ARENA_BYTES, (ranks, layout)


# Segments.


def test_a_segment_has_no_name_and_fits_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger than the shared folder, which does not notice."""
    before = sorted(os.listdir(segments.SHARED_FOLDER))
    one = Segment.create(1 << 20)
    other = Segment.open(os.getpid(), one.fd, one.size)
    one.bytes()[5] = 7
    assert other.bytes()[5] == 7
    assert sorted(os.listdir(segments.SHARED_FOLDER)) == before
    monkeypatch.delattr(os, "memfd_create")  # an old kernel
    named = Segment.create(1 << 20)
    assert os.fstat(named.fd).st_mode & 0o777 == 0o600
    assert sorted(os.listdir(segments.SHARED_FOLDER)) == before


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are asked for before they are touched, so a full folder does not kill the process."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        Segment.create(1 << 20)
    assert len(os.listdir("/proc/self/fd")) == fds
    _, said = meeting._introduce(2, Layout.of(2))
    assert "no shared memory to be had" in said.reason


def without_memory() -> tuple[torch.Tensor, int]:
    """Average where one rank cannot have shared memory."""
    real = os.posix_fallocate
    if dist.get_rank() == 1:
        os.posix_fallocate = _refuse
    try:
        tensor = values(dist.get_rank(), 5000, torch.float32)
        ranks = tuple(range(dist.get_world_size()))
        traffic = average_([tensor], Group.make(ranks, 20).process_group)
    finally:
        os.posix_fallocate = real
    return tensor, traffic.bytes_copied


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_rank_without_shared_memory_is_reached_by_the_network(pool: RankPool) -> None:
    """The others share memory all the same, and the mean is the mean."""
    results = pool.run(3, without_memory)
    expected = exact_mean([values(rank, 5000, torch.float32) for rank in range(3)])
    assert all(torch.equal(tensor, expected) for tensor, _ in results)
    assert [copied > 0 for _, copied in results] == [True, False, True]


VICTIM = """
import os, sys, torch, torch.distributed as dist
from loosestep import PeriodicModelAverager
from loosestep.reducers import SharedMemoryMean
rank, store = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
resident, copied = torch.nn.Linear(700, 700), torch.nn.Linear(700, 700)
averagers = [PeriodicModelAverager(1, reducer=SharedMemoryMean()), PeriodicModelAverager(1)]
print("ready", flush=True)
while True:
    averagers[0].average_parameters(resident.parameters())
    averagers[1].average_parameters(copied.parameters())
"""


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that average as fast as they can."""
    command = [sys.executable, "-W", "ignore", "-c", VICTIM]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def shared_memory_of(pid: int | str) -> set[tuple[str, str]]:
    """Return the segments that a process maps or has open, as devices and inodes."""
    found: set[tuple[str, str]] = set()
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and re.search(r"loosestep.*\(deleted\)", fields[5]):
                found.add((fields[3], fields[4]))
    return found


def test_killed_ranks_leave_nothing_behind(victims: list[subprocess.Popen[str]]) -> None:
    """SIGKILL in the middle of averaging: no file, and nobody who holds their shared memory."""
    for process in victims:
        assert process.stdout is not None
        find_line(process.stdout, "ready")
    time.sleep(0.5)
    theirs = set().union(*(shared_memory_of(process.pid) for process in victims))
    assert len(theirs) > 2  # their windows and parameters
    for process in victims:
        process.send_signal(signal.SIGKILL)
        process.wait()
    living = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    assert not any(theirs & shared_memory_of(pid) for pid in living)
    assert not any("loosestep" in name for name in os.listdir(segments.SHARED_FOLDER))


# SharedMemoryMean parameters.


def train_resident(reducer_name: str, period: int) -> dict[str, torch.Tensor]:
    """Train with a drop-in averager."""
    reducer = SharedMemoryMean() if reducer_name == "resident" else Mean()
    net = make_net()
    optimizer = sgd(net)
    averager = PeriodicModelAverager(period, reducer=reducer, module=net)
    for step in range(7):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()
        averager.average_parameters(net.parameters())
    return snapshot(net)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resident_parameters_train_like_all_others(pool: RankPool, world: int) -> None:
    """Where a parameter lives does not show in its values."""
    resident = pool.run(world, train_resident, "resident", 2)
    copied = pool.run(world, train_resident, "mean", 2)
    assert all(equal(one, other) for one, other in zip(resident, copied, strict=True))


def look_at_pointers() -> dict[str, bool]:
    """Bind a large model on two levels and look where its parameters are."""
    ranks = list(range(dist.get_world_size()))
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Conv2d(64, 128, 9), *[torch.nn.Linear(1200, 1200)] * 2)
    net.append(torch.nn.Linear(1200, 1200))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net[3].weight.data = net[1].weight.data  # a tie by storage
    net[0].bias.requires_grad_(False)
    strides = [p.stride() for p in net.parameters()]
    topology = Topology({"pair": [ranks[:2], ranks[2:]], "world": [ranks]}, timeout=20)
    strategy = hierarchical_sgd(
        {"pair": 1, "world": 2}, topology=topology, reducer=SharedMemoryMean()
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with attach(net, optimizer, strategy) as run:
        optimizer.step()
        bound = [p.data_ptr() for p in net.parameters()]
        for _ in range(4):
            optimizer.step()
        after = [p.data_ptr() for p in net.parameters()]
        copied = run.metrics()["parameters/world"]["bytes_copied"]
    values_of = [p.detach().clone() for p in net.parameters()]
    return {
        "stable": bound == after,
        "strides": strides == [p.stride() for p in net.parameters()],
        "tied": net[3].weight.data_ptr() == net[1].weight.data_ptr(),
        "moved": copied > 0,
        "finite": all(v.isfinite().all() for v in values_of),
    }


def test_resident_parameters_stay_where_they_are(pool: RankPool) -> None:
    """Addresses are stable once bound, on several levels; strides and ties survive."""
    for result in pool.run(4, look_at_pointers):
        assert all(result.values()), result


def mixed_homes() -> bool:
    """Average resident parameters with a rank that moved its own out of shared memory."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parameter = torch.nn.Parameter(values(rank, 600_001, torch.float32))
    averager = PeriodicModelAverager(1, reducer=SharedMemoryMean())
    averager.average_parameters([parameter])
    with torch.no_grad():
        parameter.copy_(values(rank, 600_001, torch.float32))
    if rank == 1:
        parameter.data = parameter.data.clone()
    averager.average_parameters([parameter])
    expected = exact_mean([values(r, 600_001, torch.float32) for r in range(world)])
    return torch.equal(parameter, expected)


def test_a_parameter_that_moved_out_is_averaged_all_the_same(pool: RankPool) -> None:
    """A user may re-point ``.data``: its memory is looked up at every sync."""
    assert pool.run(3, mixed_homes) == [True] * 3


def refuse_resident(how: str) -> str:
    ranks = tuple(range(dist.get_world_size()))
    group = Group.make(ranks, 20)
    if how == "network":
        group.use_network()
    assert (how == "network") == (not peers_of(group).shared_memory.neighbours)
    real = os.posix_fallocate
    if how == "full" and dist.get_rank() == 1:
        os.posix_fallocate = _refuse
    parameter = torch.nn.Parameter(torch.ones(3))
    try:
        averager = PeriodicModelAverager(
            1, process_group=group.process_group, reducer=SharedMemoryMean()
        )
        averager.average_parameters([parameter])
    except ValueError as error:
        return str(error)
    finally:
        os.posix_fallocate = real
    return ""


@pytest.mark.parametrize(
    ("how", "reason"), [("network", "not reached through"), ("full", "rank 1: no shared memory")]
)
def test_what_cannot_be_resident_is_refused_on_every_rank(
    pool: RankPool, how: str, reason: str
) -> None:
    """The error names the rank, the reason and the way out."""
    for text in pool.run(2, refuse_resident, how):
        assert reason in text
        assert "use Mean()" in text


# Trains: many buffers in one go, by the loop in C.


def struck(fault: str, victim: int, timeout: float) -> tuple[tuple[int, ...], str, float]:
    """Average without end; a rank is struck somewhere in the middle. Return what survivors hear."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    group = Group.make(ranks, 20)
    tensors = [torch.randn(700_000 + 1000 * i) for i in range(6)]
    averager = Averager(peers_of(group, timeout=timeout))
    averager.average([(f"layer {i}", t) for i, t in enumerate(tensors)])
    if rank == victim:
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        threading.Timer(0.1, lambda: os.kill(os.getpid(), number)).start()
    for step in range(10_000):
        began = time.monotonic()
        try:
            averager.average([(f"layer {i}", t) for i, t in enumerate(tensors)], step=step)
        except PeerLost as error:
            return error.ranks, str(error), time.monotonic() - began
    return (), "", 0.0


@pytest.mark.parametrize(
    ("place", "fault"), in_pairs([(2, 0), (3, 2), (4, 1)], ["kill", "stop"], each=1)
)
def test_a_rank_that_is_struck_in_a_train_is_named(
    pool: RankPool, place: tuple[int, int], fault: str
) -> None:
    """Killed: at once. Stopped: within the time-out. By rank, phase and tensor."""
    (world, victim), timeout = place, 20.0 if fault == "kill" else 1.0
    results = pool.run(world, struck, fault, victim, timeout, allow_dead=[victim])
    for rank in set(range(world)) - {victim}:
        ranks, text, seconds = results[rank]
        assert ranks == (victim,), text
        assert "averaging 'layer " in text or "agreeing" in text
        assert seconds < 5


def many_trains() -> bool:
    """Average more pieces than there are slots, several times, in place and packed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    averager = Averager(peers_of(Group.make(tuple(range(world)), 20), timeout=20))
    numels, sizes = (600_001, 33), range(world)
    mine = {numel: values(rank, numel, torch.float32) for numel in numels}
    means = {n: exact_mean([values(r, n, torch.float32) for r in sizes]) for n in numels}
    for _ in range(2):
        large = [mine[600_001].clone() for _ in range(150)]
        small = [mine[33].clone() for _ in range(40)]
        named = [(f"t{i}", t) for i, t in enumerate([*large, *small])]
        averager.average(named)
        if not all(torch.equal(tensor, means[tensor.numel()]) for _, tensor in named):
            return False
    return True


def test_a_train_may_be_longer_than_the_rows(pool: RankPool) -> None:
    """Slots and windows are used again, and nothing is mixed up."""
    assert pool.run(2, many_trains) == [True] * 2


def weighted_train() -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = [0.5, 3.0, 1.25, 2.0][:world]
    group = Group.make(tuple(range(world)), 20)
    tensors = [values(rank, n, torch.bfloat16) for n in (900_000, 7, 1_200_003)]
    tensors += [values(rank, n, torch.float32) for n in (900_000, 7, 1_200_003)]
    average_(tensors, group.process_group, weights=weights)
    same = True
    for tensor in tensors:
        out = torch.empty_like(tensor)
        mean_into(out, [values(r, tensor.numel(), tensor.dtype) for r in range(world)], weights)
        same = same and torch.equal(out, tensor)
    return same


@pytest.mark.parametrize("world", [2, 3, 4])
def test_trains_carry_weights_and_dtypes(pool: RankPool, world: int) -> None:
    """Weighted, in float32 and bfloat16: the definition, to the bit."""
    assert pool.run(world, weighted_train) == [True] * world


def without_loops() -> tuple[bool, bool]:
    """Average where one rank has no loops in C."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = Group.make(tuple(range(world)), 20)
    has = native.loops() if rank else None
    with mock.patch.object(native, "loops", return_value=has):
        tensors = [values(rank, n, torch.float32) for n in (900_000, 7, 1_200_003)]
        average_(tensors, group.process_group)
    shared = peers_of(group).shared_memory
    same = [
        torch.equal(t, exact_mean([values(r, t.numel(), t.dtype) for r in range(world)]))
        for t in tensors
    ]
    return all(same), shared.fused


def test_one_rank_without_loops_in_c_stops_trains_for_all(pool: RankPool) -> None:
    """The group then goes buffer by buffer, with the same result."""
    assert pool.run(3, without_loops) == [(True, False)] * 3
