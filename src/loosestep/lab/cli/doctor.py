"""``loosestep doctor``: what is here, how fast the links are, and what to do with them.

Links are measured between the workers that it is started on: by torchrun or SLURM on several
machines, or a few that it starts on this one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from loosestep.lab.doctor import (
    Cost,
    Finding,
    Links,
    cost_of_recipes,
    inspect_machine,
    measure_links,
    recommend,
    show,
)
from loosestep.lab.runs import write_whole
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.ranks import rank_from
from loosestep.lab.trainer.worker import join
from loosestep.testing import RanksFailed, run_ranks

MOST_SECONDS = 300.0  # for all of it


def doctor(found: argparse.Namespace) -> int:
    """Look, measure and recommend."""
    rank = rank_from()
    if rank is None:
        _tell(found, inspect_machine(), _links_here(found))
        return 0
    join(rank, found.timeout)
    try:
        tell = _say if rank.rank == 0 else (lambda text: None)
        links = measure_links(timeout=found.timeout, tell=tell)
        if rank.rank == 0:
            _tell(found, inspect_machine(), links)
    finally:
        dist.destroy_process_group()
    return 0


def _say(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)


def _links_here(found: argparse.Namespace) -> Links | None:
    if found.workers == 1:
        return None
    with Console(stderr=True).status(f"measuring between {found.workers} workers"):
        try:
            return run_ranks(
                found.workers, measure, found.timeout, timeout=MOST_SECONDS, group_timeout=60.0
            )[0]
        except RanksFailed as error:
            last = str(error).strip().splitlines()[-1]
            raise BadInput(f"the links could not be measured: {last}") from error


def measure(timeout: float) -> Links:
    """Measure on one of the workers that were started here."""
    return measure_links(timeout=timeout)


def _tell(found: argparse.Namespace, machine: Sequence[Finding], links: Links | None) -> None:
    advice = None
    recipes: tuple[Cost, ...] = ()
    if links is not None:
        asked = (links, found.parameters, found.step_seconds)
        advice, recipes = recommend(machine, *asked), cost_of_recipes(*asked)
    show(machine, links, advice, recipes, console=Console(highlight=False))
    if found.json:
        content = {
            "machine": [asdict(finding) for finding in machine],
            "links": None if links is None else asdict(links),
            "recommendation": None if advice is None else asdict(advice),
            "recipes": [asdict(cost) for cost in recipes],
        }
        try:
            write_whole(Path(found.json), json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise BadInput(f"{found.json}: cannot be written: {error.strerror}") from error
