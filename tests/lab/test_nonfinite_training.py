"""``loosestep train`` calls nothing a success, and saves nothing, that is not finite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import NotFinite
from loosestep.lab.trainer.checkpoint import whole_folder
from loosestep.lab.trainer.saving import check_finite, save
from loosestep.testing import RankPool
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


def test_a_loss_that_is_not_finite_is_no_success(tmp_path: Path) -> None:
    """Parameters of 1e19 are finite; what such a model says is not, and it is not saved.

    (At 1e30 its layer norms divide by an infinity, and it says the same of every byte.)
    """
    folder, saving = tmp_path / "run", ("--save-every", "1", "--keep", "1")
    absurd = ("--lr", "1e19", "--clip", "0", "--steps", "1")
    done = call("train", *TINY, "--strategy", "ddp", *absurd, *saving, "--out", folder)
    assert done.code == 1, done.err
    assert "the loss on held-out data is nan after step 1" in done.err
    assert not whole_folder(folder, 1).exists()


def saved_with_infinite_momentum(folder: str) -> str:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.state[model.bias]["exp_avg_sq"][1] = float("inf")
    sharing = SimpleNamespace(model=model, optimizer_state=optimizer.state_dict)
    worker: Any = SimpleNamespace(sharing=sharing, step=3)
    try:
        save(worker, Path(folder))
    except NotFinite as error:
        return str(error)
    return "saved"


def test_an_infinite_state_of_the_optimizer_is_not_saved(pool: RankPool, tmp_path: Path) -> None:
    """Training that goes on from it would not be finite at the next step."""
    for said in pool.run(2, saved_with_infinite_momentum, str(tmp_path)):
        assert "'exp_avg_sq of parameter 1 in the optimizer' of worker 1" in said
    assert list(tmp_path.iterdir()) == []


def checked(spoilt: str) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), float("-inf")))
    if spoilt and dist.get_rank() == 1:
        dict(model.named_buffers())[spoilt][0] = float("inf")
    worker: Any = SimpleNamespace(sharing=SimpleNamespace(model=model), step=3)
    try:
        check_finite(worker)
    except NotFinite as error:
        return str(error)
    return "finite"


def test_statistics_must_be_finite_and_masks_need_not(pool: RankPool) -> None:
    """What BatchNorm normalises by is part of what a model computes."""
    assert pool.run(2, checked, "") == ["finite"] * 2
    for buffer in ("1.running_mean", "1.running_var"):
        for said in pool.run(2, checked, buffer):
            assert f"{buffer!r} of worker 1" in said
