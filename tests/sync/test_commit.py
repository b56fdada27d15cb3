"""What is remembered changes when a sync has succeeded, all of it, and not before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from loosestep import NotFinite, PeerLost, attach, ddp
from loosestep.comm.group import Group, peers_of
from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place
from loosestep.reducers import (
    ErrorFeedback,
    Int4,
    Int8,
    Mean,
    Reducer,
    ReplicaFeedback,
)
from loosestep.sync.averager import Averager
from loosestep.sync.kept import Kept
from loosestep.testing import RankPool

STATEFUL: dict[str, Reducer] = {
    "feedback": ErrorFeedback(Int4()),
    "feedback by chance": ErrorFeedback(Int8(rounding="stochastic")),
    "replica feedback": ReplicaFeedback(Int4()),
    "chance": Int8(rounding="stochastic"),
}


def flat(state: Any) -> list[Any]:
    """Return a nested state as a list that can be compared."""
    if isinstance(state, dict):
        return [(key, flat(value)) for key, value in sorted(state.items())]
    return state.tolist() if isinstance(state, torch.Tensor) else state


class Mortal(Reducer):
    """Does what another does, until a rank dies at its fourth window of the third sync."""

    def __init__(self, inner: Reducer) -> None:
        self.inner, self.uses = inner, 0

    lossy = True
    leaves_apart = True  # some of the inner ones do

    @property
    def block(self) -> int:
        return self.inner.block

    def init(self, tensors: Any, peers: Peers) -> Any:
        return self.inner.init(tensors, peers)

    def start(self, buffer: torch.Tensor, peers: Peers, state: Any, place: Place) -> Handle:
        self.uses += 1
        if self.uses == 8 + 4 and dist.get_rank() == 2:  # the first of three syncs is exact
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.start(buffer, peers, state, place)

    def bytes_on_wire(
        self, numel: int | Sequence[int], dtype: torch.dtype, group_size: int, group_rank: int = 0
    ) -> int:
        return self.inner.bytes_on_wire(numel, dtype, group_size, group_rank)

    def __repr__(self) -> str:
        return "Mortal()"


def lose_a_peer(name: str) -> tuple[bool, bool, bool]:
    """Sync until a rank is lost; say whether windows were written, and states changed or stayed."""
    peers = peers_of(Group.make((0, 1, 2), 20), timeout=20)
    kept = Kept()
    averager = Averager(peers, reducer=Mortal(STATEFUL[name]), kept=kept, window_bytes=4096)
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.zeros(8 * 1024)
    states = []
    for _ in range(2):
        values += torch.randn(values.numel(), generator=generator)
        averager.average([("values", values)])
        states.append(flat(kept.state_dict()))
    values += torch.randn(values.numel(), generator=generator)
    before = values.clone()
    try:
        averager.average([("values", values)])
    except PeerLost:
        written = not torch.equal(values, before)
        return written, states[0] != states[1], flat(kept.state_dict()) == states[1]
    return False, False, False


@pytest.mark.parametrize("name", STATEFUL)
def test_a_lost_peer_leaves_what_is_remembered(pool: RankPool, name: str) -> None:
    """Half of the windows are through and written; residuals and references are as before."""
    results = pool.run(3, lose_a_peer, name, allow_dead=[2])
    assert results[:2] == [(True, True, True)] * 2


class TwoKinds(torch.nn.Module):
    """Parameters of two dtypes, whose gradients are in two buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = torch.nn.Parameter(torch.rand(300).bfloat16())
        self.wide = torch.nn.Parameter(torch.rand(500))


def backward(model: torch.nn.Module, net: TwoKinds, step: int, bad: bool) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    factors = torch.randn(500, generator=generator)
    if bad and dist.get_rank() == 1:
        factors[7] = float("nan")
    narrow = (net.narrow * factors[:300].bfloat16().nan_to_num(0.0)).sum()
    ((net.wide * factors).sum() + narrow.float()).backward()


def refuse_nan(name: str, kind: str, bad_step: int | None) -> list[Any]:
    """Train with a NaN in one bucket at a step that is skipped; return what all that ends with."""
    net = TwoKinds()
    net.forward = lambda: (net.wide.sum(), net.narrow.sum())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model: torch.nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    strategy = ddp(gradient_reducer=STATEFUL[name])
    with attach(model, optimizer, strategy) as run:
        for step in [0, 1, 1, 2] if bad_step is not None else [0, 1, 2]:
            bad = bad_step == step
            if bad:
                bad_step, before = None, flat(run.state_dict()["gradients"])
            optimizer.zero_grad()
            try:
                model()
                backward(model, net, step, bad)
            except NotFinite as error:
                refused = error.ranks
            if bad:
                assert refused == (1,)
                assert flat(run.state_dict()["gradients"]) == before
            else:
                optimizer.step()
        return [net.wide.tolist(), net.narrow.tolist(), flat(run.state_dict()["gradients"])]


@pytest.mark.parametrize("kind", ["plain", "ddp"])
@pytest.mark.parametrize("name", [name for name in STATEFUL if name != "replica feedback"])
def test_a_refused_nan_leaves_what_is_remembered(pool: RankPool, name: str, kind: str) -> None:
    """Where another bucket went through too; going on is as if there had been no such step."""
    without = pool.run(2, refuse_nan, name, kind, None)
    assert pool.run(2, refuse_nan, name, kind, 1) == without
    assert without[0][2], "something is remembered"


def test_states_say_how_large_they_are(pool: RankPool) -> None:
    """A float32 for every value, and where there are owners one for every value of their means."""
    assert pool.run(1, sizes_of) == [[0, 0, 0]]
    assert pool.run(2, sizes_of) == [[0, 0, 4000]] * 2
    # Owners have whole blocks of 256 values.
    assert pool.run(4, sizes_of) == [*([[0, 0, 4000 + 1024]] * 3), [0, 0, 4000 + 928]]


def sizes_of() -> list[int]:
    peers = peers_of(Group.make(tuple(range(dist.get_world_size())), 20), timeout=20)
    found = []
    makers: list[Callable[[], Reducer]] = [Mean, Int4, lambda: ErrorFeedback(Int4())]
    for make in makers:
        kept = Kept()
        averager = Averager(peers, reducer=make(), kept=kept)
        for _ in range(2):
            averager.average([("values", torch.ones(1000))])
        found.append(kept.state.nbytes)
    return found
