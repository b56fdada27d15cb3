"""``loosestep train``: one run, on workers of this machine or as one worker of several machines."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from rich.console import Console

from loosestep.lab.cli.folders import drop_if_empty, new_folder
from loosestep.lab.cli.given import command_line
from loosestep.lab.trainer.checkpoint import find, has_checkpoint, read_manifest
from loosestep.lab.trainer.display import Display, watcher
from loosestep.lab.trainer.launch import Outcome, ThisMachine, run_here
from loosestep.lab.trainer.mistakes import STOPPED, BadInput
from loosestep.lab.trainer.orders import Orders
from loosestep.lab.trainer.ranks import Rank
from loosestep.lab.trainer.saving import check_fits
from loosestep.lab.trainer.settings import Settings
from loosestep.lab.trainer.worker import check_enough, read_task, unit_of
from loosestep.lab.trainer.worker import run as run_worker

DEFAULT_WORKERS = 2
SECONDS_BETWEEN_LOOKS = 0.25


def train(settings: Settings, rank: Rank | None) -> int:
    """Train as the settings say, as this worker or on workers of this machine."""
    if rank is None:
        check_run(settings, settings.workers or DEFAULT_WORKERS, settings.hosts)
    orders = Orders(
        settings=settings,
        folder=new_folder(settings.out, str(settings.spec)),
        name=str(settings.spec),
        command=command_line(),
    )
    console = Console(highlight=False, markup=False)
    return _here(orders, console) if rank is None else _as_worker(orders, rank, console)


def check_run(settings: Settings, num_workers: int, hosts: int | None) -> None:
    """Raise for what cannot be trained, before any worker is started."""
    task = read_task(settings)
    check_enough(task, num_workers)
    if num_workers % (hosts or 1):
        raise BadInput(f"{num_workers} workers cannot be {hosts} equal hosts; change --hosts")
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise BadInput("--tensorboard needs tensorboard: pip install 'loosestep[tensorboard]'")
    if settings.resume is not None:
        folder = find(settings.resume)
        with torch.device("meta"):
            model = task.make_model()
        check_fits(folder, read_manifest(folder), model, task.describe(), settings.seed)


def _here(orders: Orders, console: Console) -> int:
    workers = orders.settings.workers or DEFAULT_WORKERS
    console.print(f"{workers} workers, {orders.name}, in {orders.folder}", soft_wrap=True)
    try:
        with Display(console, orders.name, unit_of(orders.settings)) as display:
            watch = watcher(display, orders.folder)
            outcome = run_here(orders, 1, workers, ThisMachine(), watch)
    finally:
        drop_if_empty(orders.folder)
    return report_end(outcome, orders, console)


def report_end(outcome: Outcome, orders: Orders, console: Console) -> int:
    """Say how it ended, and what can be done with it."""
    for text in outcome.warnings:
        say_error(f"warning: {text}")
    if outcome.message:
        say_error(outcome.message)
    elif outcome.code == 0:
        console.print(f"done: loosestep report {orders.folder}", soft_wrap=True)
    elif has_checkpoint(orders.folder):
        console.print(f"stopped: loosestep train --resume {orders.folder} goes on", soft_wrap=True)
    else:
        console.print("stopped before there was anything to save")
    return outcome.code


def say_error(message: str) -> None:
    """Say what went wrong, on one line."""
    print(f"loosestep: {' '.join(message.split())}", file=sys.stderr)


def _as_worker(orders: Orders, rank: Rank, console: Console) -> int:
    if rank.rank != 0:
        _leave(run_worker(orders, rank))
    display = Display(console, orders.name, unit_of(orders.settings))
    try:
        with display, _watching(watcher(display, orders.folder)):
            code = run_worker(orders, rank)
    finally:
        drop_if_empty(orders.folder)
    if code in (0, STOPPED):
        report_end(Outcome(code), orders, console)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End at once: Gloo's threads may wait for a worker that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
