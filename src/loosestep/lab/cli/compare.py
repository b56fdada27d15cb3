"""``loosestep compare``: the same model, data, seed and steps under several strategies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from loosestep.lab.cli.comparison import Comparison, Contender
from loosestep.lab.cli.comparison_hosts import Hosts, hosts
from loosestep.lab.cli.folders import drop_if_empty, new_folder, safe
from loosestep.lab.cli.given import command_line
from loosestep.lab.cli.table import table, write_json
from loosestep.lab.cli.train_command import check_run, say_error
from loosestep.lab.report import write_report
from loosestep.lab.report.facts import facts_of
from loosestep.lab.report.verdict import target_loss
from loosestep.lab.runs import log_file, read_run
from loosestep.lab.trainer import contenders
from loosestep.lab.trainer.display import Tail, loss_text, steps_of
from loosestep.lab.trainer.launch import Outcome, run_here
from loosestep.lab.trainer.orders import Orders
from loosestep.lab.trainer.settings import Settings, changed


def compare(asked: Comparison) -> int:
    """Train under one strategy after the other, then show what came of it."""
    for one in asked.contenders:
        contenders.check_spec(one.spec)
    settings, console = asked.settings, Console(highlight=False, markup=False)
    with hosts(asked, console) as where:
        check_run(settings, where.num_workers, where.num_hosts)
        folder = new_folder(settings.out, "compare")
        try:
            outcome, done = _run_all(asked.contenders, settings, folder, where, console)
        finally:
            drop_if_empty(folder)
    if done:  # also where a later one has failed
        _show(done, asked, console)
    if outcome.code:
        say_error(outcome.message or "stopped")
    return outcome.code


def _run_all(
    chosen: Sequence[Contender], settings: Settings, folder: Path, where: Hosts, console: Console
) -> tuple[Outcome, list[Path]]:
    """Run all contenders; return how the last one ended, and the runs that are finished."""
    kind = f"uplinks of {where.link['rate']}" if where.link else "the loopback between them"
    console.print(f"{where.num_hosts} hosts, {where.workers_per_host} workers each, {kind}")
    done: list[Path] = []
    with Progress(*_columns(), console=console) as bars:
        for number, one in enumerate(chosen, start=1):
            own = folder / f"{number:02d}-{safe(one.name)}"
            outcome = _run_one(_orders(settings, one, own, where), where, bars)
            for text in outcome.warnings:
                say_error(f"warning: {one.name}: {text}")
            if outcome.code:
                said = f"{one.name}: {outcome.message}" if outcome.message else ""
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


def _orders(settings: Settings, one: Contender, own: Path, where: Hosts) -> Orders:
    plain = changed(settings, strategy=str(one.spec), hosts=where.num_hosts, out=str(own))
    return Orders(
        settings=plain, folder=own, name=one.name, command=command_line(), link=where.link
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


def _show(done: list[Path], asked: Comparison, console: Console) -> None:
    facts = facts_of([read_run(run) for run in done])
    finished = [run for run in facts if run.final_loss is not None]
    target = asked.target
    if target is None and finished:
        target = target_loss(finished)
    console.print(table(facts, target))
    for run in facts:
        if run.warms_up:
            console.print(f"{run.label}: still in its warm-up, so it was plain data parallelism")
    output = Path(asked.report) if asked.report else done[0].parent / "report.html"
    try:
        write_report(done, output, target=asked.target)
        console.print(f"report: {output}", soft_wrap=True)
    finally:  # one file that cannot be written does not cost the other
        if asked.json:
            write_json(Path(asked.json), facts, target)
