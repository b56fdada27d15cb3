"""Folders of runs: new ones only, so that nothing is overwritten."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from loosestep.runs import INFO_FILE
from loosestep.trainer.mistakes import BadInput

RUNS = "runs"


def new_folder(asked: str | None, name: str) -> Path:
    """Make the folder of a run: the one that was asked for, or a new one with a date."""
    path = Path(asked) if asked else _dated(name)
    if (path / INFO_FILE).exists():
        raise BadInput(f"{path}: there is a run in it already; give another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot be made: {error.strerror}") from error
    return path


def drop_if_empty(folder: Path) -> None:
    """Remove a folder in which nothing was written."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def safe(name: str) -> str:
    """Return a name for a folder.

    >>> safe("hierarchical_sgd:host=4,world=8")
    'hierarchical_sgd-host-4-world-8'
    """
    return re.sub(r"[^A-Za-z0-9_.+%]+", "-", name).strip("-")


def _dated(name: str) -> Path:
    stem = f"{safe(name)}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path(RUNS) / stem, 1
    while path.exists():
        number += 1
        path = Path(RUNS) / f"{stem}-{number}"
    return path
