"""Builds the C loops with the package; everything else about it is in pyproject.toml.

They are one plain shared library that Python finds by ctypes, without Python.h: so a wheel is
tagged for the platform and for no version of Python. Where there is no compiler, or it fails, the
package is built without them and tagged for any platform; plain torch gives the same bits there.

``CC`` names the compiler, ``LOOSESTEP_CFLAGS`` adds flags.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/loosestep/comm/native")
HEADER = NATIVE / "interface.h"
SOURCES = sorted(str(path) for path in NATIVE.glob("*.c"))
# -ffp-contract=off: nothing that would let the compiler round differently from torch.
FLAGS = "-O3 -ffp-contract=off -fno-math-errno -fvisibility=hidden -shared -fPIC".split()
COMPILE_SECONDS = 300
WITHOUT = """
loosestep is installed WITHOUT its C loops: {}.
Plain torch does their work with the same result, several times slower. For the fast ones install a
C compiler and then loosestep again; `loosestep doctor` tells which ones are in use."""


class Loops(build_ext):
    """Compile the shared library; or say why not, and go on without."""

    built = False

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # not an old one, where this fails
        reason = compile_to(target)
        Loops.built = not reason
        if reason:
            # pip shows this with -v only; doctor and the log say it again.
            print(WITHOUT.format(reason), file=sys.stderr, flush=True)

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without any version of Python in it, and none that could be imported."""
        *packages, name = fullname.split(".")
        return str(Path(*packages) / f"{name}.loops.so")

    def copy_extensions_to_source(self) -> None:
        """Do so for an editable install, if there is something to copy."""
        if Loops.built:
            super().copy_extensions_to_source()
        else:
            (NATIVE / "libloosestep.loops.so").unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        return super().get_outputs() if Loops.built else []

    def get_output_mapping(self) -> dict[str, str]:
        return super().get_output_mapping() if Loops.built else {}


class Wheel(bdist_wheel):
    """A wheel for this platform and any Python 3; without C loops, for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2] if Loops.built else "any"


def compile_to(target: Path) -> str:
    """Compile the loops; return what went wrong, or ''."""
    compiler = find_compiler()
    if compiler is None:
        return "there is no C compiler (cc, gcc, clang, or what CC names)"
    interface: dict[str, Any] = runpy.run_path(str(NATIVE / "interface.py"))
    name = f'-DINTERFACE_HASH="{interface["EXPECTED_HASH"]}"'
    extra = shlex.split(os.environ.get("LOOSESTEP_CFLAGS", ""))
    said = ""
    for fallback in ([], ["-DONE_TARGET"]):  # an old compiler may not know all processors
        command = [*compiler, *FLAGS, name, *fallback, *extra, *SOURCES, "-o", str(target), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler[0]} did not work: {error}"
        if done.returncode == 0:
            return ""
        said = said or (done.stderr.strip().splitlines() or ["no message"])[0]
    return f"{compiler[0]} failed: {said}"


def find_compiler() -> list[str] | None:
    """Return the command that compiles C, or None."""
    given = os.environ.get("CC")
    for words in [shlex.split(given)] if given else [["cc"], ["gcc"], ["clang"]]:
        if words and shutil.which(words[0]):
            return words
    return None


setup(
    ext_modules=[
        Extension(
            "loosestep.comm.native.libloosestep", SOURCES, depends=[str(HEADER)], optional=True
        )
    ],
    cmdclass={"build_ext": Loops, "bdist_wheel": Wheel},
)
