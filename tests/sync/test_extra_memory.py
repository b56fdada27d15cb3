"""How much memory a blocking exact sync needs beyond the model, in processes of its own."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from loosestep import Strategy, attach, average_parameters
from loosestep.schedules import every
from loosestep.testing import run_ranks
from tests.support.memory import MB, extra_bytes
from tests.support.pairs import in_pairs

LIMIT = 64 * MB  # whatever the model's size


def make_model() -> torch.nn.ParameterList:
    """Return 413 MB of parameters: a huge one, many small ones, and two with odd strides."""
    huge = torch.empty(50 * MB)
    small = [torch.empty(1000 + i) for i in range(1000)]
    conv = torch.empty(1024, 1024, 5, 5).contiguous(memory_format=torch.channels_last)
    turned = torch.empty(3072, 8704).t()
    model = torch.nn.ParameterList([huge, *small, conv, turned])
    for parameter in model:
        parameter.detach().fill_(dist.get_rank())
    assert sum(p.nbytes for p in model) > 400 * MB
    return model


def measure(way: str, transport: str) -> dict[str, int]:
    """Return the bytes that each phase needed."""
    os.environ["LOOSESTEP_SHARED_MEMORY"] = "0" if transport == "network" else "1"
    dist.all_reduce(torch.ones(1))
    model = make_model()
    extra: dict[str, int] = {}
    if way == "average_parameters":
        extra["sync"] = extra_bytes(lambda: average_parameters(model.parameters(), None))
    else:
        optimizer = torch.optim.SGD(model.parameters())
        strategy = Strategy(schedule=every(1), initial="ignore")
        extra["attach"] = extra_bytes(lambda: attach(model, optimizer, strategy))
        extra["sync"] = extra_bytes(optimizer.step)
    assert all(bool(p.eq(0.5).all()) for p in model)
    return extra


@pytest.mark.parametrize(
    ("way", "transport"), in_pairs(["average_parameters", "attach"], ["network", "memory"], each=1)
)
def test_a_sync_needs_at_most_64_mb(way: str, transport: str) -> None:
    """Averaging 413 MB takes no more than 64 MB beside the model, in the first sync too."""
    for rank, extra in enumerate(run_ranks(2, measure, way, transport)):
        for phase, size in extra.items():
            print(f"rank {rank}, {way}, {transport}, {phase}: {size / MB:.1f} MB")
            assert size < LIMIT
