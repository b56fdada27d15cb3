"""The C loops: one interface, checked when it is loaded, and built with the package or left out."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from loosestep.comm import native
from loosestep.comm.native import interface, library

ROOT = Path(__file__).parents[2]
BUILD = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "src")

HEADER = """
enum { /* not = 3 */ FIRST = 1, SECOND = 20, };
typedef struct {
    const int64_t *numbers; /* of something; */
    double share;
    int64_t count;
} Thing;
void nothing(void);
const char *words(void);
float two_lines(int planes, const float *const *x,
                uint32_t key, size_t count);
"""


def test_a_header_is_read() -> None:
    """Numbers, fields in their order, and what functions take and return."""
    assert interface.read_constants(HEADER) == {"FIRST": 1, "SECOND": 20}
    (thing,) = interface.read_structures(HEADER).values()
    assert thing._fields_ == [
        ("numbers", ctypes.c_void_p),
        ("share", ctypes.c_double),
        ("count", ctypes.c_int64),
    ]
    functions = interface.read_functions(HEADER)
    assert functions["nothing"] == ([], None)
    assert functions["words"] == ([], ctypes.c_char_p)
    assert functions["two_lines"] == (
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t],
        ctypes.c_float,
    )


def test_every_declaration_is_read() -> None:
    """What stands in the header and what Python made of it are equally many."""
    text = interface.HEADER.read_text()
    assert len(interface.FUNCTIONS) == text.count(");") > 15
    assert len(interface.STRUCTURES) == text.count("typedef struct") == 3
    assert len(interface.STRUCTURES["Train"]._fields_) == 25


def test_the_loops_were_built_here() -> None:
    """Otherwise all comparisons of C with torch would compare torch with itself."""
    assert native.loops() is not None, native.why_not()
    assert native.why_not() == ""


def refusal(path: Path) -> str:
    loaded, reason = library.load(path)
    assert loaded is None
    return reason


def test_another_interface_is_refused() -> None:
    """A library of another header, or one that lays structures out differently, is not used."""
    with mock.patch.object(library, "EXPECTED_HASH", "0" * 16):
        assert "another version of loosestep" in refusal(library.LIBRARY)

    class Short(ctypes.Structure):
        _fields_ = (("only", ctypes.c_int64),)

    with mock.patch.dict(interface.STRUCTURES, Train=Short):
        assert "lays Train out differently" in refusal(library.LIBRARY)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    """So is one without the functions."""
    text = tmp_path / "text.so"
    text.write_text("nothing")
    assert "text.so cannot be loaded" in refusal(text)
    known = next(path for path in Path("/proc/self/maps").read_text().split() if "libc.so" in path)
    assert "cannot be loaded" in refusal(Path(known))


def test_the_log_says_once_that_there_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning where they were not built, a note where they are switched off."""
    with mock.patch.object(library, "LIBRARY", tmp_path / "libloosestep.loops.so"):
        fresh = library._found.__wrapped__
        with caplog.at_level(logging.INFO):
            found, reason = fresh()
            assert found is None
            assert "not built with the package; install loosestep again" in reason
            with mock.patch.dict(os.environ, LOOSESTEP_NATIVE="0"):
                assert fresh() == (None, "switched off by LOOSESTEP_NATIVE=0")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "same bits" in caplog.text


# Building: from a copy, so that nothing is left in this tree


def build(folder: Path, **environment: str) -> tuple[Path, str]:
    """Return the wheel that is built, and what was said meanwhile."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for name in BUILD:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    (tree / "src/loosestep/comm/native/libloosestep.loops.so").unlink(missing_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "-w", str(folder / "wheel"), str(tree)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "wheel").iterdir()
    return wheel, done.stdout + done.stderr


def names_in(wheel: Path) -> set[str]:
    return {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "native/" in name}


def test_without_a_compiler_the_package_is_built_without_loops(tmp_path: Path) -> None:
    """It says so, and fits any platform; it averages all the same."""
    wheel, said = build(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "libloosestep.loops.so" not in names_in(wheel)
    assert "installed WITHOUT its C loops: there is no C compiler" in said
    room = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(room)
    code = (
        "from loosestep.comm import native\n"
        "from loosestep.comm.reducers import mean_into\n"
        "import loosestep, torch\n"
        f"assert loosestep.__file__.startswith({str(room)!r})\n"
        "assert native.loops() is None\n"
        "print(mean_into(torch.empty(1), [torch.tensor([1.0]), torch.tensor([2.0])]).item())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(room)},
        capture_output=True,
        text=True,
    )
    assert run.stdout == "1.5\n", run.stderr
    assert "not built with the package" in run.stderr


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    """Its first line is said, and the package is built without loops."""
    wheel, said = build(tmp_path, LOOSESTEP_CFLAGS="-no-such-flag")
    assert "libloosestep.loops.so" not in names_in(wheel)
    assert "no-such-flag" in said.partition("WITHOUT its C loops: ")[2].splitlines()[0]


@pytest.mark.long
def test_a_wheel_is_for_the_platform_and_no_version_of_python(tmp_path: Path) -> None:
    """With a compiler; and what it gives is what the one without gives, training by training."""
    wheel, said = build(tmp_path / "with")
    assert "WITHOUT" not in said
    assert "-py3-none-linux_" in wheel.name
    assert names_in(wheel) >= {"libloosestep.loops.so", "interface.h"}
    assert not any(name.endswith(".c") for name in names_in(wheel))
    plain, _ = build(tmp_path / "without", CC=str(tmp_path / "no-such-compiler"))
    for kind, each in (("with", wheel), ("without", plain)):
        room = tmp_path / f"installed {kind}"
        zipfile.ZipFile(each).extractall(room)
        code = (
            "import loosestep\n"
            "from loosestep.comm import native\n"
            f"assert loosestep.__file__.startswith({str(room)!r}), loosestep.__file__\n"
            f"assert (native.loops() is not None) == {kind == 'with'}\n"
        )
        env = os.environ | {"PYTHONPATH": str(room)}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=env)
        run = subprocess.run(
            [sys.executable, "-m", "tests.recorded"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=env,
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_sources_can_be_packed(tmp_path: Path) -> None:
    """An sdist has all that a wheel is built from."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in BUILD:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    code = "import setuptools.build_meta as b; print(b.build_sdist('out'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next((tree / "out").iterdir())) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    wanted = {f"src/loosestep/comm/native/{p.name}" for p in library.LIBRARY.parent.glob("*.[ch]")}
    assert names >= {"setup.py", "pyproject.toml", "LICENSE", *wanted}
    assert not [name for name in names if name.endswith(".so")]


SANITIZED = (
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer "
    "-g -O1 -DONE_TARGET"
)


def path_of(library: str) -> str:
    """Return where the compiler has a library."""
    asked = ["gcc", f"-print-file-name={library}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Codecs, means and trains under the address and undefined-behaviour sanitizers."""
    wheel, said = build(tmp_path, LOOSESTEP_CFLAGS=SANITIZED)
    assert "WITHOUT" not in said
    room = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(room)
    # The C++ library too: the sanitizer looks for it at the start, when torch is not yet loaded.
    preload = " ".join(path_of(name) for name in ("libasan.so", "libstdc++.so"))
    names = "windows packing flat_in_c codecs shared_memory two_level compressed shared_tensors"
    modules = [str(next((ROOT / "tests").rglob(f"test_{name}.py"))) for name in names.split()]
    quietly = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # Not what sits out a time-out, or counts memory and descriptors: all is slower and larger.
    some = "not struck and not killed and not lost and not leave"
    done = subprocess.run(
        [*quietly, "-m", "not long", "-k", some, "-o", f"pythonpath={room}", *modules],
        cwd=ROOT,
        env=os.environ
        | {
            "LD_PRELOAD": preload,
            # Python never frees all it has; and a rank that is killed must not be a finding.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
