"""FSDP1, whose shards look alike on all ranks, is refused before anything moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from loosestep import NotAttachable, PeriodicModelAverager, attach, ddp, post_local_sgd
from loosestep.testing import RankPool


def sharded(model: torch.nn.Module, *, use_orig_params: bool) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and surprised to be on a CPU
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )


def attached(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, post_local_sgd(2, gradients=None)).detach()


def attached_ddp(model: torch.nn.Module) -> None:
    attach(model, torch.optim.SGD(model.parameters(), lr=0.1), ddp()).detach()


def averager(model: torch.nn.Module) -> None:
    PeriodicModelAverager(2, module=model)


def refusals() -> dict[str, tuple[str, bool]]:
    """Return what each way in says, and whether the shard is what it was."""
    torch.manual_seed(0)
    told = {}
    ways: dict[str, tuple[Callable[[torch.nn.Module], None], bool, str]] = {
        "attach": (attached, False, "whole"),
        "attach, ddp": (attached_ddp, False, "whole"),
        "attach, original parameters": (attached, True, "whole"),
        "attach, a part is sharded": (attached, True, "a part"),
        "attach what is inside": (attached, False, "inside"),
        "attach what is inside, original parameters": (attached, True, "inside"),
        "an averager": (averager, False, "whole"),
    }
    for way, (enter, original, what) in ways.items():
        model = sharded(torch.nn.Linear(8, 4, bias=False), use_orig_params=original)
        given = {
            "whole": model,
            "a part": torch.nn.Sequential(model, torch.nn.Linear(4, 1)),
            "inside": model.module,
        }[what]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            enter(given)  # type: ignore[arg-type]
            said = ""
        except NotAttachable as error:
            said = str(error)
        same = all(map(torch.equal, before, model.parameters()))
        told[way] = (said, same)
    shards = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    both = [torch.empty_like(shards) for _ in range(dist.get_world_size())]
    dist.all_gather(both, shards)
    told["the ranks' shards differ"] = ("fully_shard", not torch.equal(*both))
    return told


def test_fsdp1_is_refused_and_nothing_has_moved(pool: RankPool) -> None:
    """On every rank, by attach and by averagers, and whatever part of a model it is."""
    for told in pool.run(2, refusals):
        for way, (said, same) in told.items():
            assert "fully_shard" in said, way
            assert same, way
