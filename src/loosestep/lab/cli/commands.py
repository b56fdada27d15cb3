"""The commands, each in two parts: what was asked for, and doing it.

The first part needs no torch, so that a mistake is answered at once; the second is imported only
when there is none.
"""

from __future__ import annotations

import argparse
import math

from loosestep.lab.cli.comparison import comparison
from loosestep.lab.cli.folders import check_file
from loosestep.lab.cli.given import settings_of
from loosestep.lab.trainer.contenders import check_spec
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.ranks import rank_from


def train(found: argparse.Namespace) -> int:
    """Train as the command line says."""
    settings, rank = settings_of(found), rank_from()
    if rank is not None and settings.workers is not None:
        raise BadInput("--workers starts workers, but this is one already (RANK or SLURM_PROCID)")
    if rank is not None and settings.out is None:
        raise BadInput("workers started by torchrun or SLURM need --out DIR, the same for all")
    check_spec(settings.spec)
    import loosestep.lab.cli.train_command

    return loosestep.lab.cli.train_command.train(settings, rank)


def compare(found: argparse.Namespace) -> int:
    """Train under several strategies, then show what came of it."""
    asked = comparison(found)
    import loosestep.lab.cli.compare

    return loosestep.lab.cli.compare.compare(asked)


def report(found: argparse.Namespace) -> int:
    """Write a report."""
    import loosestep.lab.cli.report

    return loosestep.lab.cli.report.report(found)


def doctor(found: argparse.Namespace) -> int:
    """Look, measure and recommend."""
    for name in ("workers", "parameters", "step_seconds", "timeout"):
        value = getattr(found, name)
        if not 0 < value < math.inf:  # NaN is neither
            flag = "--" + name.replace("_", "-")
            raise BadInput(f"{flag} must be more than 0 and finite, got {value}")
    check_file(found.json, "--json")
    import loosestep.lab.cli.doctor

    return loosestep.lab.cli.doctor.doctor(found)
