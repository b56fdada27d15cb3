"""One bad command of every kind in a process of its own: what it prints and how it ends."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loosestep.trainer import checkpoint
from tests.support.commands import TINY, Done, begun, call

SECONDS = 120  # all of them at once, on few processors


def prepare(folder: Path) -> None:
    """Make what the commands are given, also a checkpoint with a bit turned over."""
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    (folder / "short.txt").write_text("too short")
    (folder / "empty.txt").touch()
    (folder / "garbage.bin").write_bytes(os.urandom(4096) + b"\0")
    run = folder / "run"
    assert call("train", *TINY, "--steps", "4", "--save-every", "4", "--out", run).code == 0
    shutil.copytree(run, folder / "turned")
    part = checkpoint.find(str(folder / "turned")) / "rank-1.pt"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def small_files() -> None:
    """Let no file grow beyond some kilobytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


BAD: dict[str, tuple[str, ...]] = {
    "none.txt: no such file or folder": ("train", "none.txt"),
    "no text in it": ("train", "empty.txt"),
    "binary data and no text": ("train", "garbage.bin"),
    "give more text or a smaller --context": ("train", "short.txt"),
    "1000 workers need a sample each": ("train", "text.txt", "--workers", "1000"),
    "did you mean 'post_local_sgd'": ("train", "--strategy", "post_local_sdg"),
    "did you mean '--steps'": ("train", "--stesp", "3"),
    "another model: --width is 32 there and 64 here": ("train", "--resume", "run", "--width", "64"),
    "rank-1.pt: corrupted": ("train", "--resume", "turned", "--steps", "8", "--out", "again"),
    "File too large": ("train", *TINY, "--steps", "2000", "--out", "full"),
    "there is a run in it already": ("train", "text.txt", "--out", "run"),
    "no run.json in it": ("report", "nothing"),
    "--step-seconds must be more than 0": ("doctor", "--step-seconds", "nan"),
}


def test_every_kind_is_one_line_and_a_code_and_changes_nothing(tmp_path: Path):
    """Nothing but that line is printed as an error, by workers neither."""
    prepare(tmp_path)
    before = files_in(tmp_path)
    with ExitStack() as held:
        running: dict[str, Any] = {}
        for said, arguments in BAD.items():
            limit = small_files if said == "File too large" else None
            started = begun(*arguments, cwd=tmp_path, preexec_fn=limit)
            running[said] = held.enter_context(started)
        for said, process in running.items():
            out, err = process.communicate(timeout=SECONDS)
            assert said in Done(process.returncode, out, err).refused()
    after = files_in(tmp_path)
    assert {path: after[path] for path in before} == before
    assert {path.split("/")[0] for path in after.keys() - before.keys()} == {"full"}


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
