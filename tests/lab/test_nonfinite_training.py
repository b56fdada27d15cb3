"""``loosestep train`` calls nothing a success, and saves nothing, that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from loosestep.lab.trainer.checkpoint import whole_folder
from tests.support.commands import TINY, call


@pytest.mark.parametrize(
    "strategy", [pytest.param("ddp", marks=pytest.mark.long), "post_local_sgd:period=2"]
)
def test_what_is_not_finite_is_neither_saved_nor_a_success(tmp_path: Path, strategy: str) -> None:
    """An absurd rate ends with an error, and the finite checkpoint before it is kept."""
    folder, saving = tmp_path / "run", ("--save-every", "1", "--keep", "1")
    # Adam's first step moves parameters by about the rate, which float32 has room for; what the
    # second one gets from such a model has no number.
    absurd = ("--lr", "1e30", "--clip", "0", "--steps", "4")
    done = call("train", *TINY, "--strategy", strategy, *absurd, *saving, "--out", folder)
    assert done.code == 1, done.err
    assert "infinity or NaN" in done.err
    assert whole_folder(folder, 1).exists()
    assert not whole_folder(folder, 2).exists()
