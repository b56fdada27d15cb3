"""Files of results: whole or as they were, never in place of a link, a pipe or a device."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loosestep.lab.cli import compare
from loosestep.lab.cli.table import write_json
from loosestep.lab.report import write_report
from loosestep.lab.report.facts import facts_of
from loosestep.lab.runs import INFO_FILE, NotARun, read_info, read_run, write_whole
from loosestep.lab.trainer.mistakes import BadInput
from tests.support.commands import TINY, call, read_json
from tests.support.report_runs import DDP, write_run

SHORT = replace(DDP, steps=3)


@contextmanager
def nearly_full(most: int = 64) -> Iterator[None]:
    """Let no file grow beyond a few bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def pipe(path: Path) -> Iterator[int]:
    """Make a pipe with a name, which holds a megabyte before anybody reads it."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
        yield reader
    finally:
        os.close(reader)


# ---- what is there already ----


def test_a_pipe_is_written_into(tmp_path):
    """As a device is, which a rename would replace by a file."""
    run, path = write_run(tmp_path / "run", SHORT), tmp_path / "page"
    with pipe(path) as reader:
        assert call("report", run, "--output", path).code == 0
        assert os.read(reader, 15) == b"<!doctype html>"
        assert stat.S_ISFIFO(path.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["page", "run"]


def test_a_link_stays_one(tmp_path):
    """Also where what it points to is not there yet, or is a pipe."""
    (tmp_path / "real").mkdir()
    for name in ("old", "new"):
        (tmp_path / name).symlink_to(Path("real") / name)
    (tmp_path / "real" / "old").write_text("before", encoding="utf-8")
    run = write_run(tmp_path / "run", SHORT)
    for name in ("old", "new"):
        write_report([run], tmp_path / name)
        assert (tmp_path / name).readlink() == Path("real") / name
        page = (tmp_path / "real" / name).read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>")
    (tmp_path / "far").symlink_to("pipe")
    with pipe(tmp_path / "pipe") as reader:
        write_whole(tmp_path / "far", "text")
        assert os.read(reader, 100) == b"text"
    assert sorted(os.listdir(tmp_path / "real")) == ["new", "old"]


def test_rights_stay_as_they_are(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    write_whole(path, "text")
    assert (path.read_text(encoding="utf-8"), stat.S_IMODE(path.stat().st_mode)) == ("text", 0o600)


def test_a_folder_that_takes_no_new_files(tmp_path, monkeypatch):
    """The file itself may be written all the same; root may do anything, so it is acted."""

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(source))

    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "there").write_text("before", encoding="utf-8")
    write_whole(tmp_path / "there", "after")
    assert (tmp_path / "there").read_text(encoding="utf-8") == "after"
    with pytest.raises(PermissionError) as caught:
        write_whole(tmp_path / "new", "text")
    assert caught.value.filename == str(tmp_path / "new")  # not the draft
    assert os.listdir(tmp_path) == ["there"]


# ---- full disks ----


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "result"
    path.write_text("before", encoding="utf-8")
    with nearly_full(), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, "after" * 100)
    assert caught.value.filename == str(path)
    assert path.read_text(encoding="utf-8") == "before"
    assert os.listdir(tmp_path) == ["result"]


def test_a_table_that_does_not_fit_leaves_the_old_one(tmp_path):
    facts, path = facts_of([read_run(write_run(tmp_path / "run", SHORT))]), tmp_path / "table.json"
    write_json(path, facts, None)
    before = path.read_text(encoding="utf-8")
    with nearly_full(), pytest.raises(BadInput, match=r"table\.json: cannot be written: File too"):
        write_json(path, facts, 2.5)
    assert path.read_text(encoding="utf-8") == before


def test_what_the_doctor_found_does_not_fit(tmp_path):
    path = tmp_path / "found.json"
    path.write_text("before", encoding="utf-8")
    with nearly_full():
        done = call("doctor", "--workers", "1", "--json", path)
    assert "found.json: cannot be written: File too large" in done.refused()
    assert path.read_text(encoding="utf-8") == "before"


@pytest.mark.parametrize("broken", ["write_json", "write_report"])
def test_a_comparison_writes_the_other_file_where_one_cannot_be(tmp_path, monkeypatch, broken):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "disk")

    monkeypatch.setattr(compare, broken, fail)
    options = ("--workers-per-host", "1", "--steps", "2", "--out", tmp_path / "runs")
    files = ("--json", tmp_path / "table.json", "--report", tmp_path / "page.html")
    done = call("compare", "ddp", *TINY, *options, *files)
    assert done.refused() == "loosestep: disk: No space left on device"
    kept = {"write_json": "page.html", "write_report": "table.json"}[broken]
    assert sorted(os.listdir(tmp_path)) == sorted([kept, "runs"])


# ---- a run.json that somebody else wrote ----


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_workers", "2", "num_workers must be int, got '2'"),
        ("num_workers", True, "num_workers must be int, got True"),
        ("num_parameters", "x", "num_parameters must be int, got 'x'"),
        ("tokens_per_step", None, "tokens_per_step must be int, got None"),
        ("steps", 1.5, "steps must be int | None, got 1.5"),
        ("topology", [], "topology must be dict[str, list[list[int]]], got []"),
        ("topology", {"host": [0]}, "got {'host': [0]}"),
        ("config", None, "config must be dict[str, Any], got None"),
        ("command", None, "command must be list[str], got None"),
        ("command", [1], "command must be list[str], got [1]"),
        ("link", "fast", "link must be dict[str, Any] | None, got 'fast'"),
        ("name", 5, "name must be str, got 5"),
        ("data", ["long"] * 1000, "data must be dict[str, Any], got ['long', "),
    ],
)
def test_fields_of_another_type_are_named(tmp_path, name, value, said):
    run = write_run(tmp_path / "run", SHORT)
    info = read_json(run / INFO_FILE)
    (run / INFO_FILE).write_text(json.dumps(info | {name: value}), encoding="utf-8")
    with pytest.raises(NotARun) as caught:
        read_info(run)
    line = call("report", run, "--output", tmp_path / "page.html").refused()
    assert line == f"loosestep: {caught.value}"
    assert f"{run / INFO_FILE}: {name} must be" in line
    assert said in line
    assert line.endswith("; give a run as it was written")
    assert len(line) < 400
    assert not (tmp_path / "page.html").exists()


def test_what_is_written_can_be_read(tmp_path):
    run = write_run(tmp_path / "run", SHORT, link={"rate": "1gbit"}, steps=None, config={"a": None})
    info = read_info(run)
    assert (info.link, info.steps, info.config) == ({"rate": "1gbit"}, None, {"a": None})
    (run / INFO_FILE).write_text('{"version": 1}', encoding="utf-8")
    with pytest.raises(NotARun, match="missing 12 required"):
        read_info(run)


# ---- numbers and pictures out of all bounds ----


@pytest.mark.parametrize("flag", ["--step-seconds", "--timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1"])
def test_the_doctor_refuses_seconds_that_are_none(tmp_path, flag, value):
    done = call("doctor", "--workers", "1", f"{flag}={value}")
    assert f"{flag} must be more than 0 and finite, got {float(value)}" in done.refused()
    assert done.code == 2


def png(side: int) -> bytes:
    """Return the start of a picture, which says how large it will be."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_picture_of_billions_of_pixels_is_refused(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "huge.png").write_bytes(png(60_000))
    line = call("train", "--task", "images", tmp_path, "--out", tmp_path / "run").refused()
    assert "huge.png: Image size (3600000000 pixels)" in line
    assert line.endswith("; scale it down first")
    assert not (tmp_path / "run").exists()
