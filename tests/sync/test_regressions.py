"""Corners that were wrong once."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import (
    JsonLines,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    Strategy,
    Telemetry,
    Topology,
    attach,
    average_,
    ddp,
    post_local_sgd,
)
from loosestep.comm.flat.windows import windows
from loosestep.comm.group import Group, peers_of, world_group
from loosestep.comm.torch_versions import buffers_are_broadcast
from loosestep.gradients import plain
from loosestep.reducers import AllReduce, Cast
from loosestep.schedules import after, always, every
from loosestep.sync.averager import Averager
from loosestep.sync.parts import Parts
from loosestep.testing import RankPool
from tests.support.oracle import equal, loss_of, make_net, sgd, snapshot

pytestmark = pytest.mark.fast


def two_in_flight() -> tuple[float, float, float]:
    rank = dist.get_rank()
    averager = Averager(peers_of(Group.of(world_group()).twin()), window_bytes=4096)
    long = torch.full((20_000,), float(rank))
    short = torch.full((2000,), 10.0 + rank)
    if rank == 1:
        time.sleep(0.3)
    first = averager.start(averager.agree(Parts([("long", long)])))
    second = averager.start(averager.agree(Parts([("short", short)])))
    first.finish()
    second.finish()
    return float(long.max()), float(short.min()), float(short.max())


def test_two_averages_may_be_in_flight(pool: RankPool) -> None:
    """Marks belong to buffers, so averages that overlap do not take each other's."""
    for _ in range(3):
        assert pool.run(2, two_in_flight) == [(0.5, 10.5, 10.5)] * 2


def frozen_start(initial: str) -> bool:
    torch.manual_seed(dist.get_rank())
    net = make_net(dist.get_rank())
    net.first.requires_grad_(False)
    with attach(net, sgd(net), Strategy(schedule=every(2), initial=initial)):
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, snapshot(net))
    return equal(*everyone)


def test_frozen_parameters_are_made_equal_at_the_start(pool: RankPool) -> None:
    """What never moves must start equal, or it differs for good."""
    assert pool.run(2, frozen_start, "broadcast") == [True, True]


def resume_with_batch_norm() -> bool:
    def start() -> tuple[DistributedDataParallel, PostLocalSGDOptimizer]:
        net = DistributedDataParallel(make_net())
        averager = PeriodicModelAverager(4, 0, module=net)
        return net, PostLocalSGDOptimizer(sgd(net), averager)

    def go(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
        with net.no_sync():  # type: ignore[operator]
            for step in range(first, end):
                optimizer.zero_grad()
                loss_of(net, dist.get_rank(), step).backward()
                optimizer.step()

    net, optimizer = start()
    go(net, optimizer, 0, 6)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    go(net, optimizer, 6, 8)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = start()
    other.load_state_dict(saved["net"])
    resumed.load_state_dict(saved["optimizer"])
    go(other, resumed, 6, 8)
    return equal(snapshot(net), snapshot(other))


def test_resuming_does_not_broadcast_batch_norm_again(pool: RankPool) -> None:
    """A resumed process knows that it is in the local phase before its first forward."""
    assert pool.run(2, resume_with_batch_norm) == [True, True]


def finalize_under(name: str) -> bool:
    topology = Topology.from_sizes({"host": 1, "world": 2}, timeout=10)
    schedules = {
        "narrow for ever": after(2, every(1, "host"), before=every(1, "world")),
        "never again": after(2, always(gradients="world"), before=every(1, "world")),
    }
    net = make_net()
    optimizer = sgd(net)
    strategy = Strategy(schedule=schedules[name], topology=topology)
    with attach(net, optimizer, strategy) as run:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
        run.finalize()
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, snapshot(net))
    return equal(*everyone)


@pytest.mark.parametrize("name", ["narrow for ever", "never again"])
def test_finalize_ends_where_the_widest_level_never_comes_again(pool: RankPool, name: str) -> None:
    """A schedule that has left the widest level behind still ends in one model."""
    assert pool.run(2, finalize_under, name, timeout=30) == [True, True]


def large_weights() -> float:
    half = torch.full((3,), 2.0, dtype=torch.float16)
    average_([half], weights=[50_000.0, 50_000.0], reducer=AllReduce())
    return float(half[0])


def test_large_weights_do_not_overflow(pool: RankPool) -> None:
    """AllReduce scales by shares: fp16 keeps 2.0 under weights of 50000."""
    assert pool.run(2, large_weights) == [2.0, 2.0]


def float8() -> float:
    value = torch.full((8,), 1.0 + dist.get_rank())
    average_([value], reducer=Cast(torch.float8_e4m3fn))
    return float(value[0])


def test_cast_to_float8(pool: RankPool) -> None:
    """Any floating dtype can travel."""
    assert pool.run(2, float8) == [1.5, 1.5]


def test_many_small_tensors_are_cut_quickly() -> None:
    """The cut grows with the number of tensors, not with its square."""
    tensors = [(str(i), torch.zeros(3)) for i in range(20_000)]
    began = time.perf_counter()
    cut = windows(tensors)
    assert time.perf_counter() - began < 2.0
    assert sum(window.numel for window in cut) == 60_000


def groups_after_attach() -> tuple[int, int]:
    net = make_net()
    optimizer = sgd(net)
    topology = Topology.from_sizes({"pair": 2, "world": 4})
    with attach(
        net, optimizer, post_local_sgd(2, warmup_steps=2, gradients="pair", topology=topology)
    ):
        before = len(dist.distributed_c10d._world.pg_map)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
        return before, len(dist.distributed_c10d._world.pg_map)


def test_no_process_group_is_made_in_mid_training(pool: RankPool) -> None:
    """All groups that a schedule will need are made by ``attach``."""
    for before, later in pool.run(4, groups_after_attach):
        assert before == later


def copies_and_pickles(path: str) -> tuple[bool, bool, int]:
    net = make_net()
    telemetry = Telemetry(sinks=[JsonLines(path + str(dist.get_rank()))])
    averager = PeriodicModelAverager(4, 0, module=net, telemetry=telemetry)
    optimizer = PostLocalSGDOptimizer(sgd(net), averager)
    averager.step = 3
    twin_net, twin = copy.deepcopy((net, optimizer))
    loaded = pickle.loads(pickle.dumps(averager))
    return twin.averager.module is twin_net, loaded.module is not None, loaded.step


def test_copies_belong_together(pool: RankPool) -> None:
    """A copied optimizer averages the copied module's buffers; pickles leave open files out."""
    with tempfile.TemporaryDirectory() as folder:
        expected = (True, True, 3)
        assert pool.run(2, copies_and_pickles, str(Path(folder, "log"))) == [expected] * 2


def compiled_module() -> bool:
    net = DistributedDataParallel(make_net())
    averager = PeriodicModelAverager(2, 0, module=torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    averager.average_parameters(net.parameters())
    return buffers_are_broadcast(net)


def test_a_compiled_ddp_module_stops_broadcasting_too(pool: RankPool) -> None:
    """The wrapper of ``torch.compile`` does not hide DDP."""
    assert pool.run(2, compiled_module) == [False, False]


def fail_in_the_middle() -> bool:
    net = make_net()
    optimizer = sgd(net)
    with attach(net, optimizer, ddp()) as run:
        before = snapshot(net)
        try:
            with run.averaged():
                with torch.no_grad():
                    net.gain.fill_(7.0)
                raise KeyError("evaluation failed")
        except KeyError:
            pass
        return equal(before, snapshot(net))


def test_averaged_gives_back_after_an_error(pool: RankPool) -> None:
    """Whatever happens inside, every rank has its own parameters afterwards."""
    assert pool.run(2, fail_in_the_middle) == [True, True]


class Crossed(torch.nn.Module):
    """Two layers that even ranks go through in one order and odd ranks in the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left, self.right = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor, rank: int) -> torch.Tensor:
        layers = [self.left, self.right][:: 1 if rank % 2 == 0 else -1]
        return layers[1](torch.tanh(layers[0](inputs)))


def crossed_loss(net: Crossed, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return net(torch.randn(4, 6, generator=generator), rank).square().sum()


def share_crossed() -> bool:
    plain.ToAll.bucket_bytes = 4 * (36 + 6)  # a bucket for each layer
    net, rank = Crossed(), dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp()):
        crossed_loss(net, rank).backward()
    plain.ToAll.bucket_bytes = 25 << 20
    both = [Crossed(), Crossed()]
    for other, replica in enumerate(both):
        crossed_loss(replica, other).backward()
    pairs = zip(net.parameters(), *(replica.parameters() for replica in both), strict=True)
    grads = [[p.grad for p in same] for same in pairs]
    return all(torch.allclose(ours, (a + b) / 2) for ours, a, b in grads if ours is not None)


def test_buckets_pair_up_though_ranks_fill_them_in_another_order(pool: RankPool) -> None:
    """Collectives are launched in one order on all ranks, whatever backward reaches first."""
    assert pool.run(2, share_crossed) == [True, True]


def infinite_outside_the_model() -> tuple[float, float]:
    torch.manual_seed(0)
    net, extra = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*net.parameters(), extra], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attach(net, optimizer, ddp(), scaler=scaler):
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        extra.grad = torch.full((1,), float("inf") if dist.get_rank() else 1.0)
        scaler.step(optimizer)
        scaler.update()
    return float(net.weight.detach().sum()), scaler.get_scale()


def left_out_step() -> tuple[float, float]:
    """Unscale without a step, as a loop does that drops a batch; then meet an infinity."""
    torch.manual_seed(0)
    net, extra = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*net.parameters(), extra], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attach(net, optimizer, ddp(), scaler=scaler):
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(1, 2)).sum()).backward()
            extra.grad = torch.full((1,), float("inf") if step and dist.get_rank() else 1.0)
            if step == 0:
                scaler.unscale_(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
    return float(net.weight.detach().sum()), scaler.get_scale()


def test_a_dropped_batch_leaves_the_scaler_agreed(pool: RankPool) -> None:
    """``unscale_`` without ``step`` does not make the next step forget to agree."""
    torch.manual_seed(0)
    untouched = float(torch.nn.Linear(2, 2).weight.detach().sum())
    assert pool.run(2, left_out_step) == [(untouched, 2.0)] * 2


def test_one_infinite_gradient_makes_all_skip(pool: RankPool) -> None:
    """Also one that is not shared, of a parameter beside the model: else the models part."""
    torch.manual_seed(0)
    untouched = float(torch.nn.Linear(2, 2).weight.detach().sum())
    assert pool.run(2, infinite_outside_the_model) == [(untouched, 2.0)] * 2
