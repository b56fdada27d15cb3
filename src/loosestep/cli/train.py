"""``loosestep train``: one run, on workers of this machine or as one worker of several machines."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from loosestep.cli.folders import drop_if_empty, new_folder
from loosestep.cli.given import command_line, settings_of
from loosestep.trainer import contenders
from loosestep.trainer.display import Display, watcher
from loosestep.trainer.launch import ThisMachine, run_here
from loosestep.trainer.mistakes import BadInput
from loosestep.trainer.orders import Orders
from loosestep.trainer.ranks import Rank, rank_from
from loosestep.trainer.settings import Settings
from loosestep.trainer.worker import check_enough, read_task
from loosestep.trainer.worker import run as run_worker

DEFAULT_WORKERS = 2
SECONDS_BETWEEN_LOOKS = 0.25


def train(found: argparse.Namespace) -> int:
    """Train as the command line says."""
    settings = settings_of(found)
    contenders.check_spec(settings.spec)
    rank = rank_from()
    if rank is None:
        check_data(settings, settings.workers or DEFAULT_WORKERS)
    orders = Orders(
        settings=settings,
        folder=_folder(settings, rank),
        name=str(settings.spec),
        command=command_line(),
    )
    console = Console(highlight=False)
    if rank is None:
        return _here(orders, console)
    if settings.workers is not None:
        raise BadInput("--workers starts workers, but this is one already (RANK or SLURM_PROCID)")
    return _as_worker(orders, rank, console)


def check_data(settings: Settings, num_workers: int) -> None:
    """Raise for what cannot be trained on, before any worker is started."""
    check_enough(read_task(settings), num_workers)


def _folder(settings: Settings, rank: Rank | None) -> Path:
    if rank is None or rank.rank == 0:
        return new_folder(settings.out, str(settings.spec))
    if settings.out is None:
        raise BadInput("workers started by torchrun or SLURM need --out DIR, the same for all")
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _here(orders: Orders, console: Console) -> int:
    settings = orders.settings
    workers = settings.workers or DEFAULT_WORKERS
    console.print(f"{workers} workers, {orders.name}, in {orders.folder}", soft_wrap=True)
    with Display(console, orders.name) as display:
        watch = watcher(display, orders.folder)
        outcome = run_here(orders, 1, workers, ThisMachine(), watch)
    return report_end(outcome.code, outcome.message, orders, console)


def report_end(code: int, message: str, orders: Orders, console: Console) -> int:
    """Say how it ended, and what can be done with it."""
    if message:
        drop_if_empty(orders.folder)
        Console(stderr=True, highlight=False).print(f"loosestep: {message}", soft_wrap=True)
    elif code == 0:
        console.print(f"done: loosestep report {orders.folder}", soft_wrap=True)
    else:
        console.print(f"stopped: loosestep train --resume {orders.folder} goes on", soft_wrap=True)
    return code


def _as_worker(orders: Orders, rank: Rank, console: Console) -> int:
    if rank.rank != 0:
        return run_worker(orders, rank)
    with Display(console, orders.name) as display, _watching(watcher(display, orders.folder)):
        return run_worker(orders, rank)


@contextmanager
def _watching(watch: Callable[[], None]) -> Iterator[None]:
    """Look at the records beside training, since this process trains too."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            watch()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        watch()
