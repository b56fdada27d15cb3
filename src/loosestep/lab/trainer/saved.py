"""The settings of the run that wrote a checkpoint, and whether another run can go on from it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from loosestep.lab.trainer import checkpoint
from loosestep.lab.trainer.checkpoint import Manifest
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.settings import Settings, flag, read_saved, settings_from


def saved_settings(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint; raise for what no run has."""
    if unknown := sorted(manifest.settings.keys() - {f.name for f in fields(Settings)}):
        raise BadInput(
            f"{folder}: made by another version, with a setting {unknown[0]!r}; go on with that one"
        )
    try:
        settings = read_saved("settings", manifest.settings)
        settings_from(settings)  # refuses numbers that make no run
    except BadInput as error:
        raise checkpoint.broken(folder, str(error)) from error
    return settings


def check_settings(folder: Path, manifest: Manifest, settings: Settings) -> None:
    """Raise unless a checkpoint's model has the settings of this one, which may not show in shapes.

    The same weights with other heads or another context are another function.
    """
    before = settings_from(saved_settings(folder, manifest))
    for name in _of_model(settings):
        there, here = getattr(before, name), getattr(settings, name)
        if there != here:
            raise BadInput(
                f"{folder}: a checkpoint of another model: {flag(name)} is {there} there and "
                f"{here} here; give {flag(name)} {there}, or start anew without --resume"
            )


def _of_model(settings: Settings) -> tuple[str, ...]:
    """Return the settings that make the model and what goes into it."""
    if settings.task == "text":
        return ("task", "width", "depth", "heads", "context")
    sizes = ("image_size",) if settings.data else ()  # the digits have a size of their own
    return ("task", "width", *sizes)
