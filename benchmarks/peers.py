"""One average of a 37.8M-parameter transformer by accelerate's LocalSGD, in-tree and loosestep.

accelerate is not among the dependencies: ``pip install accelerate`` first.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.utils as in_tree

import loosestep
from benchmarks.contenders import Contender, alternate, parameters, rows, transformer_shapes
from benchmarks.report import Row
from loosestep.comm.group import world_group
from loosestep.testing import run_ranks


def run(rounds: int) -> list[Row]:
    if importlib.util.find_spec("accelerate") is None:
        print("left out: accelerate is not installed (pip install accelerate)")
        return []
    result: list[Row] = []
    for world_size in (2, 4):
        seconds = run_ranks(world_size, measure, rounds, timeout=1200, group_timeout=120)[0]
        result += rows(f"{world_size} ranks, 37.8M", seconds, ["accelerate", "in-tree"])
    return result


def measure(rounds: int) -> dict[str, list[float]]:
    theirs, ours = parameters(transformer_shapes()), parameters(transformer_shapes())
    contenders: dict[str, Contender] = {
        "accelerate": accelerate_average(),
        "in-tree": lambda: in_tree.average_parameters(iter(theirs), world_group()),
        "loosestep": lambda: loosestep.average_parameters(iter(ours), world_group()),
    }
    return alternate(contenders, rounds)


def accelerate_average() -> Contender:
    """Return what accelerate does at every ``local_sgd_steps``-th step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    local_sgd: Any = importlib.import_module("accelerate.local_sgd")
    accelerator: Any = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = torch.nn.Module()
    for index, parameter in enumerate(parameters(transformer_shapes())):
        model.register_parameter(f"p{index}", parameter)
    averaging = local_sgd.LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1)
    assert averaging.enabled, "accelerate must see the other ranks"
    step: Contender = averaging.step
    return step
