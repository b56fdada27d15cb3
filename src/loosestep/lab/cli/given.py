"""What was given on the command line: settings, and how the command was started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from loosestep.lab.trainer.checkpoint import find, read_manifest
from loosestep.lab.trainer.ranks import rank_from
from loosestep.lab.trainer.saved import check_settings, saved_settings
from loosestep.lab.trainer.settings import Settings, read_toml, settings_from

NAMES = frozenset(f.name for f in fields(Settings))
# Who gives the first of these decides about all of them anew.
STRATEGY = frozenset("strategy period periods reducer overlap_steps warmup_steps".split())
ENDS = frozenset("steps tokens seconds".split())


def settings_of(found: argparse.Namespace) -> Settings:
    """Return the settings of a command line: flags first, then the file, then defaults.

    A run that goes on has the settings of the run before, where none are given.
    """
    flags = {n: v for n, v in vars(found).items() if n in NAMES and v not in (None, [])}
    if "data" in flags:
        flags["data"] = tuple(flags["data"])
    given = over(read_toml(found.config) if found.config else {}, flags)
    if "resume" not in given:
        return settings_from(given)
    folder = find(given["resume"])
    manifest = read_manifest(folder)
    before = kept(saved_settings(folder, manifest))
    settings = settings_from(over(before, given))
    check_settings(folder, manifest, settings)
    return settings


def over(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put what was given over what was before.

    >>> over({"strategy": "post_local_sgd", "period": 8, "steps": 9}, {"strategy": "ddp"})
    {'steps': 9, 'strategy': 'ddp'}
    """
    dropped = STRATEGY if "strategy" in given else frozenset()
    dropped |= ENDS if ENDS & given.keys() else frozenset()
    return {**{name: value for name, value in before.items() if name not in dropped}, **given}


def kept(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run that is resumed hands on: they need not be given again."""
    own = {"out", "resume"} if rank_from() is None else {"out", "resume", "workers"}
    return {name: value for name, value in saved.items() if name not in own}


def command_line() -> list[str]:
    """Return how this was started, to be written down."""
    return ["loosestep", *sys.argv[1:]]
