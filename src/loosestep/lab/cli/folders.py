"""Folders of runs: new ones only, so that nothing is overwritten."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from loosestep.lab.runs import INFO_FILE
from loosestep.lab.trainer.checkpoint import FOLDER
from loosestep.lab.trainer.mistakes import BadInput

RUNS = "runs"
LOGS = "rank-*.jsonl"


def new_folder(asked: str | None, name: str) -> Path:
    """Make the folder of a run: the one that was asked for, or a new one with a date."""
    path = Path(asked) if asked else _dated(name)
    for pattern in (INFO_FILE, LOGS, FOLDER, f"*/{INFO_FILE}", f"*/{LOGS}"):
        if any(path.glob(pattern)):
            raise BadInput(f"{path}: there is a run in it already; give another --out")
    try:
        path.mkdir(parents=True, exist_ok=asked is not None)
    except OSError as error:
        if asked is None and isinstance(error, FileExistsError):
            return new_folder(None, name)  # somebody else was faster
        raise BadInput(f"{path}: cannot be made: {error.strerror}") from error
    return path


def drop_if_empty(folder: Path) -> None:
    """Remove a folder of a run that has written nothing, and what was made around it."""
    if not (folder / INFO_FILE).exists():
        for log in folder.glob(LOGS):
            if log.stat().st_size == 0:
                log.unlink()
    with suppress(OSError):  # there is something in it
        folder.rmdir()
        if folder.parent.name == RUNS:
            folder.parent.rmdir()


def check_file(name: str | None, flag: str) -> None:
    """Raise for a file that will not be writable, before what is written into it is made."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir():
        raise BadInput(f"{flag} {name}: this is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise BadInput(f"{flag} {name}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{flag} {name}: cannot be written; give another file")


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
