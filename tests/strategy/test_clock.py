"""The clock, in one process, with answers worked out by hand."""

from __future__ import annotations

import pytest

from loosestep import Clock

pytestmark = pytest.mark.fast


def test_a_clock_counts_and_resumes() -> None:
    """Two ticks, saved and loaded, are two."""
    clock = Clock()
    clock.tick()
    clock.tick()
    other = Clock()
    other.load_state_dict(clock.state_dict())
    assert other.step == 2
    with pytest.raises(ValueError, match=">= 0"):
        other.load_state_dict({"step": -1})
