"""Every example in the documentation runs, and every doctest holds."""

import contextlib
import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import loosestep
from loosestep.testing import RankPool

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# ```python run        two ranks
# ```python run 4      four
# ```python continued  goes on where the block before it ends
BLOCK = r"(?P<source>.*?)^```$(?P<more>(?:\n+^```python continued\n.*?^```$)*)"
RUNNABLE = re.compile(rf"^```python run ?(?P<ranks>\d*)\n{BLOCK}", re.M | re.S)
FENCES = re.compile(r"^```.*$", re.M)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#]+)")
DOCUMENTS = ("concepts", "guide", "migration", "recipes", "wire", "zero")
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(loosestep.__path__, f"{loosestep.__name__}.")
)


def examples() -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in RUNNABLE.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            place = f"{page.relative_to(ROOT)}:{line}"
            source = match["source"] + FENCES.sub("", match["more"])
            found.append(pytest.param(place, int(match["ranks"] or 2), source, id=place))
    return found


def run_example(place: str, source: str, folder: str) -> None:
    """Run an example as a user would who has a model, an optimizer, data and a loss."""
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3))
    torch.manual_seed(1 + torch.distributed.get_rank())
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "data": [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(20)],
        "loss_fn": torch.nn.CrossEntropyLoss(),
    }
    with contextlib.chdir(folder):
        exec(compile(source, place, "exec"), names)


@pytest.mark.parametrize(("place", "ranks", "source"), examples())
def test_example_runs(pool: RankPool, tmp_path: Path, place: str, ranks: int, source: str):
    pool.run(ranks, run_example, place, source, str(tmp_path))


@pytest.mark.fast
def test_examples_are_found():
    pages = {parameters.values[0].split(":")[0] for parameters in examples()}
    assert pages == {f"docs/{page}.md" for page in DOCUMENTS}


@pytest.mark.fast
def test_a_reducer_of_ones_own_is_short():
    """No block of its chapter has 25 lines, and all of them run, one after the other."""
    text = (ROOT / "docs" / "wire.md").read_text().partition("\n## A reducer of your own\n")[2]
    blocks = re.findall(r"^```python.*?\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == 4
    assert all(block.count("\n") < 25 for block in blocks)
    run = [match for match in RUNNABLE.finditer(text) if match["more"]]
    assert len(run) == 2


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for match in LINK.finditer(page.read_text()):
        assert (page.parent / match["target"]).exists(), match["target"]


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SOURCES = [
    path for path in (ROOT / "src" / "loosestep").rglob("*") if path.suffix in (".py", ".c", ".h")
]


@pytest.mark.fast
def test_architecture_names_files_that_exist():
    """Files and folders by their end, which one file alone has where it is a path."""
    files = [str(path.relative_to(ROOT / "src" / "loosestep")) for path in SOURCES]
    named = set(re.findall(r"`([\w/]+\.(?:py|c|h))`", ARCHITECTURE))
    assert len(named) > 30
    for name in named:
        ends = [file for file in files if f"/{file}".endswith(f"/{name}")]
        assert len(ends) == 1, f"{name}: {ends}"
    for folder in set(re.findall(r"`([\w/]+)/`", ARCHITECTURE)):
        assert (ROOT / "src" / "loosestep" / folder).is_dir(), folder


@pytest.mark.fast
def test_architecture_names_notes_and_things_that_exist():
    """Every note is written somewhere, and everything that a row says where it is, is there."""
    code = "\n".join(path.read_text() for path in SOURCES)
    notes = re.findall(r"^ *\[Note: ([^\]]+)\]", code, re.M)
    assert sorted(notes) == sorted(set(notes)), "each is written once, and named elsewhere"
    for note in set(re.findall(r"\[Note: ([^\]]+)\]", ARCHITECTURE)):
        assert " ".join(note.split()) in notes
    rows = ARCHITECTURE.partition("## Where is ...")[2].partition("\n## ")[0]
    for name in re.findall(r"`((?:\w+\.)?\w+)`", rows):
        if not name.endswith((".py", ".c", ".h")):
            assert re.search(rf"\b(def|class) {name.rpartition('.')[2]}\b", code), name


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path):
    """What the documentation imports from loosestep is there."""
    for module in ("loosestep", "loosestep.reducers", "loosestep.schedules"):
        imports = re.findall(rf"from {re.escape(module)} import ([\w, ]+)", page.read_text())
        names = {name.strip() for line in imports for name in line.split(",")}
        assert names <= set(importlib.import_module(module).__all__), module


@pytest.mark.fast
@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.fast
def test_there_are_doctests():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    found = [test for module in modules for test in finder.find(module) if test.examples]
    assert len(found) >= 10
