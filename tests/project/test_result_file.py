"""What `pytest --result-file` writes down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest

def test_right(): pass

def test_wrong(): assert 1 == 2

@pytest.mark.skip(reason="no moon")
def test_skipped(): pass

@pytest.mark.xfail(strict=True)
def test_expected(): assert False

@pytest.fixture
def broken(): raise ValueError("no such thing")

def test_broken(broken): pass
"""


def test_every_outcome_is_counted(tmp_path: Path) -> None:
    """Failures and skips come with their reason, an error before a test is a failure."""
    suite, result = tmp_path / "test_suite.py", tmp_path / "results" / "run.json"
    suite.write_text(SUITE)
    options = ["-p", "tests.conftest", "-c", str(tmp_path / "none.ini"), "-p", "no:cacheprovider"]
    (tmp_path / "none.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", *options, "--result-file", str(result), str(suite)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    found = json.loads(result.read_text())
    assert [found[name] for name in ("passed", "failed", "skipped")] == [1, 2, 1]
    assert found["expected_failures"] == 1
    reasons = {entry["test"].rpartition("::")[2]: entry["reason"] for entry in found["failures"]}
    assert reasons == {"test_wrong": "assert 1 == 2", "test_broken": "ValueError: no such thing"}
    assert found["skips"] == [{"test": "test_suite.py::test_skipped", "reason": "no moon"}]
    assert found["torch"] == torch.__version__
    assert found["exit_status"] == 1
    assert found["command"].startswith("pytest ")
    assert found["seconds"] >= 0
