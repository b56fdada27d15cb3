"""PyTorch's own tests of its sharded optimizer pass with loosestep in its place."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.upstream_zero import NUM_CASES, can_fetch, fetch, on_cpu, passed_alone, run


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pytorchs_tests_of_zero_pass(tmp_path: Path) -> None:
    """All that need no GPUs, of the last release that Debian has the sources of."""
    try:
        text = fetch(tmp_path / "source")
    except (OSError, StopIteration, subprocess.TimeoutExpired) as error:
        if "CI" in os.environ or can_fetch():  # there it is to be had, and a skip would hide that
            raise
        pytest.skip(f"Debian's source package of PyTorch cannot be had here: {error}")
    said = run(on_cpu(text), tmp_path)
    assert passed_alone(said, NUM_CASES), said[-4000:]


def test_errors_beside_passed_tests_are_no_success() -> None:
    """Nor are failed, skipped and unexpected ones, nor output that ends early."""
    assert passed_alone("....\n39 passed, 2 deselected, 3 warnings in 200.12s (0:03:20)\n", 39)
    for word in ("failed", "error", "errors", "skipped", "xfailed", "xpassed"):
        assert not passed_alone(f"....\n39 passed, 1 {word} in 200.12s (0:03:20)\n", 39)
    assert not passed_alone("1 failed, 39 passed in 1.00s", 39)
    assert not passed_alone("\n39 passed in 1.00s\nkilled", 39)
    assert not passed_alone("", 39)
