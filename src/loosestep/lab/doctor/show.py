"""Findings, links and advice as tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loosestep.lab.doctor.advice import Cost, Recommendation
from loosestep.lab.doctor.findings import Finding, Level
from loosestep.lab.doctor.links import Links, Pair
from loosestep.lab.doctor.symptoms import inspect_links
from loosestep.lab.doctor.units import rate, seconds, share, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MARKS = {
    Level.OK: "[green]ok[/]",
    Level.NOTE: "[yellow]note[/]",
    Level.PROBLEM: "[bold red]problem[/]",
}


def show(
    machine: Sequence[Finding],
    links: Links | None = None,
    recommendation: Recommendation | None = None,
    recipes: Sequence[Cost] = (),
    *,
    console: Console | None = None,
) -> None:
    """Print what was found; needs ``rich``."""
    from rich.console import Console

    console = Console() if console is None else console
    console.print(_findings("This machine", machine))
    if links is not None and links.num_ranks > 1:
        console.print(_findings("Links", inspect_links(links)))
        ranks = sorted(rank for pair in links.pairs for rank in (pair.first, pair.second))
        took = _matrix(
            "Round trip",
            links,
            sorted(set(ranks)),
            lambda pair, _: seconds(pair.round_trip_seconds),
        )
        console.print(took)
        console.print(_matrix("Rate, from row to column", links, sorted(set(ranks)), _rate))
        console.print(_rates(links))
    if recipes:
        console.print(_costs("What every recipe would cost here, after its warm-up", recipes))
    if recommendation is not None:
        _print_advice(console, recommendation)


def _findings(title: str, findings: Sequence[Finding]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    for finding in findings:
        text = escape(finding.value)
        text += f"\n[italic]{escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(MARKS[finding.level], escape(finding.name), text)
    return table


def _matrix(
    title: str, links: Links, ranks: Sequence[int], cell: Callable[[Pair, int], str]
) -> Table:
    """Return a table of all ranks by all ranks; pairs that were left out are empty."""
    from rich.table import Table

    by_ranks = {(p.first, p.second): p for p in links.pairs}
    by_ranks |= {(p.second, p.first): p for p in links.pairs}
    sample = " (a sample of the pairs)" if links.is_sample else ""
    table = Table("", *(f"{rank}" for rank in ranks), title=title + sample, title_justify="left")
    for row in ranks:
        pairs = [by_ranks.get((row, column)) for column in ranks]
        table.add_row(f"{row}", *("" if pair is None else cell(pair, row) for pair in pairs))
    return table


def _rate(pair: Pair, row: int) -> str:
    forth = row == pair.first
    return rate(pair.forth_bytes_per_second if forth else pair.back_bytes_per_second)


def _rates(links: Links) -> Table:
    from rich.table import Table

    columns = ("level", "ranks", "method", "buffer", "time", "buffers at")
    table = Table(*columns, title="Reductions", title_justify="left")
    for each in links.rates:
        ranks = f"{each.ranks[0]}-{each.ranks[-1]} ({len(each.ranks)})"
        speed, took = rate(each.bytes_per_second), seconds(each.seconds)
        table.add_row(each.level, ranks, each.method, size(each.num_bytes), took, speed)
    return table


def _print_advice(console: Console, advice: Recommendation) -> None:
    from rich.markup import escape

    console.print(_costs("What to use", advice.costs))
    for reason in advice.reasons:
        console.print(f"- {escape(reason)}", highlight=False)
    console.print(f"\n    [bold]{escape(advice.command)}[/]", soft_wrap=True, highlight=False)


def _costs(title: str, costs: Sequence[Cost]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    columns = ("strategy", "leaves a host, a step", "waits, a step", "share of the time")
    table = Table(*columns, title=title, title_justify="left")
    for cost in costs:
        waited = (seconds(cost.seconds_waited), share(cost.share_waited))
        table.add_row(escape(cost.strategy), size(cost.bytes_per_host), *waited)
    return table
