"""One self-contained HTML file about one or more runs: verdict, table, charts, timeline, settings.

The file needs no network, no server and no library to be read. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loosestep.lab.report.page import make_report
from loosestep.lab.runs import read_run, write_whole

__all__ = ["make_report", "write_report"]


def write_report(
    folders: Sequence[str | Path], output: str | Path, *, target: float | None = None
) -> None:
    """Write the report on the runs in ``folders``; a file that is there already is replaced.

    A link is followed, and a pipe or a device written into. ``target`` is the validation loss to
    reach, by default the best final one plus 1 %. Raises ``NotARun`` for a folder without a run and
    ``ValueError`` for an output that cannot be, each before anything is written.
    """
    output = Path(output)
    _check(folders, output)
    write_whole(output, make_report([read_run(folder) for folder in folders], target=target))


def _check(folders: Sequence[str | Path], output: Path) -> None:
    if isinstance(folders, (str, Path)):
        raise TypeError(f"folders must be a list of folders, not {folders!r}; give [{folders!r}]")
    if not folders:
        raise ValueError("a report needs at least one run; give the folder of one")
    seen: set[Path] = set()
    for folder in (Path(folder).resolve() for folder in folders):
        if folder in seen:
            raise ValueError(f"{folder}: given twice; give each run once")
        seen.add(folder)
    if output.is_dir():
        raise ValueError(f"{output}: is a folder; give the name of a file in it")
    if not output.parent.is_dir():
        raise ValueError(f"{output}: there is no folder {output.parent}; make it first")
