"""Three ranks of which rank 0 hosts the store and is stopped; run by test_stuck_store.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from loosestep import PeerLost, attach, average_, post_local_sgd


def main(rank: int, port: int, way: str) -> None:
    """Stop rank 0; on the others print how long it takes to be told, and of whom."""
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # imports much the first time
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
        print(f"{time.monotonic() - began:.1f} {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
