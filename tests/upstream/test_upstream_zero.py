"""PyTorch's own tests of its sharded optimizer pass with loosestep in its place."""

from pathlib import Path

import pytest

from tests.support.upstream_zero import NUM_CASES, fetch, on_cpu, run


@pytest.mark.long
def test_pytorchs_tests_of_zero_pass(tmp_path: Path) -> None:
    """All that need no GPUs, of the last release that Debian has the sources of."""
    try:
        text = fetch(tmp_path / "source")
    except (OSError, StopIteration) as error:
        pytest.skip(f"Debian's source package of PyTorch cannot be had here: {error}")
    said = run(on_cpu(text), tmp_path)
    assert f"\n{NUM_CASES} passed" in said, said[-4000:]
    assert "failed" not in said
