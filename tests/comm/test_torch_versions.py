"""Which versions of torch are tested ones, and what is said about the others."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from loosestep import LoosestepWarning
from loosestep.comm import torch_versions
from loosestep.comm.torch_versions import NEWEST, OLDEST, is_tested, version_of, warn_if_untested
from loosestep.errors import forget_warnings
from loosestep.testing import RankPool
from tests.support.oracle import make_net

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.13.0", (2, 13)),
        ("2.13.0+cpu", (2, 13)),
        ("2.9.1+cu128", (2, 9)),
        ("2.16.0.dev20260101+cu130", (2, 16)),
        ("2.12.0a0+git1234567", (2, 12)),
        ("3.0", (3, 0)),
        ("local-build", (0, 0)),
    ],
)
def test_major_and_minor_count(text: str, version: tuple[int, int]) -> None:
    """Pre-releases and local builds are of the version that they are named after."""
    assert version_of(text) == version


def test_the_ends_belong_to_the_range() -> None:
    """Versions are compared as numbers: 2.10 comes after 2.9."""
    assert OLDEST < NEWEST
    assert is_tested(f"{OLDEST[0]}.{OLDEST[1]}.0+cpu")
    assert is_tested(f"{NEWEST[0]}.{NEWEST[1]}.1")
    assert is_tested("2.10.0")
    assert not is_tested(f"{OLDEST[0]}.{OLDEST[1] - 1}.1")
    assert not is_tested(f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev20260101")


def test_the_floor_is_the_same_for_pip() -> None:
    """pyproject.toml asks for what is the oldest tested version, and sets no ceiling."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [need for need in project["dependencies"] if re.match(r"torch\b", need)]
    assert found == [f"torch>={OLDEST[0]}.{OLDEST[1]}"]


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> str:
    """Pretend that torch is newer than all that was tested."""
    version = f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev20260101"
    monkeypatch.setattr(torch, "__version__", version)
    return version


def test_another_version_is_warned_about(other_version: str) -> None:
    """The warning names the range and the version found."""
    forget_warnings()
    with pytest.warns(LoosestepWarning) as said:
        warn_if_untested()
    assert torch_versions.tested_range() in str(said[0].message)
    assert other_version in str(said[0].message)


def test_it_is_said_once_and_nothing_is_refused() -> None:
    """Whatever is imported first says it, and what comes after does not."""
    code = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.99.0'); "
    code += "from loosestep import average_, attach, ZeroRedundancyOptimizer; "
    code += "import loosestep.comm.reducers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.count("LoosestepWarning") == 1, run.stderr
    assert "2.99.0" in run.stderr


def test_a_tested_version_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{OLDEST[0]}.{OLDEST[1]}.0+cu128")
    forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested()


def turn_broadcast_off() -> tuple[bool, bool, list[float]]:
    """Let rank 1's BatchNorm go its own way; return the switch before and after, and its mean."""
    net = DistributedDataParallel(make_net())
    before = torch_versions.buffers_are_broadcast(net)
    torch_versions.broadcast_buffers(net, False)
    norm = net.module.norm
    norm.running_mean.fill_(float(torch.distributed.get_rank()))
    net.eval()
    net(torch.ones(2, 6))
    return before, torch_versions.buffers_are_broadcast(net), norm.running_mean.tolist()


def test_the_switch_is_the_one_that_ddp_reads(pool: RankPool) -> None:
    """Whatever its name is: once it is off, a forward leaves buffers alone."""
    for rank, (before, after, mean) in enumerate(pool.run(2, turn_broadcast_off)):
        assert before
        assert not after
        assert mean == [float(rank)] * 8
