"""Checkpoints of a training run: a folder a step, whole or not there at all.

    checkpoints/step-00000200/
        rank-0.pt ...     what each worker had: model, optimizer, strategy, place in the data
        manifest.json     which model and settings, and the SHA-256 of every file and of itself

Replicas differ between averages, so every worker's is kept. They are written to a folder with a
temporary name, synced and renamed; files are checked before anything of them is used. With another
number of workers all start from the mean of the replicas.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import reprlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loosestep.lab.trainer.mistakes import BadInput

if TYPE_CHECKING:
    import torch

FORMAT = 2  # 1 had no hash of the manifest
MANIFEST = "manifest.json"
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    num_workers: int
    model: dict[str, list[int]]  # shapes by name
    strategy: str
    seed: int
    data: dict[str, Any]  # name, bytes, sha256
    samples: int  # of it that all workers have used together
    files: dict[str, str]  # SHA-256 by name
    settings: dict[str, Any]  # of the run that wrote it
    layout: str = ""  # which workers were on which host
    warm_samples: int = 0  # of the samples, those of the warm-up of the learning rate


def partial_folder(run: Path, step: int) -> Path:
    """Return where a checkpoint is written before it is whole."""
    return run / FOLDER / f".step-{step:08d}.partial"


def whole_folder(run: Path, step: int) -> Path:
    """Return where a checkpoint is once it is whole."""
    return run / FOLDER / f"step-{step:08d}"


def complete(run: Path, manifest: Manifest, keep: int) -> Path:
    """Make a checkpoint of which all parts are written visible, and drop the oldest ones."""
    partial = partial_folder(run, manifest.step)
    missing = [name for name in manifest.files if not (partial / name).exists()]
    if missing:
        raise OSError(
            errno.ENOENT, f"{missing[0]} is not there; all workers must share the folder of the run"
        )
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(sealed({"format": FORMAT, **vars(manifest)}), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    whole, aside = whole_folder(run, manifest.step), partial.with_suffix(".old")
    if whole.exists():  # the same step again: one of the two is there at any time
        whole.rename(aside)
    partial.rename(whole)
    shutil.rmtree(aside, ignore_errors=True)
    _sync_folder(whole.parent)
    for old in _steps(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return whole


def discard(run: Path, step: int) -> None:
    """Remove a checkpoint that could not be written to its end."""
    shutil.rmtree(partial_folder(run, step), ignore_errors=True)


def run_of(folder: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return folder.resolve().parent.parent


def has_checkpoint(run: Path) -> bool:
    """Say whether a run can be resumed."""
    return bool(_steps(run))


def find(place: str) -> Path:
    """Return the folder of a checkpoint: the one that is named, or the last one of a run."""
    path = Path(place)
    if (path / MANIFEST).exists():
        return path
    if found := _steps(path):
        return found[-1]
    if not path.exists():
        raise BadInput(f"{place}: no such checkpoint or run")
    raise BadInput(f"{place}: no whole checkpoint in it; was the run made with --save-every?")


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint holds; raise for what is none, or is not what was written."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise broken(folder, str(error)) from error
    if not isinstance(found, dict):
        raise broken(folder, f"it must hold an object, got {reprlib.repr(found)}")
    if (version := found.pop("format", None)) != FORMAT:
        raise BadInput(
            f"{folder}: a checkpoint of format {reprlib.repr(version)}, and this version reads "
            f"{FORMAT}; go on with the version that wrote it, or start anew"
        )
    digest = found.pop("sha256", None)
    if sealed({"format": version, **found})["sha256"] != digest:
        raise BadInput(f"{path}: corrupted: its content is not what was written; take an older one")
    _check_fields(folder, found)
    return Manifest(**found)


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's content with its SHA-256, of which layout and order are no part."""
    content = json.dumps(body, sort_keys=True).encode()
    return {**body, "sha256": hashlib.sha256(content).hexdigest()}


def broken(folder: Path, problem: str) -> BadInput:
    """Return what is said of a manifest that no run has written."""
    return BadInput(f"{folder}: its {MANIFEST} is broken: {problem}; take an older one")


def _check_fields(folder: Path, found: dict[str, Any]) -> None:
    """Raise for what no run writes: who edits a manifest by hand can make its hash anew."""
    for name in sorted(found.keys() ^ RULES.keys()):
        raise broken(folder, f"{name!r} is {'missing' if name in RULES else 'no field of it'}")
    for name, (rule, is_kept) in RULES.items():
        if not is_kept(found[name]):
            raise broken(folder, f"{name!r} must be {rule}, got {reprlib.repr(found[name])}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # True is an int too


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_data(value: Any) -> bool:
    rules = {"name": _is_text, "bytes": _is_count, "sha256": _is_text}
    return isinstance(value, dict) and all(is_(value.get(name)) for name, is_ in rules.items())


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _by_name(is_kept: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_kept, value.values()))


COUNT, TEXT = ("a whole number from 0 on", _is_count), ("a text", _is_text)
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": COUNT,
    "num_workers": ("a whole number from 1 on", lambda value: _is_count(value) and value > 0),
    "model": ("shapes by name", _by_name(_is_shape)),
    "strategy": TEXT,
    "seed": COUNT,
    "data": ("name, bytes and sha256", _is_data),
    "samples": COUNT,
    "files": ("hashes by name", _by_name(_is_text)),
    "settings": ("settings by name", _by_name(lambda _: True)),
    "layout": TEXT,
    "warm_samples": COUNT,
}


def check_model(folder: Path, manifest: Manifest, model: torch.nn.Module) -> None:
    """Raise unless a checkpoint's state has the shapes of this model's."""
    mine = shapes_of(model)
    if mine == manifest.model:
        return
    differing = sorted(
        name for name in {*mine, *manifest.model} if mine.get(name) != manifest.model.get(name)
    )
    name = differing[0]
    raise BadInput(
        f"{folder}: a checkpoint of another model: {name} has shape "
        f"{manifest.model.get(name, 'none')} there and {mine.get(name, 'none')} here "
        f"({len(differing)} differ); give the data and the settings that it was made with"
    )


def shapes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """Return the shapes of a model's state, by name."""
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def _steps(run: Path) -> list[Path]:
    found = (run / FOLDER).glob("step-*") if (run / FOLDER).is_dir() else ()
    return sorted(path for path in found if (path / MANIFEST).exists())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
