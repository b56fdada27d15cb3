"""Who shares which level: by hand, of a mesh, and as real ranks tell it."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from loosestep import Topology
from loosestep.strategy.topology import Partition
from loosestep.sync.connected import ConnectedTopology
from loosestep.testing import RankPool, run_ranks

pytestmark = pytest.mark.fast


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
    topology = ConnectedTopology.meet(Topology.from_hosts())
    peers = topology.peers("world", within="host")
    topology.close()
    return topology.members("host"), float(dist.get_world_size() + peers.size)


def test_ranks_of_one_machine_share_a_host(pool: RankPool) -> None:
    """Local workers are one host, whose peers across hosts are themselves alone."""
    assert pool.run(3, real_hosts) == [((0, 1, 2), 4.0)] * 3
