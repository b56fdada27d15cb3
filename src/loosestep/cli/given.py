"""What was given on the command line: settings, and how the command was started."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import Any

from loosestep.trainer.checkpoint import find, read_manifest
from loosestep.trainer.settings import Settings, read_toml, settings_from


def settings_of(found: argparse.Namespace, **changes: Any) -> Settings:
    """Return the settings of a command line: flags first, then the file, then defaults."""
    names = {f.name for f in fields(Settings)}
    flags = {n: v for n, v in vars(found).items() if n in names and v not in (None, [])}
    if "data" in flags:
        flags["data"] = tuple(flags["data"])
    in_file = read_toml(found.config) if found.config else {}
    before = saved_settings(flags.get("resume") or in_file.get("resume"))
    return settings_from({**before, **in_file, **flags, **changes})


def saved_settings(resume: str | None) -> dict[str, Any]:
    """Return the settings of the run that is to be resumed: they need not be given again."""
    if resume is None:
        return {}
    saved = read_manifest(find(resume)).settings
    kept = {name: value for name, value in saved.items() if name not in ("out", "resume")}
    return {**kept, "data": tuple(kept.get("data", ()))}


def command_line() -> list[str]:
    """Return how this was started, to be written down."""
    return ["loosestep", *sys.argv[1:]]
