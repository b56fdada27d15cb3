"""A sharded optimizer's state for ``torch.distributed.checkpoint``: every rank writes its own.

A slice is saved as a chunk of the flat parameter, so that any other world size can read the
chunks that it needs.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from loosestep.sharding.shard_set import NOT_SETTINGS, ParamGroup, ShardSet, copy_settings
from loosestep.sharding.state import State


class FlatShard(torch.Tensor):
    """A piece of a flat tensor, as a checkpoint sees it; ``local`` is the piece."""

    local: torch.Tensor
    offset: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, offset: int, numel: int) -> FlatShard:
        """Look like the whole tensor, without its memory."""
        shard = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=local.dtype, device=local.device
        )
        shard.local, shard.offset = local, offset
        return shard

    def __init__(self, local: torch.Tensor, offset: int, numel: int) -> None:
        """Keep what ``__new__`` has set."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to be computed with: most of it is not here."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"a FlatShard can only be saved and loaded, not used in {func}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say which piece it is."""
        return f"FlatShard({self.offset}:{self.offset + self.local.numel()} of {self.numel()})"

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.offset]), torch.Size([self.local.numel()]))

    def __create_write_items__(self, fqn: str, tensor: object) -> list[WriteItem]:
        """Return the one thing to write."""
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(self._chunk(), properties, torch.Size([self.numel()]))
        index = MetadataIndex(fqn, torch.Size([self.offset]))
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the one chunk to read."""
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return where to read it to."""
        return self.local


class ShardedState:
    """A sharded optimizer as something that a distributed checkpoint saves and loads.

    Parameters are known by their names (``model.named_parameters()`` gives the optimizer names),
    else by their numbers. Save after the first step: before it there is no state to know.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        shards: ShardSet,
        names: dict[torch.Tensor, str],
        loaded: Callable[[], None],
    ) -> None:
        self._inner, self._shards, self._names, self._loaded = inner, shards, names, loaded

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part; where there is no state yet, room for one."""
        states: Mapping[torch.Tensor, State] = self._inner.state
        if not any(states.values()):
            states = self._room()
        named = {
            self._names[parameter]: {
                key: self._chunk_of(parameter, value) for key, value in states[shard].items()
            }
            for parameter, shard in self._shards.of.items()
            if states.get(shard)
        }
        return {"state": named, "groups": self._settings(), "strides": self._strides()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was read; parameters that the checkpoint has no state of keep none."""
        self._check_strides(state_dict["strides"])
        for parameter, shard in self._shards.of.items():
            read = state_dict["state"].get(self._names[parameter], {})
            state = {k: v.local if isinstance(v, FlatShard) else v for k, v in read.items()}
            if _was_read(state):
                self._inner.state[shard] = state
            else:
                self._inner.state.pop(shard, None)
        groups: list[ParamGroup] = [
            {key: tuple(v) if isinstance(v, list) else v for key, v in group.items()}  # betas
            for group in json.loads(state_dict["groups"])
        ]
        copy_settings(groups, self._inner.param_groups)
        self._loaded()

    def _chunk_of(self, parameter: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # a user's class may count in plain numbers
            return value
        start, stop = self._shards.ownership.shares[parameter][self._shards.group_rank]
        if self._shards.ownership.whole or value.shape != (stop - start,):
            return value
        return FlatShard(value, start, parameter.numel())

    def _strides(self) -> str:
        """Return the order in memory, which slices count in, of parameters that are not plain."""
        unusual = {n: p.stride() for p, n in self._names.items() if not p.is_contiguous()}
        return json.dumps(unusual, sort_keys=True)

    def _check_strides(self, saved: str) -> None:
        if saved != self._strides():
            raise ValueError(
                f"the checkpoint was written by a model with memory formats {saved}, this one has "
                f"{self._strides()}, so slices hold other elements; use the same memory format"
            )

    def _settings(self) -> str:
        groups = [_settings_of(group) for group in self._inner.param_groups]
        return json.dumps(groups, default=_number)

    def _room(self) -> Mapping[torch.Tensor, State]:
        """Return a state of the right shapes, full of NaN, by a step of copies."""
        # Not of what is frozen: nobody has saved a state of that.
        shards = [shard for p, shard in self._shards.of.items() if p.requires_grad]
        copies = {shard: torch.nn.Parameter(shard.detach().clone()) for shard in shards}
        for twin in copies.values():
            twin.grad = torch.zeros_like(twin)
        groups = [
            _settings_of(group) | {"params": [copies[s] for s in group["params"] if s in copies]}
            for group in self._inner.param_groups
        ]
        trial = type(self._inner)(groups, **_required(self._inner))
        trial.step()
        return {shard: _emptied(trial.state[twin]) for shard, twin in copies.items()}


def _required(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments that the optimizer's class must be given; the groups have the rest."""
    arguments = inspect.signature(type(optimizer).__init__).parameters.values()
    known = optimizer.defaults
    return {a.name: known[a.name] for a in arguments if a.default is a.empty and a.name in known}


def _settings_of(group: ParamGroup) -> ParamGroup:
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def _emptied(state: State) -> State:
    for value in state.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.fill_(torch.nan)
    return state


def _was_read(state: State) -> bool:
    """Say whether a checkpoint has filled this: it is not all NaN, as the room for it was."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    untouched = all(t.is_floating_point() and bool(t.isnan().all()) for t in tensors)
    return bool(state) and not (tensors and untouched)


def _number(value: object) -> object:
    if isinstance(value, torch.Tensor):  # a learning rate may be one
        return value.tolist()
    raise TypeError(
        f"a parameter group holds a {type(value).__name__}; only numbers, strings, lists and None "
        "can be saved"
    )
