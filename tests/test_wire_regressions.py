"""What once went wrong beside the wire: combinations, errors that are caught, what is left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from loosestep import (
    ErrorFeedback,
    Int4,
    Int8,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    Reducer,
    Resident,
    Strategy,
    TopK,
    every,
)
from loosestep.testing import RankPool
from tests.oracle import loss_of, make_net, sgd

# Averages under way.

CANNOT_OVERLAP: dict[str, tuple[dict[str, Any], str]] = {
    "state": ({"optimizer_state": "average"}, "use 'keep' or 'reset', or overlap_steps=0"),
    "skip": ({"reducer": TopK(0.5, on_nonfinite="skip")}, "use on_nonfinite='raise'"),
    "feedback": ({"reducer": ErrorFeedback(Int4(on_nonfinite="skip"))}, "on_nonfinite='raise'"),
    "resident": ({"reducer": Resident()}, r"use TwoLevel\(\) or Mean\(\)"),
}


@pytest.mark.parametrize("what", CANNOT_OVERLAP)
def test_what_cannot_overlap_is_refused(what: str) -> None:
    """A strategy says so at once, with the number and the way out; without overlap it may be."""
    options, way_out = CANNOT_OVERLAP[what]
    with pytest.raises(ValueError, match=f"overlap_steps=2 .*{way_out}"):
        Strategy(schedule=every(4), overlap_steps=2, **options)
    assert Strategy(schedule=every(4), **options).overlap_steps == 0


def averager_texts() -> list[str]:
    texts = []
    reducers: list[Reducer] = [TopK(0.5, on_nonfinite="skip"), Resident()]
    for reducer in reducers:
        try:
            PeriodicModelAverager(4, reducer=reducer, overlap_steps=2)
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_averagers_refuse_it_too(pool: RankPool) -> None:
    """An averager that is made by hand knows the same rules."""
    for skipping, resident in pool.run(2, averager_texts):
        assert "use on_nonfinite='raise'" in skipping
        assert "use TwoLevel() or Mean()" in resident


# Checkpoints.


def load_nothing_kept() -> list[int]:
    """Return how many tensors are kept before and after loading a state from before."""
    net, reducer = make_net(), ErrorFeedback(Int8())
    averager = PeriodicModelAverager(1, module=net, reducer=reducer)
    optimizer = PostLocalSGDOptimizer(sgd(net), averager)
    start, counts = optimizer.state_dict(), []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        optimizer.step()
    start.pop("averager", None)
    for _ in range(2):
        kept = averager.kept_state()
        counts.append(len(kept.get("references", {})) + len(reducer.state_dict()["sent"]))
        optimizer.load_state_dict(start)
    return counts


def test_a_checkpoint_without_memory_clears_it(pool: RankPool) -> None:
    """What was kept belongs to the run that is left, so the loaded one starts without."""
    for before, after in pool.run(2, load_nothing_kept):
        assert before > 0
        assert after == 0
