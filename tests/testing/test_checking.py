"""Users check their own models and recipes against the oracle."""

from __future__ import annotations

import pytest
import torch

from loosestep import Strategy, diloco, hierarchical_sgd
from loosestep.outer import Outer
from loosestep.reducers import Int8
from loosestep.schedules import every
from loosestep.testing import check, oracle
from tests.support.oracle import loss_of, make_net, sgd


def test_a_recipe_passes_on_a_model_of_ones_own() -> None:
    """Real ranks come to what one process comes to."""
    check(diloco(3), make_net, sgd, loss_of, steps=7)
    check(hierarchical_sgd({"world": 3}, gradients="host"), make_net, sgd, loss_of, steps=7)


def noisy(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return another loss at every call: no run can be repeated."""
    return loss_of(model, rank, step) * torch.rand(())


def test_what_cannot_be_repeated_is_told() -> None:
    """With the tensor, and with what to look for."""
    with pytest.raises(AssertionError, match=r"is not what it must come to.*loss_of the same"):
        check(diloco(3), make_net, sgd, noisy, steps=4)


def test_few_bits_are_not_for_the_oracle() -> None:
    """It says so, and what to give."""
    with pytest.raises(ValueError, match=r"the oracle averages exactly.*reducer=Mean"):
        check(Strategy(schedule=every(2), reducer=Int8()), make_net, sgd, loss_of)


def test_outer_steps_by_hand() -> None:
    """Anchor 1, mean 3: the gradient is -2, so SGD at 0.5 leads to 1 + 1 = 2."""
    outer = oracle.OuterSteps(Outer(torch.optim.SGD, lr=0.5), {"w": torch.tensor([1.0])})
    values = {"w": torch.tensor([3.0])}
    outer.peek(peeked := {"w": torch.tensor([3.0])})
    outer.take(values)
    assert values["w"].item() == peeked["w"].item() == 2.0
