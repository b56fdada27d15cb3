"""The rank that hosts the store may hang too, and then nothing that asks the store comes back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.support.lines import find_line


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("way", ["average", "attach"])
def test_a_stopped_host_of_the_store_is_an_error_in_time(way: str) -> None:
    """Survivors are told within the time-out and a little, though the store never answers."""
    port = str(free_port())
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.stuck_store", str(rank), port, way],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks[1:]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for text in said:
        seconds, reason = find_line(text.splitlines(), r"\d+\.\d .*").split(" ", 1)
        assert float(seconds) < 10.0
        assert "rank 0" in reason or "the rank that hosts it (0" in reason
