"""Between hosts: what telemetry counts is what the kernel sent, and a cut cable is an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loosestep import PeerLost, Strategy, attach
from loosestep.reducers import Cast, Mean
from loosestep.schedules import every
from tests.support.netns import TwoHosts, missing, sent

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NUM_SYNCS = 5
TIMEOUT = 1.5
SLACK = 3.0


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Two hosts and a cable between them, for one test."""
    with TwoHosts() as pair:
        yield pair


def make_model(dtypes: list[torch.dtype]) -> torch.nn.ParameterList:
    """Return 5 million elements in tensors of many sizes, the dtypes taking turns."""
    sizes = [3_000_000, 1_000_000, 700_001, *range(1, 300)]
    turns = [dtypes[i % len(dtypes)] for i in range(len(sizes))]
    tensors = [
        torch.full((n,), float(dist.get_rank()), dtype=d) for n, d in zip(sizes, turns, strict=True)
    ]
    return torch.nn.ParameterList(tensors)


def count(reducer: Any, dtypes: list[torch.dtype]) -> dict[str, int]:
    """Average a few times; return what telemetry and the kernel counted, without repetitions."""
    model = make_model(dtypes)
    optimizer = torch.optim.SGD(model.parameters())
    with attach(model, optimizer, Strategy(schedule=every(1), reducer=reducer)) as run:
        dist.barrier()
        before = sent()
        for _ in range(NUM_SYNCS):
            optimizer.step()
        dist.barrier()
        after = sent()
        total = run.metrics()["parameters/world"]
    return {
        "parameters": sum(p.nbytes for p in model),
        "telemetry": total["bytes_sent"],
        "copied": total["bytes_copied"],
        "kernel": after.in_all - before.in_all - (after.again - before.again),
    }


def count_all() -> dict[str, dict[str, int]]:
    wide, narrow = torch.float32, torch.bfloat16
    return {
        "float32": count(Mean(), [wide]),
        "mixed": count(Mean(), [wide, narrow, torch.float64]),
        "cast": count(Cast(narrow), [wide]),
    }


def test_telemetry_counts_what_the_kernel_sends(hosts: TwoHosts) -> None:
    """Bytes in telemetry are those on the wire to 2 %, for every dtype and for narrow ones."""
    ranks = [hosts.start(count_all, rank=r, host=r, size=2) for r in (0, 1)]
    for rank in ranks:
        counted = rank.result(timeout=60)
        print(counted)
        for figures in counted.values():
            assert figures["kernel"] == pytest.approx(figures["telemetry"], rel=0.02)
            assert figures["copied"] == 0
        for name in ("float32", "mixed"):
            figures = counted[name]
            # 2 (n - 1) / n of the model for n = 2 hosts is the model.
            assert figures["telemetry"] == NUM_SYNCS * figures["parameters"]
        assert 2 * counted["cast"]["telemetry"] == counted["float32"]["telemetry"]
        assert 2 * counted["cast"]["kernel"] == pytest.approx(
            counted["float32"]["kernel"], rel=0.02
        )


def train_until_cut() -> dict[str, Any]:
    """Average at every step until that fails; say when the first ten are done."""
    model = torch.nn.ParameterList([torch.zeros(100_000) for _ in range(20)])
    optimizer = torch.optim.SGD(model.parameters())
    attach(model, optimizer, Strategy(schedule=every(1)), timeout=TIMEOUT)
    step = 0
    while True:
        began = time.monotonic()
        try:
            optimizer.step()
        except PeerLost as error:
            seconds = time.monotonic() - began
            return {"ranks": error.ranks, "text": str(error), "seconds": seconds}
        step += 1
        if step == 10:
            print("ten steps", flush=True)


@pytest.mark.parametrize("places", [(0, 1), (0, 0, 1)], ids=str)
def test_a_cut_cable_is_an_error(hosts: TwoHosts, places: tuple[int, ...]) -> None:
    """A link that goes down ends training within the time-out, naming a rank beyond it."""
    size = len(places)
    ranks = [hosts.start(train_until_cut, rank=r, host=h, size=size) for r, h in enumerate(places)]
    for rank in ranks:
        rank.wait_for("ten steps")
    hosts.cut()
    for here, rank in enumerate(ranks):
        seen = rank.result(timeout=30)
        print(seen)
        assert seen["seconds"] < TIMEOUT + SLACK
        assert seen["ranks"], seen
        assert all(places[lost] != places[here] for lost in seen["ranks"]), seen
        assert f"rank {here}: lost rank {seen['ranks'][0]} while" in seen["text"]
