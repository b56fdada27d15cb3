"""``loosestep report``: one HTML file of one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from loosestep.lab.report import write_report
from loosestep.lab.runs import INFO_FILE
from loosestep.lab.trainer.mistakes import BadInput


def report(found: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    try:
        write_report([f for run in found.runs for f in runs_in(Path(run))], found.output)
    except ValueError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        place = error.filename or found.output
        raise BadInput(f"{place}: {error.strerror}") from error
    Console(highlight=False, markup=False).print(f"report: {found.output}", soft_wrap=True)
    return 0


def runs_in(folder: Path) -> list[Path]:
    """Return a run's folder, or those of the runs in it."""
    if (folder / INFO_FILE).exists() or not folder.is_dir():
        return [folder]
    return sorted(inner.parent for inner in folder.glob(f"*/{INFO_FILE}")) or [folder]
