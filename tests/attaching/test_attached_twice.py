"""One model with two optimizers: two attachments, unless one would undo or repeat the other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from loosestep import (
    NotAttachable,
    Strategy,
    attach,
    ddp,
    diloco,
    hierarchical_sgd,
    post_local_sgd,
)
from loosestep.reducers import Mean, Reducer, SharedMemoryMean, Ternary, TwoLevel
from loosestep.schedules import every
from loosestep.testing import RankPool
from tests.support.oracle import Net, equal, loss_of, make_net, snapshot

BOTH = TwoLevel(Ternary(), inside=SharedMemoryMean(), ranks_per_host=2)
PAIRS: list[tuple[Reducer | None, Reducer | None]] = [
    (SharedMemoryMean(), SharedMemoryMean()),
    (SharedMemoryMean(), None),
    (Mean(), SharedMemoryMean()),
    (BOTH, None),
]


ADDED: dict[str, tuple[Strategy, Strategy]] = {
    "both overlap": (Strategy(schedule=every(2), overlap_steps=1),) * 2,
    "the first overlaps": (Strategy(schedule=every(2), overlap_steps=1), post_local_sgd(2)),
    "the second overlaps": (post_local_sgd(2), Strategy(schedule=every(2), overlap_steps=1)),
    "both outer": (diloco(2), diloco(2)),
    "the first outer": (diloco(2), hierarchical_sgd({"host": 1, "world": 2})),
    "the second outer": (post_local_sgd(2), diloco(2)),
}
ALLOWED: list[tuple[Strategy, Strategy]] = [
    (diloco(2), ddp()),
    (ddp(), Strategy(schedule=every(2), overlap_steps=1)),
    (post_local_sgd(2), post_local_sgd(2)),
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
    with attach(net, one, ddp(gradient_reducer=SharedMemoryMean())):
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


def refused(first: Strategy, second: Strategy) -> str:
    net = make_net()
    one, other = halves(net)
    with attach(net, one, first):
        try:
            attach(net, other, second).detach()
        except NotAttachable as error:
            return str(error)
    return ""


def all_added() -> dict[str, str]:
    return {case: refused(*pair) for case, pair in ADDED.items()}


def test_two_averages_that_add_to_parameters_are_refused(pool: RankPool) -> None:
    """A difference to a snapshot, or an outer step, would be added by both: replicas fell apart."""
    for said in pool.run(2, all_added):
        for case, text in said.items():
            assert "attached already" in text, case
            assert "not attached, before it" in text, case
            assert ("Outer(SGD" if "outer" in case else "overlap_steps=1") in text, case


def all_allowed() -> list[str]:
    return [refused(*pair) for pair in ALLOWED]


def a_shared_part() -> str:
    """Attach two models that share a part which neither trains."""
    body = torch.nn.Linear(2, 2).requires_grad_(False)
    nets = [torch.nn.Sequential(body, torch.nn.Linear(2, 1)) for _ in range(2)]
    one, other = (torch.optim.SGD(net[1].parameters(), lr=0.1) for net in nets)
    with attach(nets[0], one, diloco(2)), attach(nets[1], other, diloco(2)):
        return ""


def test_where_only_one_averages_or_nothing_trained_is_shared_both_are_taken(
    pool: RankPool,
) -> None:
    """Means in turn change nothing the second time, and a frozen part is not averaged."""
    assert pool.run(2, all_allowed) == [[""] * len(ALLOWED)] * 2
    assert pool.run(2, a_shared_part) == [""] * 2


def the_rest_unattached(rest: bool) -> dict[str, torch.Tensor]:
    net = make_net()
    optimizers = [*halves(net)] if rest else [torch.optim.SGD(net.parameters(), lr=0.05)]
    with attach(net, optimizers[-1], diloco(2)):
        for step in range(5):
            net.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            for optimizer in optimizers:  # the attached one is last
                optimizer.step()
    return snapshot(net)


def test_an_optimizer_beside_the_attached_one_needs_no_attachment(pool: RankPool) -> None:
    """Stepped before it, its parameters are averaged as if one optimizer had all."""
    for one, two in zip(
        pool.run(2, the_rest_unattached, False), pool.run(2, the_rest_unattached, True), strict=True
    ):
        assert equal(one, two)
