"""Averaging parameters once, under the names that PyTorch users know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from loosestep.averaging import Averager
from loosestep.groups import private_twin, require_process_group, world_group
from loosestep.peers import peers_of
from loosestep.tensors import unique

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def average_parameters(
    params: Iterator[torch.nn.Parameter], process_group: dist.ProcessGroup | None
) -> None:
    """Average all ``params`` over ``process_group`` (None: the world), in place.

    A rank outside the group returns at once and changes nothing.
    """
    require_process_group()
    if process_group is not None and dist.get_rank(process_group) < 0:
        return
    group = private_twin(world_group()) if process_group is None else process_group
    named = unique((f"parameter {i}", parameter) for i, parameter in enumerate(params))
    Averager(peers_of(group)).average(named)


def get_params_to_average(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters that take part: all that require a gradient.

    Whether one *has* a gradient depends on what this rank's last batch happened to use, and
    ranks that disagree about it would average different tensors with each other.
    """
    found: list[torch.nn.Parameter] = []
    for item in params:
        if isinstance(item, dict):
            found += get_params_to_average(item["params"])
        elif isinstance(item, torch.nn.Parameter):
            if item.requires_grad:
                found.append(item)
        else:
            raise NotImplementedError(
                f"give parameters or an optimizer's param_groups, got {type(item).__name__}"
            )
    return found


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: dist.ProcessGroup | None
) -> None:
    """Average a model's parameters or an optimizer's groups over ``process_group``."""
    average_parameters(iter(get_params_to_average(params)), process_group)
