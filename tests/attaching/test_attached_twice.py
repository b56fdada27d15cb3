"""One model with two optimizers: two attachments, unless its gradients live in shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from loosestep import NotAttachable, attach, ddp
from loosestep.reducers import Mean, Reducer, Resident, Ternary, TwoLevel
from loosestep.testing import RankPool
from tests.support.oracle import Net, equal, loss_of, make_net, snapshot

BOTH = TwoLevel(Ternary(), inside=Resident(), ranks_per_host=2)
PAIRS: list[tuple[Reducer | None, Reducer | None]] = [
    (Resident(), Resident()),
    (Resident(), None),
    (Mean(), Resident()),
    (BOTH, None),
]


def halves(net: Net) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return an optimizer for the last layer, and one for all the others."""
    last = set(net.last.parameters())
    rest = [p for p in net.parameters() if p not in last]
    return torch.optim.SGD(rest, lr=0.05), torch.optim.SGD(list(last), lr=0.05)


def second_refused() -> list[str]:
    """Attach twice, either of them with gradients in rooms; then again when the first has gone."""
    said = []
    for first, second in PAIRS:
        net = make_net()
        one, other = halves(net)
        with attach(net, one, ddp(gradient_reducer=first)):
            try:
                attach(net, other, ddp(gradient_reducer=second)).detach()
                said.append("")
            except NotAttachable as error:
                said.append(str(error))
        attach(net, other, ddp(gradient_reducer=second)).detach()
    return said


def test_a_second_attachment_is_refused_where_gradients_are_resident(pool: RankPool) -> None:
    """In either order and on every rank; after a detach the model is free again."""
    for said in pool.run(2, second_refused):
        for text in said:
            assert "attached already" in text
            assert "Mean()" in text


def a_part_too() -> str:
    """Attach a model and then a part of it, whose gradients two attachments would hold."""
    net = make_net()
    one, other = halves(net)
    with attach(net, one, ddp(gradient_reducer=Resident())):
        try:
            attach(net.last, other, ddp())
        except NotAttachable as error:
            return str(error)
    return ""


def test_it_is_the_parameters_that_count(pool: RankPool) -> None:
    """A part of an attached model shares its gradients with it."""
    for said in pool.run(2, a_part_too):
        assert "attached already" in said


def two_optimizers(twice: bool) -> dict[str, torch.Tensor]:
    net = make_net()
    one, other = halves(net)
    optimizers = [one, other] if twice else [torch.optim.SGD(net.parameters(), lr=0.05)]
    runs = [attach(net, optimizer, ddp(gradient_reducer=Mean())) for optimizer in optimizers]
    for step in range(4):
        net.zero_grad()
        loss_of(net, dist.get_rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for run in runs:
        run.detach()
    return {name: t for name, t in snapshot(net).items() if "norm" not in name}


def test_two_attachments_equal_one_where_gradients_stay_where_they_are(pool: RankPool) -> None:
    """Sharing gradients that are shared already changes nothing."""
    for one, two in zip(
        pool.run(2, two_optimizers, False), pool.run(2, two_optimizers, True), strict=True
    ):
        assert equal(one, two)
