"""The scripts in examples/ run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]


def run(*arguments: str) -> str:
    """Run Python and return what it printed."""
    # Loopback by name: asking a name server for this host's address can take seconds.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    finished = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("attach.py", "parameters/world: 2 syncs"),  # after step 20 + 8, and at the end
        ("drop_in.py", "parameters/every 8: 2 syncs"),  # at calls 20 and 28, the last one
        ("zero.py", "optimizer state: 50%"),
    ],
)
def test_script_runs_under_torchrun(name: str, said: str):
    output = run(*TORCHRUN, str(EXAMPLES / name), "--steps", "29")
    assert "loss" in output
    assert said in output
