"""What was given on the command line: settings, and how the command was started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from loosestep.trainer.checkpoint import find, read_manifest
from loosestep.trainer.mistakes import BadInput
from loosestep.trainer.ranks import rank_from
from loosestep.trainer.settings import Settings, read_toml, settings_from

NAMES = frozenset(f.name for f in fields(Settings))
# Who gives the first of these decides about all of them anew.
STRATEGY = frozenset("strategy period levels wire overlap warmup".split())
ENDS = frozenset("steps tokens seconds".split())


def settings_of(found: argparse.Namespace) -> Settings:
    """Return the settings of a command line: flags first, then the file, then defaults.

    A run that goes on has the settings of the run before, where none are given.
    """
    flags = {n: v for n, v in vars(found).items() if n in NAMES and v not in (None, [])}
    if "data" in flags:
        flags["data"] = tuple(flags["data"])
    in_file = read_toml(found.config) if found.config else {}
    before = saved_settings(flags.get("resume") or in_file.get("resume"))
    return settings_from(over(over(before, in_file), flags))


def over(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put what was given over what was before.

    >>> over({"strategy": "post_local_sgd", "period": 8, "steps": 9}, {"strategy": "ddp"})
    {'steps': 9, 'strategy': 'ddp'}
    """
    dropped = STRATEGY if "strategy" in given else frozenset()
    dropped |= ENDS if ENDS & given.keys() else frozenset()
    return {**{name: value for name, value in before.items() if name not in dropped}, **given}


def saved_settings(resume: str | None) -> dict[str, Any]:
    """Return the settings of the run that is to be resumed: they need not be given again."""
    if resume is None:
        return {}
    folder = find(resume)
    saved = read_manifest(folder).settings
    if unknown := sorted(saved.keys() - NAMES):
        raise BadInput(f"{folder}: made by another version, with a setting {unknown[0]!r}")
    own = {"out", "resume"} if rank_from() is None else {"out", "resume", "workers"}
    kept = {name: value for name, value in saved.items() if name not in own}
    return {**kept, "data": tuple(kept.get("data", ()))}


def command_line() -> list[str]:
    """Return how this was started, to be written down."""
    return ["loosestep", *sys.argv[1:]]
