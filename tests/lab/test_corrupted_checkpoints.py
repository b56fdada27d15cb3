"""Checkpoints whose manifest has changed on the disk or by hand: one line, and nothing begun."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from loosestep.lab.trainer import checkpoint
from tests.support.commands import TINY, call, read_json

CORRUPTED = "corrupted: its content is not what was written; take an older one"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert call("train", *TINY, "--steps", "2", "--save-every", "2", "--out", folder).code == 0
    return folder


@pytest.fixture
def manifest(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a run into an empty folder, where whatever is left behind shows."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / "copy")
    return checkpoint.find(str(tmp_path / "copy")) / checkpoint.MANIFEST


def refused(manifest: Path) -> str:
    """Resume the run; return what was said, and check that nothing was done."""
    done = call("train", "--resume", "copy", "--steps", "4")
    assert done.code == 2
    assert [path.name for path in Path().iterdir()] == ["copy"]
    said = done.refused()
    assert str(manifest.parent.relative_to(Path.cwd())) in said
    return said


@pytest.mark.parametrize("field", ["step", "num_workers", "samples", "seed", "width", "bytes"])
def test_a_digit_that_changed_is_noticed(manifest: Path, field: str):
    content = manifest.read_text()
    changed = re.sub(rf'("{field}": \d*)(\d)', lambda m: f"{m[1]}{int(m[2]) ^ 1}", content, count=1)
    assert changed != content
    manifest.write_text(changed)
    assert f"{checkpoint.MANIFEST}: {CORRUPTED}" in refused(manifest)


def test_a_byte_that_no_text_has_is_noticed(manifest: Path):
    manifest.write_bytes(manifest.read_bytes().replace(b"strategy", b"str\xffategy", 1))
    assert "is broken: 'utf-8' codec can't decode byte 0xff" in refused(manifest)


def test_a_manifest_that_was_cut_short_is_noticed(manifest: Path):
    manifest.write_bytes(manifest.read_bytes()[:-3])
    assert "manifest.json is broken: " in refused(manifest)


def test_a_checkpoint_from_before_there_was_a_hash_is_refused(manifest: Path):
    content = manifest.read_text().replace('"format": 2', '"format": 1')
    manifest.write_text(re.sub(r',\s+"sha256": "\w+"\s*}\s*$', "}", content))
    assert "of format 1, and this version reads 2; go on with the version" in refused(manifest)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("settings", None, "'settings' must be settings by name, got None"),
        ("settings", {"steps": "abc"}, "settings: steps must be of type int, got 'abc'"),
        ("settings", {"data": 5}, "settings: data must be a name or a list of names, got 5"),
        ("settings", {"width": None}, "settings: width must be of type int, got None"),
        ("settings", {"batch": 0}, "--batch must be more than 0, got 0"),
        ("settings", {"colour": 1}, "made by another version, with a setting 'colour'"),
        ("model", None, "'model' must be shapes by name, got None"),
        ("model", {"a": 3}, "'model' must be shapes by name, got {'a': 3}"),
        ("data", {"name": "a", "bytes": 3}, "'data' must be name, bytes and sha256, got"),
        ("step", "2", "'step' must be a whole number from 0 on, got '2'"),
        ("step", -1, "'step' must be a whole number from 0 on, got -1"),
        ("samples", 1.5, "'samples' must be a whole number from 0 on, got 1.5"),
        ("seed", True, "'seed' must be a whole number from 0 on, got True"),
        ("num_workers", 0, "'num_workers' must be a whole number from 1 on, got 0"),
        ("files", [], "'files' must be hashes by name, got []"),
        ("strategy", None, "'strategy' must be a text, got None"),
        ("colour", 1, "'colour' is no field of it"),
    ],
)
def test_what_no_run_writes_is_refused_also_with_the_right_hash(
    manifest: Path, field: str, value: Any, said: str
):
    edit(manifest, {field: value})
    assert said in refused(manifest)


@pytest.mark.parametrize("field", ["step", "data", "settings", "layout", "files"])
def test_a_field_that_is_missing_is_named(manifest: Path, field: str):
    edit(manifest, {}, without=field)
    assert f"manifest.json is broken: '{field}' is missing; take an older one" in refused(manifest)


def test_what_is_edited_with_care_is_taken(manifest: Path):
    edit(manifest, {"settings": {**read_json(manifest)["settings"], "steps": 3}})
    done = call("train", "--resume", "copy", "--out", "again")
    assert (done.code, done.err) == (0, "")
    assert read_json(Path("again/run.json"))["steps"] == 3


def edit(manifest: Path, changes: dict[str, Any], without: str = "sha256") -> None:
    """Change a manifest as a user may, and make its hash anew."""
    body = {**read_json(manifest), **changes}
    body = {name: value for name, value in body.items() if name not in ("sha256", without)}
    manifest.write_text(json.dumps(checkpoint.sealed(body)))
