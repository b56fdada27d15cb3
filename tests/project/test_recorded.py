"""Short trainings give what they gave before, to the bit."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from loosestep.strategy.recipes import RECIPES
from tests.recorded import SAME_EVERYWHERE, differences
from tests.support.trainings import CASES

ROOT = Path(__file__).parents[2]


# One of every kind: recipes, overlap, reducers, transports, sharding modes, drop-in names.
OF_EVERY_KIND = [
    *("ddp, 2", "post_local_sgd, 4", "local sgd, 3, sockets", "hierarchical overlap, 4"),
    *("optimizer state and buffers, 2", "overlap by int4, 4, sockets", "resident, 4", "cast, 2"),
    *("int4, stochastic, 3", "topk with feedback, 2", "int2 with replica feedback, 2"),
    *("two levels, int4, 4", "gradients by int4, 4", "gradient_hook, 2", "zero with a period, 4"),
    *("hook_with_zero_step_interleaved, 2", "HierarchicalModelAverager, 4"),
    *("diloco, overlapped, 2, sockets", "streaming_diloco, 2", "sparseloco, 2", "drift, 2"),
    "PostLocalSGDOptimizer, 4",
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="recorded on x86-64")
@pytest.mark.parametrize(
    "names", [OF_EVERY_KIND, pytest.param([], marks=pytest.mark.long)], ids=["every kind", "all"]
)
def test_trainings_give_what_they_gave_before(names: list[str]) -> None:
    """Every recipe, reducer, transport, sharding mode and drop-in name is as it was recorded."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.recorded", *names],
        cwd=ROOT,
        env=os.environ | SAME_EVERYWHERE,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(names or CASES)} trainings, 0 differ" in run.stdout


def test_every_recipe_and_reducer_is_recorded() -> None:
    """Who adds one adds a training of it."""
    told = " ".join(CASES).lower().replace("local sgd", "post_local_sgd")
    assert not [name for name in RECIPES if name not in told]
    known = {"int8", "int4", "int2", "ternary", "topk", "cast", "mean", "resident", "randommask"}
    assert not [name for name in known if name not in told]


def test_what_differs_is_told() -> None:
    """A changed, a new and a missing training are a line each."""
    told = differences({"a": "1", "b": "2", "new": "3"}, {"a": "1", "b": "0", "gone": "4"})
    assert told == ["b: was 0, is 2", "gone: was 4, is not there", "new: was not there, is 3"]
