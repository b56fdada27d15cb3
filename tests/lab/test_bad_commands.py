"""Whatever is wrong with a command is said on one line, before anything is lost."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loosestep.lab.runs import INFO_FILE
from loosestep.lab.trainer import checkpoint
from tests.support.commands import MODULE, TINY, Done, call, command, read_json

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 400


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, where whatever is left behind shows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left_in(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


# Refused before any worker is started


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "none.txt"], "none.txt: no such file or folder"),
        (["train", "empty.txt"], "no text in it"),
        (["train", "garbage.bin"], "binary data and no text"),
        (["train", "binaries"], "none of its 1 files is text"),
        (["train", "short.txt"], "give more text or a smaller --context"),
        (["train", "text.txt", "--workers", "1000"], "1000 workers need a sample each"),
        (["train", "--workers", "3", "--hosts", "2"], "--workers must be a multiple of --hosts"),
        (["train", "--hosts", "3"], "2 workers cannot be 3 equal hosts"),
        (["train", "--task", "images", "text.txt"], "no such folder"),
        (["train", "--task", "images", "binaries"], "no images"),
        (["train", "--task", "image"], "did you mean 'images'"),
        (["train", "--strategy", "post_local_sdg"], "did you mean 'post_local_sgd'"),
        (["train", "--strategy", "ddp:wier=int4"], "has no option 'wier'"),
        (["train", "--strategy", "post_local_sgd", "--reducer", "int3"], "did you mean 'int"),
        (
            ["train", "--strategy", "hierarchical_sgd", "--periods", "host:4"],
            "like host=4,world=32",
        ),
        (["train", "--strategy", "hierarchical_sgd", "--periods", "rack=4"], "no level 'rack'"),
        (["train", "--strategy", "hierarchical_sgd"], "needs periods"),
        (["train", "--overlap-steps", "3"], "'ddp' has no option 'overlap_steps'"),
        (["train", "--stesp", "3"], "did you mean '--steps'"),
        (["train", "--steps", "many"], "invalid int value: 'many'"),
        (["train", "--steps", "0"], "--steps must be more than 0, got 0"),
        (["train", "--width", "30"], "give --width 32"),
        (["train", "--config", "none.toml"], "none.toml: cannot be read"),
        (["train", "--config", "bad.toml"], "bad.toml: no TOML"),
        (["train", "--config", "garbage.bin"], "garbage.bin: no TOML"),
        (["train", "--resume", "nothing"], "no such checkpoint or run"),
        (["train", "--resume", "binaries"], "no whole checkpoint in it"),
        (["train", "--out", "text.txt"], "cannot be made"),
        (["train", "--out", "run"], "there is a run in it already"),
        (["train", "--out", "runs"], "there is a run in it already"),
        (["trian"], "invalid choice: 'trian'"),
        (["compare", "ddp", "ddp"], "given twice"),
        (["compare", "ddp", "no_such"], "there is no strategy 'no_such'"),
        (["compare", "ddp", "--link", "fast"], "--link: "),
        (["compare", "ddp", "--hosts", "0"], "--hosts"),
        (["compare", "ddp", "--workers-per-host", "0"], "must be at least 1"),
        (["compare", "ddp", "--json", "none/a.json"], "there is no folder none"),
        (["compare", "ddp", "--report", "none/a.html"], "there is no folder none"),
        (["compare", "ddp", "--json", "binaries"], "this is a folder"),
        (["compare", "ddp", "--out", "runs"], "there is a run in it already"),
        (["compare", "ddp", "--data", "none.txt"], "none.txt: no such file"),
        (["compare", "ddp", "--period", "4"], "'--period' is no option of loosestep compare"),
        (["compare", "ddp", "--target", "nan"], "--target must be a loss, got nan"),
        (["compare", "=ddp"], "give a name before '='"),
        (["compare", "ddp", "--link", "100mbit", "--hosts", "201"], "201"),
        (["report", "nothing"], "no run.json in it"),
        (["report", "run"], "run.json"),
        (["doctor", "--workers", "0"], "must be more than 0"),
        (["doctor", "--json", "none/a.json"], "there is no folder none"),
        (["doctor", "--step-seconds", "nan"], "--step-seconds must be more than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_changes_nothing(
    elsewhere: Path, arguments: list[str], said: str
):
    (elsewhere / "text.txt").write_text(TEXT)
    (elsewhere / "short.txt").write_text("too short")
    (elsewhere / "empty.txt").touch()
    (elsewhere / "garbage.bin").write_bytes(os.urandom(4096) + b"\0")
    (elsewhere / "bad.toml").write_text("steps = [\n")
    for folder in ("binaries", "run", "runs/01-ddp"):
        (elsewhere / folder).mkdir(parents=True)
    (elsewhere / "binaries" / "a.bin").write_bytes(bytes(100))
    for folder in ("run", "runs/01-ddp"):
        (elsewhere / folder / INFO_FILE).write_text("not even JSON")
    before = left_in(elsewhere)
    done = call(*arguments)
    assert said in done.refused()
    assert done.code == 2
    assert left_in(elsewhere) == before


def test_what_torchrun_and_slurm_need_is_said(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert "MASTER_PORT not; use torchrun" in call("train", *TINY).refused()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "need --out DIR" in call("train", *TINY).refused()
    assert "this is one already" in call("train", *TINY, "--workers", "2", "--out", "a").refused()


def test_workers_that_cannot_meet_say_where(elsewhere: Path):
    who = {"RANK": "0", "WORLD_SIZE": "2"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        there = {**who, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = command("train", *TINY, "--out", "run", environment=there)
    assert f"port {port} of 127.0.0.1 is in use; set MASTER_PORT" in done.refused()
    assert left_in(elsewhere) == {}


@pytest.mark.parametrize("asked", ["taken", "70000", "high"])
def test_a_port_that_cannot_be_had_is_named(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, asked: str
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1]) if asked == "taken" else asked
        monkeypatch.setenv("MASTER_PORT", port)
        done = call("train", *TINY, "--steps", "2")
    assert "MASTER_PORT" in done.refused()
    assert port in done.refused()
    assert left_in(elsewhere) == {}


# Links that cannot be emulated


def unprivileged(*arguments: str | Path, folder: Path) -> Done:
    """Run a command as a user who may not make namespaces."""
    if os.getuid() != 0:
        return command(*arguments, cwd=folder)
    if shutil.which("setpriv") is None:
        pytest.skip("this is root, and there is no setpriv to be somebody else")
    folder.chmod(0o777)
    for parent in folder.parents[:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    # May read all the same: Python itself may be in root's home.
    rights = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    other = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *rights)
    return command(*arguments, start=(*other, *MODULE), cwd=folder)


def test_a_link_needs_rights_or_is_given_up_explicitly(elsewhere: Path):
    options = ("--link", "100mbit", "--workers-per-host", "1", "--steps", "2")
    arguments = ("compare", "ddp", *TINY, *options, "--json", "table.json")
    said = unprivileged(*arguments, folder=elsewhere).refused()
    assert "root (this is user " in said
    assert "--or-loopback" in said
    assert left_in(elsewhere) == {}
    done = unprivileged(*arguments, "--or-loopback", folder=elsewhere)
    assert (done.code, done.err) == (0, "")
    assert "no emulated link: emulated hosts need root" in done.out
    assert read_json(elsewhere / "table.json")[0]["bytes_that_left_a_host"] is None


# Checkpoints of something else


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert call("train", *TINY, "--steps", "4", "--save-every", "4", "--out", folder).code == 0
    return folder


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--width", "64"), "another model: --width is 32 there and 64 here; give --width 32"),
        (("--depth", "2"), "another model: --depth is 1 there and 2 here; give --depth 1"),
        (("--heads", "4"), "another model: --heads is 2 there and 4 here; give --heads 2"),
        (("--context", "64"), "another model: --context is 32 there and 64 here"),
        (("--task", "images"), "another model: --task is text there and images here"),
        (("--seed", "3"), "in the order of --seed 0, not of 3"),
        (("--data-bytes", "50000"), "60000 bytes, and this is"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_before_workers_start(
    saved: Path, elsewhere: Path, flags: tuple[str, ...], said: str
):
    before = left_in(saved)
    assert said in call("train", "--resume", saved, *flags).refused()
    assert left_in(elsewhere) == {}
    assert left_in(saved) == before


def test_a_corrupted_checkpoint_is_named_by_whoever_reads_it(saved: Path, elsewhere: Path):
    copy = elsewhere / "copy"
    shutil.copytree(saved, copy)
    path = checkpoint.find(str(copy)) / "rank-1.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = call("train", "--resume", copy, "--steps", "8", "--out", "again")
    assert f"{path}: corrupted" in done.refused()
    assert done.code == 2
    assert not (elsewhere / "again").exists()


# Full disks


DISK_BYTES = 96 << 10


@dataclass
class Disk:
    """A folder that little fits into, and what a command must be started with for that."""

    folder: Path
    options: dict[str, Any]

    def train(self, *arguments: str) -> Done:
        """Train with the run's folder on this disk."""
        given = ("train", *TINY, *arguments, "--out", str(self.folder / "run"))
        return command(*given, **self.options) if self.options else call(*given)


@pytest.fixture
def disk(elsewhere: Path) -> Iterator[Disk]:
    """Hold a small disk; where none can be mounted, files may only be small."""
    folder = elsewhere / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        limits = (DISK_BYTES // 2, DISK_BYTES // 2)
        yield Disk(
            folder, {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)}
        )
        return
    try:
        yield Disk(folder, {})
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


FULL = r"No space left on device|File too large"


def test_a_disk_that_is_full_of_records_is_said(disk: Disk):
    said = disk.train("--steps", "2000").refused()
    assert re.search(FULL, said)
    assert str(disk.folder / "run") in said


def test_a_checkpoint_that_does_not_fit_is_said_and_removed(disk: Disk):
    said = disk.train("--steps", "8", "--save-every", "2").refused()
    assert "the checkpoint of step 2 cannot be written" in said
    assert str(disk.folder / "run") in said
    assert list((disk.folder / "run" / "checkpoints").iterdir()) == []


# What nobody has thought of


def test_an_error_inside_a_worker_names_it_and_where_the_story_is(elsewhere: Path):
    (elsewhere / "sitecustomize.py").write_text(
        "import os\n"
        "import loosestep.lab.trainer.loop as loop\n"
        "set_rate = loop.set_rate\n"
        "def fail_on_one(*given):\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise ZeroDivisionError('a defect\\nof two lines')\n"
        "    return set_rate(*given)\n"
        "loop.set_rate = fail_on_one\n"
    )
    here = {"PYTHONPATH": str(elsewhere)}
    done = command("train", *TINY, "--steps", "4", "--out", elsewhere / "run", environment=here)
    story = elsewhere / "run" / "rank-1.error"
    expected = f"worker 1 failed: a defect (the whole story is in {story})"
    assert done.refused() == f"loosestep: {expected}"
    assert done.code == 1
    assert "ZeroDivisionError" in story.read_text()
