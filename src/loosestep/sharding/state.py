"""The state of a sharded optimizer: collected on one rank, and cut for another world.

Whole states have torch's format. State tensors that are shaped like the shard belong to its
elements and are put together; everything else (step counts) is the same for all parts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Message, Peers
from loosestep.comm.tensors import short_dtype
from loosestep.sharding.ownership import as_laid_out
from loosestep.sharding.shard_set import NOT_SETTINGS, ParamGroup, ShardSet

State = dict[str, Any]


def consolidate(
    shards: ShardSet,
    parameters: Sequence[torch.Tensor],
    states: Mapping[torch.Tensor, State],
    peers: Peers,
    to: int,
) -> dict[int, State]:
    """Return the whole state by the parameters' numbers, on member ``to`` (elsewhere nothing).

    Every tensor goes straight to its place in the result: nothing else is ever held.
    """
    described = _descriptions(shards, parameters, states, peers)
    whole: dict[int, State] = {}
    for number, parameter in enumerate(parameters):
        owners = [m for m in range(peers.size) if str(number) in described[m]]
        for key in described[owners[0]][str(number)] if owners else ():
            entries = {m: described[m][str(number)][key] for m in owners}
            entry = _Entry(parameter, key, entries, shards)
            mine = states.get(shards.of[parameter], {}) if parameter in shards.of else {}
            value = entry.collect(mine.get(key), peers, to)
            if peers.group_rank == to:
                whole.setdefault(number, {})[key] = value
    return whole


def _descriptions(
    shards: ShardSet,
    parameters: Sequence[torch.Tensor],
    states: Mapping[torch.Tensor, State],
    peers: Peers,
) -> list[dict[str, dict[str, Any]]]:
    """Tell all members what this one has: JSON, and tensors by dtype and shape only."""
    mine = {
        str(number): {key: _describe(key, value) for key, value in states[shard].items()}
        for number, parameter in enumerate(parameters)
        if (shard := shards.of.get(parameter)) is not None and states.get(shard)
    }
    return [json.loads(payload) for payload in peers.exchange(json.dumps(mine).encode())]


def _describe(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"dtype": short_dtype(value.dtype), "shape": list(value.shape)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(
        f"the optimizer's state {key!r} is a {type(value).__name__}; only tensors, numbers, "
        "strings and None can be moved between ranks (nothing is pickled)"
    )


class _Entry:
    """One key of one parameter's state, and who has what of it."""

    def __init__(
        self,
        parameter: torch.Tensor,
        key: str,
        entries: dict[int, dict[str, Any]],
        shards: ShardSet,
    ) -> None:
        self._parameter, self._key, self._entries = parameter, key, entries
        self._ownership = shards.ownership

    def collect(self, mine: Any, peers: Peers, to: int) -> Any:
        """Send what is mine to ``to``; there, return the whole."""
        first = next(iter(self._entries))
        entry = self._entries[first]
        if "value" in entry:
            return entry["value"]
        if not self._elementwise():
            place = self._room(entry, entry["shape"]) if peers.group_rank == to else None
            _move(mine, place, first, to, peers)
            return place
        whole = self._room(entry, self._parameter.shape) if peers.group_rank == to else None
        for member in self._entries:
            place = None if whole is None else self._ownership.part(whole, self._parameter, member)
            _move(mine, place, member, to, peers)
        return whole

    def _room(self, entry: dict[str, Any], shape: Sequence[int]) -> torch.Tensor:
        """Return a place for the whole, with the parameter's strides if it has its shape."""
        dtype = getattr(torch, entry["dtype"])
        if list(shape) == list(self._parameter.shape):
            return torch.empty_like(self._parameter, dtype=dtype, device="cpu")
        return torch.empty(tuple(shape), dtype=dtype)

    def _elementwise(self) -> bool:
        """Say whether every part is one value an element of a sliced parameter."""
        if self._ownership.whole:
            return False
        for member, entry in self._entries.items():
            start, stop = self._ownership.shares[self._parameter][member]
            if entry.get("shape") != [stop - start]:
                return False
        return True


def _move(
    mine: torch.Tensor | None, place: torch.Tensor | None, source: int, to: int, peers: Peers
) -> None:
    """Bring a tensor from one member to a place on another, or nowhere on all others."""
    tag = peers.next_tags(1) if peers.size > 1 else 0  # on all members, or they count differently
    if peers.group_rank == source == to:
        assert mine is not None
        assert place is not None
        place.copy_(mine)
        return
    if peers.group_rank == source and mine is not None and mine.numel():
        sent = mine.detach().to(_message_device(peers)).contiguous().view(-1).view(torch.uint8)
        for transfer in peers.post([Message(sent, to, outgoing=True)], tag):
            transfer.wait()
    elif peers.group_rank == to and place is not None and place.numel():
        came = STAGING.take(place.numel(), place.dtype, _message_device(peers))
        for transfer in peers.post([Message(came.view(torch.uint8), source, outgoing=False)], tag):
            transfer.wait()
        place.copy_(came.view(place.shape))
        STAGING.give(came)


def _message_device(peers: Peers) -> torch.device:
    """Return the device that both ends of a message use: the CPU, if the group can."""
    return peers.device_for(torch.device("cpu"))


def numbered_groups(
    groups: Sequence[ParamGroup], parameters: Sequence[torch.Tensor]
) -> list[ParamGroup]:
    """Return the groups with the parameters' numbers, as in a torch state dict."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return [
        {**group, "params": [numbers[parameter] for parameter in group["params"]]}
        for group in groups
    ]


def check_groups(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]) -> None:
    """Raise unless a saved state belongs to groups of these sizes."""
    have, given = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if have != given:
        raise ValueError(
            f"the saved state has parameter groups of {given} parameters, this optimizer of "
            f"{have}; build the same model and groups first"
        )


def cut_state(
    saved: Mapping[str, Any],
    shards: ShardSet,
    groups: Sequence[ParamGroup],
    inner: Sequence[ParamGroup],
) -> dict[str, Any]:
    """Return this rank's part of a whole state, numbered as the ``inner`` groups are."""
    numbers = {shard: i for i, shard in enumerate(s for group in inner for s in group["params"])}
    states: dict[int, State] = {}
    cut_groups: list[ParamGroup] = []
    for group, given in zip(groups, saved["param_groups"], strict=True):
        mine = []
        for parameter, key in zip(group["params"], given["params"], strict=True):
            if parameter in shards.of:
                mine.append(numbers[shards.of[parameter]])
                if key in saved["state"]:
                    states[mine[-1]] = _cut(saved["state"][key], parameter, shards)
        settings = {k: v for k, v in given.items() if k not in NOT_SETTINGS}
        cut_groups.append(copy.deepcopy(settings) | {"params": mine})
    return {"state": states, "param_groups": cut_groups}


def _cut(state: State, parameter: torch.Tensor, shards: ShardSet) -> State:
    """Return copies, so that neither the caller's tensors nor their memory are kept."""
    cut: State = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            cut[key] = copy.deepcopy(value)
        elif shards.ownership.whole or value.ndim == 0 or value.shape != parameter.shape:
            cut[key] = value.detach().clone()
        else:
            laid_out = as_laid_out(value.detach(), parameter.detach())
            cut[key] = shards.ownership.part(laid_out, parameter, shards.group_rank).clone()
    return cut


def keep_dtypes(inner: torch.optim.Optimizer, cut: Mapping[int, State]) -> None:
    """Undo the cast to the parameter's dtype that loading does in torch: states keep their own."""
    loaded = [shard for group in inner.param_groups for shard in group["params"]]
    for number, state in cut.items():
        for key, value in state.items():
            now = inner.state[loaded[number]].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and key != "step":
                inner.state[loaded[number]][key] = value.to(now.device)
