"""How large the core is, and how deep its imports: files, lines and the longest chain.

    python -m benchmarks.size                # of this tree
    python -m benchmarks.size path/to/src/loosestep --without lab testing

The core is the package without ``lab``, ``testing`` and ``__main__``. The depth counts the modules
of the core in the longest chain in which each imports the next when it is read itself, from a
module that has one of the door's names; with imports inside functions it would be no chain that
Python follows.
"""

from __future__ import annotations

import argparse
import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import loosestep

PACKAGE = Path(loosestep.__file__).parent
WITHOUT = ("lab", "testing", "__main__")


def core(root: Path, without: tuple[str, ...]) -> dict[str, Path]:
    """Return the core's modules by name."""
    paths = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
    return {
        ".".join(["loosestep", *(part for part in name.parts if part != "__init__")]): path
        for name, path in paths.items()
        if name.parts[0] not in without
    }


def imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return what a module of the core imports of the core when it is read."""
    found = set()
    for node in _read_at_once(ast.parse(path.read_text()).body):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in modules else node.module for part in parts}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules and modules[name] != path}


def _read_at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements that run when a module is read, without those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from _read_at_once(node.body)


def deepest(modules: dict[str, Path]) -> list[str]:
    """Return the longest chain of modules of which each imports the next, the door first."""
    imports = {name: imported(path, modules) for name, path in modules.items()}

    @functools.cache
    def chain(name: str) -> list[str]:
        below = max((chain(other) for other in imports[name]), key=len, default=[])
        return [name, *below]

    return max((chain(name) for name in modules if name != "loosestep"), key=len)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=PACKAGE)
    parser.add_argument("--without", nargs="*", default=WITHOUT)
    arguments = parser.parse_args()
    modules = core(arguments.root, tuple(arguments.without))
    lines = {name: path.read_text().count("\n") for name, path in modules.items()}
    packages: Counter[str] = Counter()
    for name in modules:
        packages[name.split(".")[1] if name.count(".") > 1 else "(doors)"] += 1
    for package, count in packages.items():
        print(f"{count:5} files  {package}")
    print(f"{len(modules)} files, {sum(lines.values())} lines")
    found = deepest(modules)
    print(f"{len(found)} modules in the longest chain of imports: {' > '.join(found)}")


if __name__ == "__main__":
    main()
