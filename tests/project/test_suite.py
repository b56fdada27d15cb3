"""How the tests themselves are run."""

from __future__ import annotations

import pytest


@pytest.mark.fast
@pytest.mark.xdist_group("kept")
def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """pytest-xdist has given this test's id its group; else modules make their fixtures anew."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@kept")
