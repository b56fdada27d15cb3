"""The rank that hosts the store may hang too, and then nothing that asks the store comes back."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from loosestep import PeerLost, attach, average_, post_local_sgd
from loosestep.testing import RankPool


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def told(way: str, port: int) -> tuple[float, str]:
    """Stop rank 0, which hosts the store; return how long it takes to be told, and of whom."""
    rank = dist.get_rank()
    dist.barrier()  # a group that ends while another rank still joins it is an error there
    dist.destroy_process_group()  # the pool's, whose store is the pool's
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    average_(net.parameters(), timeout=2)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        if way == "average":
            average_(net.parameters(), timeout=2)
        else:
            attach(net, optimizer, post_local_sgd(4), timeout=2)
    except PeerLost as error:
        return time.monotonic() - began, str(error)
    return 0.0, "nobody was missed"


@pytest.mark.parametrize("way", ["average", "attach"])
def test_a_stopped_host_of_the_store_is_an_error_in_time(pool: RankPool, way: str) -> None:
    """Survivors are told within the time-out and a little, though the store never answers."""
    for seconds, reason in pool.run(3, told, way, free_port(), allow_dead=[0])[1:]:
        assert seconds < 10.0
        assert "rank 0" in reason or "the rank that hosts it (0" in reason
