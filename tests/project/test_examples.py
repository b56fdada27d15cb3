"""The scripts in examples/ run as their first lines say."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from loosestep.testing import RankPool
from tests.support.commands import be_worker, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
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
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


SAID = {
    "attach.py": "parameters/world: 2 syncs",  # after step 20 + 8, and at the end
    "drop_in.py": "parameters/every 8: 2 syncs",  # at calls 20 and 28, the last one
    "zero.py": "optimizer state: 50%",
}


def test_every_script_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("[!_]*.py")} == SAID.keys()


def as_worker(name: str, port: int) -> str:
    """Run a script as one of the workers; return what it printed."""
    be_worker(port)
    sys.argv = [name, "--steps", "29"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("name", SAID)
def test_a_script_runs(pool: RankPool, name: str) -> None:
    """In workers that know of each other what torchrun tells them."""
    output = "".join(pool.run(2, as_worker, name, free_port()))
    assert "loss" in output
    assert SAID[name] in output


@pytest.mark.parametrize(
    "name", ["zero.py", *(pytest.param(n, marks=pytest.mark.long) for n in SAID if n != "zero.py")]
)
def test_a_script_runs_under_torchrun(name: str) -> None:
    output = run(*TORCHRUN, str(EXAMPLES / name), "--steps", "29")
    assert "loss" in output
    assert SAID[name] in output
