"""Gradients that were made with create_graph=True keep their graph when they are shared."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import attach, ddp
from loosestep.reducers import Cast, Mean, Reducer, SharedMemoryMean
from loosestep.testing import RankPool

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True"),
]

REDUCERS: list[Reducer | None] = [None, Mean(), SharedMemoryMean(), Cast(torch.bfloat16)]


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 1, bias=False)]
    return torch.nn.Sequential(*layers).double()


def loss_of(model: torch.nn.Module, rank: int) -> torch.Tensor:
    inputs = torch.arange(6.0, dtype=torch.float64).view(2, 3) + rank
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def squares_of_gradients(model: torch.nn.Module) -> torch.Tensor:
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return torch.stack(squares).sum()


def penalised(reducer: Reducer | None) -> list[torch.Tensor]:
    """Return gradients of a loss and of the square of its gradients, in the second step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(model, optimizer, ddp(gradient_reducer=reducer)):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank()).backward(create_graph=True)
            squares_of_gradients(model).backward()
            optimizer.step()
        return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def on_ranks() -> list[list[torch.Tensor]]:
    return [penalised(reducer) for reducer in REDUCERS]


def test_a_gradient_penalty_is_that_of_the_mean_gradient(pool: RankPool) -> None:
    """A second backward goes through shared gradients, by every reducer, as on one process."""
    model, world = make_model(), 2
    loss = torch.stack([loss_of(model, rank) for rank in range(world)]).mean()
    loss.backward(create_graph=True)
    squares_of_gradients(model).backward()
    expected = [p.grad for p in model.parameters()]
    for results in pool.run(world, on_ranks):
        for reducer, gradients in zip(REDUCERS, results, strict=True):
            close = 0.05 if isinstance(reducer, Cast) else 1e-9
            torch.testing.assert_close(gradients, expected, rtol=close, atol=close)


def outcome_under_ddp(reducer: Reducer | None, attached: bool) -> str:
    """Return the error of a backward of a DDP module, or its gradients."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = attach(model, optimizer, ddp(gradient_reducer=reducer)) if attached else None
    try:
        loss_of(model, dist.get_rank()).backward(create_graph=True)
        outcome = str([p.grad for p in model.parameters()])
    except RuntimeError as error:
        outcome = str(error)
    if run is not None:
        run.detach()
    return outcome


def under_ddp_on_ranks() -> list[str]:
    ways = [(None, False), (None, True), (Mean(), True)]
    return [outcome_under_ddp(reducer, attached) for reducer, attached in ways]


def test_create_graph_under_ddp_does_what_ddp_does(pool: RankPool) -> None:
    """Which is an error: DDP writes the mean into a leaf. Attached it is the same, and no wait."""
    for bare, native, mean in pool.run(2, under_ddp_on_ranks):
        assert native == mean == bare
        assert "in-place operation" in bare
