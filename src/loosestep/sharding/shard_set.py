"""What this rank owns, as parameters of their own that an ordinary optimizer can step.

A shard is a view of its parameter's memory. Its gradient is its own: backward, which writes to
``param.grad``, never touches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from loosestep.comm.sharded_types import is_dtensor
from loosestep.errors import NotShardable
from loosestep.sharding.ownership import Ownership, is_dense, laid_out_like

NOT_SETTINGS = frozenset({"params", "param_names"})

Parts = dict[torch.Tensor, torch.Tensor]  # parameter -> this rank's part of its gradient
ParamGroup = dict[str, Any]  # a parameter group


class ShardSet:
    """The shards that this rank has of the parameters that ``ownership`` divides."""

    def __init__(self, ownership: Ownership, group_rank: int) -> None:
        self.ownership, self.group_rank = ownership, group_rank
        self.of: dict[torch.Tensor, torch.nn.Parameter] = {}  # only what this rank has a part of
        self._strides: dict[torch.Tensor, tuple[int, ...]] = {}

    def add(self, groups: Iterable[ParamGroup]) -> None:
        """Divide the parameters of these groups, those that are trained first."""
        new = [parameter for group in groups for parameter in group["params"]]
        for trained in (True, False):
            self.ownership.add([p for p in new if p.requires_grad is trained])
        for parameter in new:
            self._strides[parameter] = parameter.stride()
            view = self._view(parameter)
            if view is not None:
                shard = torch.nn.Parameter(view, requires_grad=parameter.requires_grad)
                shard.__dict__.update(parameter.__dict__)  # marks that an optimizer may look for
                self.of[parameter] = shard

    def group(self, group: ParamGroup) -> ParamGroup:
        """Return a parameter group with this rank's shards in the place of its parameters."""
        mine = [index for index, p in enumerate(group["params"]) if p in self.of]
        inner = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        inner["params"] = [self.of[group["params"][index]] for index in mine]
        if "param_names" in group:
            inner["param_names"] = [group["param_names"][index] for index in mine]
        return inner

    def follow(self) -> None:
        """Point the shards to where their parameters are now: users re-point ``param.data``."""
        self._check_strides()
        for parameter, shard in self.of.items():
            start, _ = self.ownership.shares[parameter][self.group_rank]
            at = parameter.data_ptr() + start * parameter.element_size()
            if shard.data_ptr() != at:
                view = self._view(parameter)
                assert view is not None
                shard.data = view
            shard.requires_grad_(parameter.requires_grad)

    def set_gradients(self, parts: Parts) -> None:
        """Give the shards of these parameters their gradients, and all others none."""
        for shard in self.of.values():
            shard.grad = None
        for parameter, part in parts.items():
            self.of[parameter].grad = part

    def _check_strides(self) -> None:
        """Raise where a slice would hold other elements than its state belongs to."""
        for parameter, strides in self._strides.items():
            if parameter.stride() == strides or (self.ownership.whole and is_dense(parameter)):
                continue
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()} "
                f"and had {strides} when the optimizer was made, whose state has the old order in "
                "memory; set the memory format before making it"
            )

    def _view(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self.ownership.view(parameter.detach(), parameter, self.group_rank)


class StateByParameter(dict[torch.Tensor, Any]):
    """An optimizer's state by its shards, where a parameter finds the state of its shard too.

    Reading only, by ``state[parameter]``: tensors that belong to all elements have the
    parameter's shape, those of a slice are flat, and a parameter of others has no state here.
    """

    def __init__(self, states: Mapping[torch.Tensor, Any], shards: ShardSet) -> None:
        super().__init__(states)
        self._shards = shards

    def __missing__(self, key: torch.Tensor) -> Any:
        """Return a parameter's state; begin one for whatever else is asked for."""
        if key not in self._shards.ownership.shares:
            return self.setdefault(key, {})
        shard = self._shards.of.get(key)
        state = self.get(shard, {}) if shard is not None else {}
        return MappingProxyType({name: self._as_seen(value, key) for name, value in state.items()})

    def _as_seen(self, value: Any, parameter: torch.Tensor) -> Any:
        whole = isinstance(value, torch.Tensor) and value.shape == (parameter.numel(),)
        return laid_out_like(parameter, value) if whole else value


def copy_settings(source: Sequence[ParamGroup], target: Sequence[ParamGroup]) -> None:
    """Give every group the settings of the one at its place: learning rate and the like."""
    for given, taken in zip(source, target, strict=True):
        for key, value in given.items():
            if key not in NOT_SETTINGS:
                taken[key] = value


def names_of(groups: Iterable[ParamGroup]) -> dict[torch.Tensor, str]:
    """Return every parameter's name; its number where it was given none."""
    names: dict[torch.Tensor, str] = {}
    for group in groups:
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            names[parameter] = given[index] if given else f"{len(names)}"
    return names


def check_parameters(groups: Iterable[ParamGroup]) -> None:
    """Raise for parameters that cannot be divided."""
    for parameter, name in names_of(groups).items():
        _check_parameter(f"parameter {name!r}", parameter)


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if is_dtensor(parameter):
        raise NotShardable(
            f"{name} is a DTensor, which is sharded already; use the optimizer itself with FSDP2"
        )
    if parameter.layout != torch.strided:
        raise NotShardable(f"{name} is {parameter.layout}; only dense parameters can be sharded")
    if parameter.is_meta:
        raise NotShardable(f"{name} is on the meta device; materialise the model first")
    if not is_dense(parameter):
        raise NotShardable(
            f"{name} has gaps or repeats in memory (shape {tuple(parameter.shape)}, strides "
            f"{parameter.stride()}); make it with .contiguous()"
        )


def check_devices(groups: Iterable[ParamGroup], process_group: dist.ProcessGroup) -> None:
    """Raise unless the process group can move what is on the parameters' devices."""
    can = {device.type for device in process_group._device_types}
    have = {parameter.device.type for group in groups for parameter in group["params"]}
    if dist.get_world_size(process_group) > 1 and not have <= can:
        raise ValueError(
            f"the process group moves tensors on {sorted(can)}, but parameters are on "
            f"{sorted(have - can)}; give a group whose backend can, such as "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )


def settings_of(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the settings of the groups as lines, to be compared across ranks."""
    return [
        " ".join(f"{key}={_plain(group[key])}" for key in sorted(group) if key not in NOT_SETTINGS)
        for group in groups
    ]


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value
