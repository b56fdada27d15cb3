"""Whoever only asks gets an answer at once: torch and its heavy parts are loaded when needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pickle
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loosestep

SECONDS = 0.3  # that an answer may take; Python alone takes some 0.03
SOURCE = Path(loosestep.__file__)
TREE = ast.parse(SOURCE.read_text())

SHOWN = (
    ["--help"],
    ["--version"],
    [],
    *([command, "--help"] for command in ("train", "compare", "report", "doctor")),
)
REFUSED = (
    ["trian"],
    ["--hepl"],
    ["train", "--stesp", "3"],
    ["train", "--steps", "many"],
    ["train", "--steps", "0"],
    ["train", "--task", "image"],
    ["train", "--workers", "3", "--hosts", "2"],
    ["train", "--config", "none.toml"],
    ["train", "--resume", "none"],
    ["train", "--strategy", "diloc:period=8"],
    ["train", "--strategy", "ddp:wier=int4"],
    ["train", "--strategy", "post_local_sgd:period"],
    ["train", "--strategy", "post_local_sgd:period=often"],
    ["train", "--strategy", "post_local_sgd:period=0"],
    ["train", "--strategy", "post_local_sgd", "--reducer", "int3"],
    ["train", "--strategy", "ddp:gradient_reducer=shared+x"],
    ["train", "--strategy", "hierarchical_sgd"],
    ["train", "--strategy", "hierarchical_sgd", "--periods", "rack=4"],
    ["train", "--strategy", "torch-post-local:period=0"],
    ["train", "--overlap-steps", "3"],
    ["compare", "foo"],
    ["compare", "ddp", "post_local_sgd:reducer=int4", "foo"],
    ["compare", "ddp", "ddp"],
    ["compare", "ddp", "--link", "fast"],
    ["compare", "ddp", "--workers-per-host", "0"],
    ["compare", "ddp", "--json", "none/a.json"],
    ["report"],
    ["report", "none"],
    ["doctor", "--workers", "0"],
)
ASK = """
import contextlib, io, json, sys
from loosestep.lab.cli import main

answers = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
    answers.append([code, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""

HEAVY = tuple(f"torch.distributed.{part}" for part in ("fsdp", "optim", "tensor", "checkpoint"))
HEAVY_NAMES = {"PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"}
TRAIN = """
import torch, torch.distributed as dist
from loosestep import attach, ddp

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with attach(model, optimizer, ddp()):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def run(code: str, *arguments: str, **options: Any) -> str:
    """Run a script in a process that has imported nothing yet, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        **options,
    )
    return done.stdout


def loaded(code: str, *modules: str) -> list[str]:
    """Return which of some modules a script has loaded when it ends."""
    found: list[str] = json.loads(
        run(f"{code}\nimport json, sys\nprint(json.dumps([*filter(sys.modules.get, {modules})]))")
    )
    return found


EACH = """
import json, os, sys
import torch

for code in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        before = {*sys.modules}
        exec(code, {})
        print(json.dumps(sorted({*sys.modules} - before)), flush=True)
        os._exit(0)
"""


def loaded_beside_torch(*codes: str) -> list[set[str]]:
    """Return what each script has loaded when it ends, from where torch alone is loaded."""
    return [{*json.loads(line)} for line in run(EACH, json.dumps(codes)).splitlines()]


# Commands


def test_help_and_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    """All in one process, in this order, so that the first that loads torch is the one to blame."""
    asked = [*SHOWN, *REFUSED]
    answers = json.loads(run(ASK, json.dumps(asked), cwd=tmp_path))
    for arguments, (code, out, err, has_torch) in zip(asked, answers, strict=True):
        assert not has_torch, arguments
        if arguments in SHOWN:
            assert (code, err) == (0, ""), arguments
            assert "loosestep" in out
        else:
            assert (code, out) == (2, ""), arguments
            assert err.startswith("loosestep: "), arguments
            assert err.count("\n") == 1, arguments
    assert list(tmp_path.iterdir()) == []


def test_help_and_usage_need_no_rich_and_other_commands_say_that_they_do() -> None:
    """It is an extra."""
    code = f"import sys\nsys.modules['rich'] = None\n{ASK}"
    answers = json.loads(
        run(code, json.dumps([["--help"], ["compare", "foo"], ["report", "none"]]))
    )
    assert [code for code, *_ in answers] == [0, 2, 2]
    assert "there is no strategy 'foo'" in answers[1][2]
    assert "the command line needs rich: pip install 'loosestep[cli]'" in answers[2][2]


def test_help_is_there_at_once() -> None:
    """The processor's time of the best of some runs: others may be using the machine."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "loosestep", "--help"], capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < SECONDS, seconds


# The package


def test_the_package_itself_loads_no_torch() -> None:
    assert loaded("import loosestep; dir(loosestep); loosestep.__version__", "torch") == []
    names = "from loosestep import PeerLost, post_local_sgd; from loosestep.schedules import every"
    assert loaded(names, "torch") == []


def test_only_what_is_a_class_of_torchs_heavy_parts_loads_them() -> None:
    """Both optimizers are subclasses of ``torch.distributed.optim``'s; nothing else needs it.

    Whoever shards nothing does not wait for the class of sharded optimizers when he trains. And a
    star imports every name.
    """
    light = sorted(set(loosestep.__all__) - HEAVY_NAMES)
    star = "from loosestep import *\nimport loosestep\nassert {*loosestep.__all__} <= {*globals()}"
    names, training, everything = loaded_beside_torch(
        f"from loosestep import {', '.join(light)}", TRAIN, star
    )
    assert names & {*HEAVY} == set()
    assert training & {"torch.distributed.optim", "loosestep.sharding.optimizer"} == set()
    assert {"torch.distributed.optim", "loosestep.sharding.optimizer"} <= everything
    for name in HEAVY_NAMES:
        modules = [kind.__module__ for kind in getattr(loosestep, name).__mro__]
        assert any(module.startswith("torch.distributed.optim") for module in modules), name


def test_a_name_is_the_one_of_its_module_after_all_modules_are_loaded() -> None:
    """No module hides a public name, whoever imports it and when."""
    for module in pkgutil.walk_packages(loosestep.__path__, "loosestep."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in loosestep.__all__:
        value = getattr(loosestep, name)
        assert not inspect.ismodule(value), name
        assert getattr(sys.modules[value.__module__], name) is value


def test_no_module_bears_the_name_of_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(loosestep.__path__)}
    assert modules & set(loosestep.__all__) == set()


def test_type_checkers_see_what_is_imported() -> None:
    """The imports for type checkers, the table of names and ``__all__`` say the same."""
    block = next(node for node in TREE.body if isinstance(node, ast.If))
    seen = {
        alias.name: (node.module or "").removeprefix("loosestep.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == loosestep._HOME
    assert sorted(seen) == sorted(loosestep.__all__)


def test_the_version_can_be_read_without_importing() -> None:
    values = [
        ast.literal_eval(node.value)
        for node in TREE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert values == [loosestep.__version__]


def test_dir_lists_what_is_not_imported_yet() -> None:
    missing = run("import loosestep\nprint(set(loosestep.__all__) - set(dir(loosestep)))")
    assert missing.strip() == "set()"


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'atach'; .* loosestep.__all__"
    ) as caught:
        loosestep.atach  # type: ignore[attr-defined]  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("atach", loosestep)
    with pytest.raises(ImportError, match="atach"):
        from loosestep import atach  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize("name", loosestep.__all__)
def test_public_names_pickle(name: str) -> None:
    """As what they are, by their module."""
    value = getattr(loosestep, name)
    assert pickle.loads(pickle.dumps(value)) is value


def test_instances_pickle_into_a_process_that_has_imported_nothing() -> None:
    strategy = loosestep.post_local_sgd(8)
    code = "import pickle, sys\nprint(pickle.loads(bytes.fromhex(sys.argv[1])).describe())"
    assert run(code, pickle.dumps(strategy).hex()).strip() == strategy.describe()
