"""Whose replica a saved state belongs to: in mid-period every rank has parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from loosestep.comm.peers import Peers, Phase
from loosestep.errors import RankMismatch


def owner() -> dict[str, Any]:
    """Return what a state says about the rank that it is taken on."""
    return {"rank": dist.get_rank(), "num_ranks": dist.get_world_size()}


def is_own(state_dict: Mapping[str, Any]) -> bool:
    """Say whether a state was taken on this rank, or does not say."""
    return all(state_dict.get(key, value) == value for key, value in owner().items())


def check_whose(
    state_dict: Mapping[str, Any], local_steps: int, peers: Peers, otherwise: str
) -> None:
    """Raise on all ranks where one of them loads what belongs to another rank's replica.

    ``local_steps`` were taken since the last average when the state was taken, and ``otherwise`` is
    what can be saved in place of one file a rank.
    """
    mine = owner()
    whose = {key: state_dict.get(key, value) for key, value in mine.items()}
    talking = peers.during(Phase("loading a checkpoint"))
    told = talking.exchange_fixed(bytes([local_steps > 0 and not is_own(state_dict)]))
    strangers = [r for r, is_one in zip(peers.global_ranks, told, strict=True) if any(is_one)]
    if strangers:
        raise RankMismatch(
            f"rank {mine['rank']}: this state was taken on rank {whose['rank']} of "
            f"{whose['num_ranks']}, {local_steps} local steps after the last average, when every "
            f"rank had parameters of its own, and ranks {strangers} of {mine['num_ranks']} load "
            f"another rank's; save one file a rank, {otherwise}"
        )
