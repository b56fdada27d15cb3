"""DTensor and FSDP2 models: shards meet their like, and what is not sharded is not forgotten.

Each test has processes of its own: DTensor keeps the process groups of equal meshes in caches that
outlive a run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from loosestep import (
    NotAttachable,
    RankMismatch,
    Strategy,
    Topology,
    attach,
    average_,
    average_parameters,
    ddp,
    post_local_sgd,
)
from loosestep.comm.tensors import shard_key
from loosestep.schedules import every
from loosestep.testing import run_ranks


def pairs() -> tuple[DeviceMesh, Topology]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh["shard"], Topology.from_mesh(mesh, timeout=20)


def keys_of_fsdp_with_tensor_parallelism() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    weight = net[0].weight
    assert isinstance(weight, torch.Tensor)
    return shard_key(weight)


def test_fsdp_over_tensor_parallelism_has_four_shards() -> None:
    """Both mesh dimensions tell shards apart, also where FSDP cuts what is cut already."""
    assert len(set(run_ranks(4, keys_of_fsdp_with_tensor_parallelism))) == 4


def train_partly_sharded() -> tuple[list[float], list[float]]:
    mesh, topology = pairs()
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    fully_shard(net[0], mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(topology=topology)):
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            net(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    sharded = net[0].weight
    assert isinstance(sharded, DTensor)
    return net[1].weight.flatten().tolist(), sharded.full_tensor().flatten().tolist()


def test_parameters_beside_fsdp_share_gradients_too() -> None:
    """A plain layer next to a sharded one ends equal on all ranks, and so do the shards."""
    results = run_ranks(4, train_partly_sharded)
    assert all(result == results[0] for result in results)


def average_a_short_tensor() -> list[float]:
    mesh, topology = pairs()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)  # one row on two shards: the second shard is empty
    fully_shard(net, mesh=mesh)
    with torch.no_grad():
        for parameter in net.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().fill_(float(dist.get_rank() // 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    strategy = Strategy(schedule=every(1, "replicate"), topology=topology, initial="ignore")
    with attach(net, optimizer, strategy):
        optimizer.step()
    weight = net.weight
    assert isinstance(weight, DTensor)
    return weight.full_tensor().flatten().tolist()


def test_an_empty_shard_is_no_mismatch() -> None:
    """A tensor with fewer rows than shards averages where it is."""
    assert run_ranks(4, average_a_short_tensor) == [[0.5] * 4] * 4


def refuse_at_the_start(seed: int) -> str:
    mesh, topology = pairs()
    torch.manual_seed(seed * (dist.get_rank() // 2))
    net = torch.nn.Linear(4, 4)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    strategy = Strategy(schedule=every(2, "replicate"), topology=topology, initial="refuse")
    try:
        attach(net, optimizer, strategy).detach()
    except RankMismatch as error:
        return str(error)
    return "equal"


def test_replicas_of_shards_are_compared_with_their_like() -> None:
    """``initial='refuse'`` compares equal shards, and tells where they differ."""
    assert run_ranks(4, refuse_at_the_start, 0) == ["equal"] * 4
    assert all("weight" in text for text in run_ranks(4, refuse_at_the_start, 1))


def count_groups() -> list[int]:
    mesh, _ = pairs()
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    parameter = torch.nn.Parameter(tensor)
    counts = []
    for _ in range(4):
        average_parameters(iter([parameter]), None)
        average_([parameter])
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_groups_for_shards_are_made_once() -> None:
    """Averaging shards again and again makes no more process groups."""
    for counts in run_ranks(4, count_groups):
        assert len(set(counts)) == 1


def attach_tensor_parallel(gradients: str | None) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    topology = Topology.from_mesh(mesh)
    net: Any = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    strategy = post_local_sgd(2, warmup_steps=0, gradients=gradients, topology=topology)
    if gradients is None:
        strategy = Strategy(schedule=every(2, "replicate"), topology=topology)
    try:
        with attach(net, optimizer, strategy):
            for _ in range(2):
                optimizer.zero_grad()
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    except NotAttachable as error:
        return str(error)
    return "trained"


def test_tensor_parallel_modules() -> None:
    """Their parameters average; sharing their gradients is refused with the way out."""
    assert run_ranks(4, attach_tensor_parallel, None) == ["trained"] * 4
    assert all("gradients=None" in text for text in run_ranks(4, attach_tensor_parallel, "tp"))


def accumulate_sharded() -> int:
    mesh, topology = pairs()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(net, optimizer, ddp(topology=topology)) as run:
        with run.no_sync():
            net(torch.ones(2, 4)).sum().backward()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return int(run.metrics()["gradients/replicate"]["bytes_sent"])


def test_no_sync_saves_traffic_for_fsdp_too() -> None:
    """Two micro-batches move the bytes of one: 20 numbers, half a shard of them each."""
    # 4 x 4 weights and 4 biases in 2 shards: 10 float32 a rank, an all-reduce of 2 sends 40 bytes.
    assert run_ranks(4, accumulate_sharded) == [40] * 4
