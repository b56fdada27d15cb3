"""One buffer through a reducer, as an engine drives it."""

from __future__ import annotations

from typing import Any

import torch

from loosestep.comm.peers import Peers
from loosestep.comm.reducers import Handle, Place, Reducer


def reduce_(
    reducer: Reducer,
    buffer: torch.Tensor,
    peers: Peers,
    slot: str = "slot",
    state: Any = None,
) -> Handle:
    """Replace a buffer by its mean, and commit; without a state, by one that begins now."""
    begun = reducer.init([], peers) if state is None else state
    handle = reducer.start(buffer, peers, begun, Place(slot))
    handle.advance()
    handle.wait()
    handle.commit()
    return handle
