"""Infinities and NaN, for which codecs have no bytes: every rank hears of every rank's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import loosestep.comm.codecs.in_c as codec_c
import loosestep.comm.codecs.in_torch as codec_torch
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.reducer import NonFinite
from loosestep.errors import NotFinite


def all_finite(values: torch.Tensor) -> bool:
    """Say whether there is neither an infinity nor a NaN, nor what float32 has no room for."""
    narrow = values.to(torch.float32)
    if codec_c.available(narrow):
        return codec_c.all_finite(narrow)
    return bool(codec_torch.all_finite(narrow))


def contributors(peers: Peers, bad: Sequence[int], policy: NonFinite, name: str) -> list[int]:
    """Return the group ranks whose values make the mean, or raise on every rank alike.

    A member whose weight is 0 is not asked for its values.
    """
    weights = peers.weights or (1.0,) * peers.size
    asked = [p for p in range(peers.size) if weights[p] > 0.0]
    good = [p for p in asked if p not in bad]
    if good == asked or (good and policy is NonFinite.SKIP):
        return good
    raise _error(peers, [p for p in asked if p in bad], name)


def _error(peers: Peers, bad: Sequence[int], name: str) -> NotFinite:
    ranks = tuple(peers.global_ranks[p] for p in bad)
    text = (
        f"rank {peers.global_ranks[peers.group_rank]}: only finite values can be compressed, but "
        f"there is an infinity or NaN in {name!r} on rank {', '.join(map(str, ranks))} while "
        f"{peers.phase} on level {peers.level!r} (float64 counts as such beyond 3.4e38). Nothing "
        f"has been changed in {name!r}; skip this step, or leave such ranks out of the mean with "
        "on_nonfinite='skip', as long as one is left"
    )
    return NotFinite(text, ranks=ranks, tensor=name)
