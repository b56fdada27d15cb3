"""What ``loosestep compare`` is asked for: contenders, hosts, settings; checked without torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loosestep.lab.cli.folders import check_file
from loosestep.lab.cli.given import settings_of
from loosestep.lab.emulation import Link
from loosestep.lab.trainer import contenders
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.ranks import rank_from
from loosestep.lab.trainer.settings import Settings, changed, default_of, options
from loosestep.lab.trainer.specs import Spec, parse_spec

ONE_STRATEGY = ("strategy", "period", "periods", "reducer", "overlap_steps")  # not of several
OF_ONE_RUN = ("resume", "workers", *ONE_STRATEGY)
DEFAULT_HOSTS = 2


class Contender(NamedTuple):
    """A strategy, and what it is called."""

    name: str
    spec: Spec


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that ``compare`` was told."""

    contenders: tuple[Contender, ...]
    settings: Settings
    num_hosts: int
    workers_per_host: int
    link: Link | None  # to emulate; None: hosts are this machine as it is
    or_loopback: bool
    target: float | None  # held-out loss to reach
    json: str | None
    report: str | None


def contender(text: str) -> Contender:
    """Read a strategy, with a name of its own if one is given.

    >>> contender("loose=post_local_sgd:period=8").name, contender("ddp").name
    ('loose', 'ddp')
    """
    name, equals, rest = text.partition("=")
    if not equals or ":" in name:
        return Contender(str(parse_spec(text)), parse_spec(text))
    if not name.strip():
        raise BadInput(f"{text!r}: give a name before '=', as in loose=post_local_sgd:period=8")
    return Contender(name.strip(), parse_spec(rest))


def comparison(found: argparse.Namespace) -> Comparison:
    """Read a command line; raise ``BadInput`` for what is wrong with it."""
    if rank_from() is not None:
        raise BadInput(
            "compare starts workers of its own, but this is one already (RANK or SLURM_PROCID); "
            "run it without torchrun or srun, or train with each strategy and report the runs"
        )
    chosen = tuple(contender(text) for text in found.strategies) or tuple(
        Contender(str(spec), spec) for spec in contenders.defaults()
    )
    _check(chosen)
    if found.target is not None and not math.isfinite(found.target):
        raise BadInput(f"--target must be a loss, got {found.target}")
    check_file(found.json, "--json")
    check_file(found.report, "--report")
    settings = _settings(found)
    chosen = tuple(_warmed_up(one, settings.warmup_steps) for one in chosen)
    num_hosts, each = settings.hosts or DEFAULT_HOSTS, found.workers_per_host
    if num_hosts < 1 or each < 1:
        raise BadInput(
            f"--hosts and --workers-per-host must be at least 1, got {num_hosts}, {each}"
        )
    return Comparison(
        contenders=chosen,
        settings=changed(settings, warmup_steps=None),  # the contenders have it
        num_hosts=num_hosts,
        workers_per_host=each,
        link=None if found.link is None else _link(found.link),
        or_loopback=found.or_loopback,
        target=found.target,
        json=found.json,
        report=found.report,
    )


def _warmed_up(one: Contender, warmup: int | None) -> Contender:
    """Give a contender that can have one the warm-up of all, unless it was given its own."""
    own = one.spec.options.keys() & {"warmup_steps"}
    if warmup is None or own or not contenders.has_option(one.spec, "warmup_steps"):
        return one
    return Contender(one.name, one.spec.having(warmup_steps=warmup))


def _check(chosen: Sequence[Contender]) -> None:
    for one in chosen:
        contenders.check_options(one.spec)
    names = [one.name for one in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice!r} is given twice; give each contender once")


def _settings(found: argparse.Namespace) -> Settings:
    """Return the settings; raise for those of a file that only one run can have."""
    settings = settings_of(found)
    for setting in options():
        name = setting.name
        if name in OF_ONE_RUN and getattr(settings, name) != default_of(setting):
            raise BadInput(f"{found.config}: {name!r} is for loosestep train; leave it out")
    return settings


def _link(rate: str) -> Link:
    try:
        return Link(rate)
    except (ValueError, TypeError) as error:
        raise BadInput(f"--link: {error}") from error
