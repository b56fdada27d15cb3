"""``optimizer_state="average"`` where ranks have used different parameters, as experts are."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from loosestep import Strategy, Topology, ZeroRedundancyOptimizer, attach
from loosestep.schedules import every
from loosestep.testing import RankPool

State = dict[str, dict[str, torch.Tensor]]  # by parameter and key


class Experts(torch.nn.Module):
    """A layer that all ranks use, and experts that some do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = torch.nn.Linear(2, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, inputs: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.shared(inputs))


def go(net: Experts, optimizer: torch.optim.Optimizer, used: list[int]) -> None:
    for expert in used:
        optimizer.zero_grad()
        net(torch.full((1, 2), dist.get_rank() + 1.0), expert).sum().backward()
        optimizer.step()


def state_of(net: Experts, optimizer: torch.optim.Optimizer) -> State:
    held = {n: optimizer.state.get(p, {}) for n, p in net.named_parameters()}
    return {
        name: {key: value.clone() for key, value in state.items() if value is not None}
        for name, state in held.items()
    }


def experts(kind: str, options: dict[str, Any]) -> tuple[State, State, bool]:
    """Return the state before and after a sync, and whether parameters were averaged."""
    rank = dist.get_rank()
    net = Experts()
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **options)
    strategy = Strategy(schedule=every(3), optimizer_state="average")
    with attach(net, optimizer, strategy) as run:
        go(net, optimizer, [0, rank])  # expert 0 by all, 1 by rank 1, 2 by nobody
        before = state_of(net, optimizer)
        run.finalize()
        after = state_of(net, optimizer)
        run.finalize()  # clean now: nothing is averaged once more
        syncs = run.metrics()["parameters/world"]["syncs"]
        go(net, optimizer, [2, 1, 0])  # through a sync; by now all have state for all
        return before, after, syncs == 1 and bool(state_of(net, optimizer)["experts.1.weight"])


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("SGD", {"momentum": 0.9}),
    ("NAdam", {}),  # its product of momenta starts at 1
    ("Rprop", {}),  # its step sizes start at the learning rate
]


def all_optimizers() -> list[tuple[State, State, bool]]:
    return [experts(kind, options) for kind, options in OPTIMIZERS]


def test_state_that_a_rank_does_not_have_is_left_out(pool: RankPool) -> None:
    """State of parameters that all ranks have used is averaged; of others all keep their own."""
    for (kind, _), *told in zip(OPTIMIZERS, *pool.run(2, all_optimizers), strict=True):
        (before, after, fine), (others, others_after, fine_too) = told
        assert (fine, fine_too) == (True, True), kind
        for name in ("shared.weight", "experts.0.weight"):
            assert after[name].keys() == before[name].keys() > set()
            for key, value in after[name].items():
                one, other = before[name][key], others[name][key]
                mean = torch.maximum(one, other) if key == "step" else (one + other) / 2
                assert torch.equal(value, others_after[name][key]), (kind, name, key)
                if value.ndim:
                    assert torch.allclose(value, mean), (kind, name, key)
        assert after["experts.1.weight"] == before["experts.1.weight"] == {}
        kept, still = others["experts.1.weight"], others_after["experts.1.weight"]
        assert kept.keys() == still.keys() > set()
        assert all(torch.equal(value, still[key]) for key, value in kept.items()), kind
        assert after["experts.2.weight"] == others_after["experts.2.weight"] == {}


def hosts_with_experts(*, sharded: bool) -> list[torch.Tensor]:
    """Train as two hosts that share gradients inside and use another expert each."""
    topology = Topology({"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]})
    net, host = Experts(), topology.process_group("host")
    optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.Adam, process_group=host, lr=0.1
        )
    schedule = every(2, gradients="host")
    strategy = Strategy(schedule=schedule, topology=topology, optimizer_state="average")
    with attach(net, optimizer, strategy) as run:
        go(net, optimizer, [0, dist.get_rank() // 2, 2, 0, 1])
        run.finalize()
    return [parameter.detach() for parameter in net.parameters()]


def both() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return hosts_with_experts(sharded=False), hosts_with_experts(sharded=True)


def test_the_same_rule_holds_for_shards(pool: RankPool) -> None:
    """A sharded optimizer averages the same state, and all ranks end equal."""
    results = pool.run(4, both)
    for plain, sharded in results:
        assert all(torch.equal(p, q) for p, q in zip(plain, results[0][0], strict=True))
        assert all(torch.equal(p, q) for p, q in zip(sharded, results[0][1], strict=True))
        assert all(torch.allclose(p, q) for p, q in zip(plain, sharded, strict=True))
