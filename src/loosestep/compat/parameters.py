"""Averaging parameters once, under the names that PyTorch users know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from loosestep.comm.group import Group, peers_of, require_process_group, world_group
from loosestep.comm.living import living
from loosestep.comm.tensors import unique
from loosestep.errors import check_instance
from loosestep.sync.averager import Averager

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def average_parameters(
    params: Iterator[torch.nn.Parameter], process_group: dist.ProcessGroup | None
) -> None:
    """Average all ``params`` over ``process_group`` (None: the world), in place.

    A rank outside the group returns at once and changes nothing.
    """
    require_process_group()
    given_group: object = process_group
    if given_group is dist.GroupMember.NON_GROUP_MEMBER:  # what torch hands out there
        return
    if process_group is not None:
        check_instance("process_group", process_group, dist.ProcessGroup, "a group or None")
        if dist.get_rank(process_group) < 0:
            return
    given = list(params)
    for parameter in given:
        check_instance("a parameter", parameter, torch.Tensor, "a tensor")
    group = Group.of(world_group()).twin() if process_group is None else process_group
    named = unique((f"parameter {i}", parameter) for i, parameter in enumerate(given))
    Averager(peers_of(group)).average(named)


class NoParameters(NotImplementedError, TypeError):
    """What is no parameter was given as one; torch raises ``NotImplementedError`` here."""


def get_params_to_average(params: Parameters) -> list[torch.nn.Parameter]:
    """Return the parameters that take part: all that require a gradient.

    Whether one *has* a gradient depends on what this rank's last batch happened to use, and
    ranks that disagree about it would average different tensors with each other.
    """
    found: list[torch.nn.Parameter] = []
    for item in params:
        if isinstance(item, dict):
            if "params" not in item:
                raise NoParameters(f"a group of parameters must have 'params', got {list(item)}")
            found += get_params_to_average(item["params"])
        elif isinstance(item, torch.nn.Parameter):
            if item.requires_grad:
                found.append(item)
        else:
            raise NoParameters(
                f"give parameters or an optimizer's param_groups, got {type(item).__name__}"
            )
    return found


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: dist.ProcessGroup | None
) -> None:
    """Average a model's parameters or an optimizer's groups over ``process_group``."""
    average_parameters(iter(get_params_to_average(params)), process_group)


def model_has_buffers(parameters: Iterable[torch.Tensor]) -> bool:
    """Say whether a module that holds some of these has buffers, of its own or of its parts.

    A parameter does not know its module, so this looks at all that there are: once an averager.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = living([torch.nn.Module])
    parts = {id(part) for module in modules for part in module.children()}
    whole = [module for module in modules if id(module) not in parts]
    return any(
        any(id(parameter) in wanted for parameter in module.parameters())
        for module in whole
        if next(module.buffers(), None) is not None
    )
