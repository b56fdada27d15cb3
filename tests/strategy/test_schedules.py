"""Schedules, in one process, with answers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loosestep import post_local_sgd
from loosestep.schedules import Due, after, always, every, levels
from loosestep.strategy.schedules import next_sync

pytestmark = pytest.mark.fast


def test_levels_by_hand() -> None:
    """Periods 2 and 6: host at 2, 4, 8, 10; world at 6, 12; never at 0."""
    schedule = levels({"host": 2, "world": 6})
    due = {step: schedule(step).parameters for step in range(13)}
    assert {s: level for s, level in due.items() if level} == {
        2: "host",
        4: "host",
        6: "world",
        8: "host",
        10: "host",
        12: "world",
    }


def test_after_by_hand() -> None:
    """Three steps of warm-up, then every second step counted from there: 5, 7, 9."""
    schedule = after(3, every(2, gradients="host"))
    assert [schedule(step).gradients for step in range(5)] == ["world"] * 3 + ["host"] * 2
    assert [step for step in range(10) if schedule(step).parameters] == [5, 7, 9]


def test_next_sync() -> None:
    """The next due step and what is due, or None where parameters are never averaged."""
    schedule = post_local_sgd(4, warmup_steps=10).schedule
    assert next_sync(schedule, 0) == (14, Due("host", "world"))
    assert next_sync(schedule, 14) == (18, Due("host", "world"))
    assert next_sync(always(gradients="world"), 0) is None


@given(period=st.integers(1, 50), start=st.integers(0, 50), step=st.integers(0, 500))
def test_a_schedule_is_a_pure_function(period: int, start: int, step: int) -> None:
    """Asking twice gives the same, and due steps lie a period apart after the start."""
    schedule = after(start, every(period))
    assert schedule(step) == schedule(step)
    expected = step > start and (step - start) % period == 0
    assert (schedule(step).parameters is not None) == expected
    if step < start:
        assert schedule(step) == Due(gradients="world")
