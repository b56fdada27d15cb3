"""Short trainings give what they gave before, to the bit."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recorded import SAME_EVERYWHERE, differences

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86-64")
def test_trainings_give_what_they_gave_before() -> None:
    """Every recipe, reducer, transport, sharding mode and drop-in name is as it was recorded."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.recorded"],
        cwd=ROOT,
        env=os.environ | SAME_EVERYWHERE,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_what_differs_is_told() -> None:
    """A changed, a new and a missing training are a line each."""
    told = differences({"a": "1", "b": "2", "new": "3"}, {"a": "1", "b": "0", "gone": "4"})
    assert told == ["b: was 0, is 2", "gone: was 4, is not there", "new: was not there, is 3"]
