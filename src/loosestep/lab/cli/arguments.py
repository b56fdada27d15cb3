"""Flags: made of the settings, with an example in every ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field
from typing import Any, NoReturn

import loosestep
from loosestep.lab.cli.commands import compare, doctor, report, train
from loosestep.lab.cli.comparison import OF_ONE_RUN
from loosestep.lab.trainer import contenders
from loosestep.lab.trainer.mistakes import BadInput, nearest
from loosestep.lab.trainer.settings import default_of, kind_of, options

Parser = argparse.ArgumentParser

TRAIN = """examples:
  loosestep train --workers 4 --strategy post_local_sgd:period=8,reducer=int4
  loosestep train book.txt notes/ 'logs/*.txt' --width 256 --depth 6 --save-every 100
  loosestep train --strategy hierarchical_sgd --periods host=4,world=32 --reducer int4
  loosestep train --task images photos/ --config run.toml
  loosestep train --resume runs/ddp-20260101-120000
  torchrun --nnodes 2 --nproc-per-node 4 ... -m loosestep train --out /shared/runs/first"""

COMPARE = """examples:
  loosestep compare
  loosestep compare torch-ddp post_local_sgd:period=8,reducer=int4,overlap_steps=4 --link 100mbit
  loosestep compare ddp hierarchical_sgd:host=4,world=16 --link 50mbit --hosts 4 --seconds 60"""

REPORT = """examples:
  loosestep report runs/compare-20260101-120000/*/
  loosestep report runs/ddp-1 runs/local-1 --output report.html"""

DOCTOR = """examples:
  loosestep doctor
  loosestep doctor --workers 4 --parameters 10000000
  torchrun --nnodes 2 --nproc-per-node 4 ... -m loosestep doctor"""


class _Parser(Parser):
    """Ends with one line, and with the nearest flag that there is."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Return the command and its options."""
    parser = _parser()
    if not given:
        parser.print_help()
        raise SystemExit(0)
    found, unknown = parser.parse_known_args(given)
    for flag in unknown:
        known = [text for action in found.parser._actions for text in action.option_strings]
        raise BadInput(
            f"{flag!r} is no option of {found.parser.prog}{nearest(flag.split('=')[0], known)}"
        )
    return found


def _parser() -> Parser:
    parser = _Parser(
        prog="loosestep",
        description="Data-parallel PyTorch training that does not wait for the network.",
        epilog="loosestep COMMAND --help shows the options of a command, with examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {loosestep.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    one = _command(commands, "train", train, "train a model with a strategy", TRAIN)
    one.add_argument("data", nargs="*", metavar="DATA", help=DATA_HELP)
    _add_settings(one, ())
    several = _command(commands, "compare", compare, "train with several strategies", COMPARE)
    several.add_argument("strategies", nargs="*", metavar="SPEC", help=_strategies())
    several.add_argument("--data", action="append", default=[], metavar="DATA", help=DATA_HELP)
    _add_comparison(several)
    _add_settings(several, ("out", "tensorboard", "keep", *OF_ONE_RUN))
    page = _command(commands, "report", report, "make one HTML file of runs", REPORT)
    page.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run")
    page.add_argument(
        "--output", default="report.html", metavar="FILE", help="default: %(default)s"
    )
    health = _command(commands, "doctor", doctor, "look at this machine and its links", DOCTOR)
    _add_doctor(health)
    return parser


DATA_HELP = "files, folders or globs (default: Python's own sources; digits for images)"


def _command(commands: Any, name: str, run: Any, text: str, examples: str) -> Parser:
    parser: Parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run, parser=parser)
    return parser


def _strategies() -> str:
    known = ", ".join(contenders.names())
    return f"strategies, of {known} (default: all of them); NAME=SPEC gives one another name"


def _add_comparison(parser: Parser) -> None:
    group = parser.add_argument_group("the hosts")
    group.add_argument("--link", metavar="RATE", help="emulate hosts with such uplinks: 100mbit")
    group.add_argument(
        "--workers-per-host", type=int, default=2, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--or-loopback", action="store_true", help="go on without, where links cannot be emulated"
    )
    group = parser.add_argument_group("the result")
    group.add_argument("--target", type=float, metavar="LOSS", help="held-out loss to reach")
    group.add_argument("--json", metavar="FILE", help="write the table as JSON too")
    group.add_argument("--report", metavar="FILE", help="write a report of all runs too")
    group.add_argument(
        "--out", metavar="DIR", help="folder of all runs (default: runs/compare-DATE)"
    )


def _add_doctor(parser: Parser) -> None:
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--parameters", type=int, default=10_000_000, metavar="N", help="of your model"
    )
    parser.add_argument(
        "--step-seconds", type=float, default=0.5, metavar="S", help="a step of it takes to compute"
    )
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="longest wait")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON too")


def _add_settings(parser: Parser, without: Sequence[str]) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    groups: dict[str, Any] = {}
    for setting in options():
        title = setting.metadata["group"]
        if setting.name not in without:
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_flag(groups[title], setting)


def _add_flag(group: Any, setting: Field[Any]) -> None:
    flag, text = "--" + setting.name.replace("_", "-"), setting.metadata["help"]
    default = default_of(setting)
    if kind_of(setting) is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if default is not None and "default" not in text:
        text += f" (default: {default})"
    group.add_argument(flag, type=kind_of(setting), metavar=setting.metadata["metavar"], help=text)
