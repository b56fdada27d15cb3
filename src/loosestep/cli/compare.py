"""``loosestep compare``: the same model, data, seed and steps under several strategies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table

from loosestep.cli.folders import check_file, drop_if_empty, new_folder, safe
from loosestep.cli.given import command_line, settings_of
from loosestep.cli.train import check_run, say_error
from loosestep.lab import CannotEmulate, EmulatedHosts, Link, missing
from loosestep.report import words, write_report
from loosestep.report.facts import Facts, facts_of
from loosestep.report.verdict import target_loss
from loosestep.runs import log_file, read_run
from loosestep.trainer import contenders
from loosestep.trainer.display import Tail, loss_text, steps_of
from loosestep.trainer.launch import Outcome, Place, ThisMachine, run_here
from loosestep.trainer.mistakes import BadInput
from loosestep.trainer.orders import Orders
from loosestep.trainer.settings import Settings, changed
from loosestep.trainer.specs import Spec, parse_spec

DEFAULT_HOSTS = 2


@dataclass(frozen=True)
class Hosts:
    """Where all contenders run."""

    place: Place
    num_hosts: int
    workers_per_host: int
    link: dict[str, Any] | None  # None: no link is emulated

    @property
    def num_workers(self) -> int:
        """All workers together."""
        return self.num_hosts * self.workers_per_host


def compare(found: argparse.Namespace) -> int:
    """Train under one strategy after the other, then show what came of it."""
    specs = [parse_spec(text) for text in found.strategies] or contenders.defaults()
    for spec in specs:
        contenders.check_spec(spec)
    _check_names(specs)
    check_file(found.json, "--json")
    check_file(found.report, "--report")
    settings, console = settings_of(found), Console(highlight=False, markup=False)
    with hosts(found, settings, console) as where:
        check_run(settings, where.num_workers, where.num_hosts)
        folder = new_folder(found.out, "compare")
        try:
            outcome, done = _run_all(specs, settings, folder, where, console)
        finally:
            drop_if_empty(folder)
    if done:  # also where a later one has failed
        _show(done, found, console)
    if outcome.code:
        say_error(outcome.message or "stopped")
    return outcome.code


@contextmanager
def hosts(found: argparse.Namespace, settings: Settings, console: Console) -> Iterator[Hosts]:
    """Hold the hosts: emulated ones if a link is asked for, or this machine as it is."""
    num_hosts, each = settings.hosts or DEFAULT_HOSTS, found.workers_per_host
    if num_hosts < 1 or each < 1:
        raise BadInput(
            f"--hosts and --workers-per-host must be at least 1, got {num_hosts}, {each}"
        )
    link = None if found.link is None else _link(found.link)
    if link is not None and missing():
        if not found.or_loopback:
            raise BadInput(
                f"{missing()}; --or-loopback compares on the plain loopback instead, where nothing "
                "is slow"
            )
        console.print(f"no emulated link: {missing()}. On the plain loopback instead:")
        link = None
    if link is None:
        yield Hosts(ThisMachine(), num_hosts, each, None)
        return
    said = {"rate": found.link, "hosts": num_hosts, "workers_per_host": each}
    try:
        with EmulatedHosts(num_hosts, link) as emulated:
            yield Hosts(emulated, num_hosts, each, said)
    except CannotEmulate as error:
        raise BadInput(str(error)) from error


def _link(rate: str) -> Link:
    try:
        return Link(rate)
    except (ValueError, TypeError) as error:
        raise BadInput(f"--link: {error}") from error


def _run_all(
    specs: Sequence[Spec], settings: Settings, folder: Path, where: Hosts, console: Console
) -> tuple[Outcome, list[Path]]:
    """Run all contenders; return how the last one ended, and the runs that are finished."""
    kind = f"uplinks of {where.link['rate']}" if where.link else "the loopback between them"
    console.print(f"{where.num_hosts} hosts, {where.workers_per_host} workers each, {kind}")
    done: list[Path] = []
    with Progress(*_columns(), console=console) as bars:
        for number, spec in enumerate(specs, start=1):
            own = folder / f"{number:02d}-{safe(str(spec))}"
            outcome = _run_one(_orders(settings, spec, own, where), where, bars)
            for text in outcome.warnings:
                say_error(f"warning: {spec}: {text}")
            if outcome.code:
                said = f"{spec}: {outcome.message}" if outcome.message else ""
                return Outcome(outcome.code, said), done
            done.append(own)
    return Outcome(0), done


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}", markup=False),
        TimeElapsedColumn(),
    )


def _orders(settings: Settings, spec: Spec, own: Path, where: Hosts) -> Orders:
    plain = changed(settings, strategy=str(spec), hosts=where.num_hosts, out=str(own))
    return Orders(
        settings=plain, folder=own, name=str(spec), command=command_line(), link=where.link
    )


def _run_one(orders: Orders, where: Hosts, bars: Progress) -> Outcome:
    orders.folder.mkdir()
    task = bars.add_task(orders.name, total=None, loss="")
    tail = Tail(log_file(orders.folder, 0))

    def watch() -> None:
        for record in tail.records():
            if record["event"] == "step":
                loss, total = f"loss {loss_text(record['loss'])}", steps_of(orders.folder)
                bars.update(task, completed=record["step"], total=total, loss=loss)

    try:
        return run_here(orders, where.num_hosts, where.num_workers, where.place, watch)
    finally:
        tail.close()
        drop_if_empty(orders.folder)


def _check_names(specs: Sequence[Spec]) -> None:
    names = [str(spec) for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice!r} is given twice; give each contender once")


def _show(done: list[Path], found: argparse.Namespace, console: Console) -> None:
    facts = facts_of([read_run(run) for run in done])
    finished = [run for run in facts if run.final_loss is not None]
    target = found.target
    if target is None and finished:
        target = target_loss(finished)
    console.print(table(facts, target))
    if found.json:
        _write_json(Path(found.json), facts, target)
    output = Path(found.report) if found.report else done[0].parent / "report.html"
    write_report(done, output, target=found.target)
    console.print(f"report: {output}", soft_wrap=True)


def rows(facts: Sequence[Facts], target: float | None) -> list[dict[str, Any]]:
    """Return the table as plain data."""
    return [
        {
            "strategy": run.label,
            "seconds": run.seconds,
            "seconds_per_step": run.seconds_per_step,
            "steps": run.steps,
            "seconds_to_target": run.seconds_to(target),
            "target_loss": target,
            "final_loss": run.final_loss,
            "bytes_sent_per_worker": run.bytes_sent,
            "bytes_that_left_a_host": run.uplink if run.info.link else None,
            "share_of_time_waiting": run.waited,
        }
        for run in facts
    ]


def table(facts: Sequence[Facts], target: float | None) -> Table:
    """Return the table as it is shown."""
    at = "" if target is None else f" {words.loss(target)}"
    linked = all(run.info.link for run in facts)
    moved = "bytes that left a host" if linked else "bytes sent by a worker"
    columns = ("strategy", "time", f"to loss{at}", "final loss", moved, "waiting", "a step")
    result = Table(*(Column(name, overflow="fold") for name in columns))
    for run in facts:
        result.add_row(
            run.label,
            words.seconds(run.seconds),
            words.seconds(run.seconds_to(target)),
            words.loss(run.final_loss),
            words.size(run.uplink if linked else run.bytes_sent),
            words.share(run.waited),
            words.seconds(run.seconds_per_step),
        )
    return result


def _write_json(path: Path, facts: Sequence[Facts], target: float | None) -> None:
    try:
        path.write_text(json.dumps(rows(facts, target), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
