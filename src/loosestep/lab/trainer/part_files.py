"""The parts of a checkpoint: what each worker had, in a file that is checked when it is read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from loosestep.lab.trainer.checkpoint import Manifest
from loosestep.lab.trainer.mistakes import BadInput


def write_part(folder: Path, rank: int, state: dict[str, Any]) -> str:
    """Write one worker's state and return its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.pt"
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _hash(path)


def read_part(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Return one worker's state; raise where the file is not what was written."""
    path = folder / f"rank-{rank}.pt"
    try:
        whole = _hash(path) == manifest.files[path.name]
    except (OSError, KeyError):
        raise BadInput(f"{path}: missing; the checkpoint is not whole") from None
    if not whole:
        raise BadInput(f"{path}: corrupted: its content is not what was written; take an older one")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def mean_state(states: list[Any]) -> Any:
    """Return the mean of several workers' states; what is no float tensor is the first one's."""
    first = states[0]
    if isinstance(first, torch.Tensor):
        if not first.is_floating_point():
            return first
        wide = torch.stack([state.double() for state in states]).mean(0)
        return wide.to(first.dtype)
    if isinstance(first, dict):
        return {key: mean_state([state[key] for state in states]) for key in first}
    if isinstance(first, list):
        return [mean_state(list(items)) for items in zip(*states, strict=True)]
    return first


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
