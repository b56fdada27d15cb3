"""Every command line that help, docs and the Makefile show is one that would be accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from loosestep.lab.cli import arguments
from loosestep.lab.cli.arguments import parse
from loosestep.lab.cli.comparison import contender
from loosestep.lab.cli.given import settings_of
from loosestep.lab.trainer.contenders import check_spec

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
HELP = (arguments.TRAIN, arguments.COMPARE, arguments.REPORT, arguments.DOCTOR)
PAGES = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("train", "compare", "report", "doctor")


def lines_in(text: str) -> list[list[str]]:
    """Return the arguments of every command in a text; a backslash continues a line."""
    text = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in text.splitlines():
        match = re.search(rf"\bloosestep ((?:{'|'.join(COMMANDS)})\b[^|>`]*)", line)
        starts = line.strip().startswith(("loosestep", "torchrun", "srun", "$(BIN)/loosestep"))
        if match and starts:
            found.append(shlex.split(match[1], comments=True))
        elif line.startswith("--strategy"):
            found.append(["train", *shlex.split(line, comments=True)])
    return found


def shown() -> list[list[str]]:
    texts = [*HELP, *(page.read_text() for page in PAGES)]
    return [line for text in texts for line in lines_in(text)]


def test_there_are_lines_to_check():
    """The demo is one of them."""
    lines = shown()
    assert len(lines) > 20
    assert {line[0] for line in lines} == set(COMMANDS)
    assert any("torch-hierarchical:world=8" in line and "--report" in line for line in lines)


@pytest.mark.parametrize("line", shown(), ids=" ".join)
def test_a_command_line_that_is_shown_is_accepted(line: list[str]):
    """Its flags are there, and so are its strategies with their options."""
    found = parse(line)
    if line[0] == "train" and not (found.config or found.resume):
        check_spec(settings_of(found).spec)
    if line[0] == "compare":
        for text in found.strategies:
            check_spec(contender(text).spec)
