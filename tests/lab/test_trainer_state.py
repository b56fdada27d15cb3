"""Checkpoints on disk, and workers that agree when to stop."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from loosestep.lab.trainer import checkpoint
from loosestep.lab.trainer import part_files as parts
from loosestep.lab.trainer.checkpoint import Manifest
from loosestep.lab.trainer.launch import Team
from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.saved import check_settings, saved_settings
from loosestep.lab.trainer.saving import check_fits
from loosestep.lab.trainer.settings import Settings, changed
from loosestep.lab.trainer.stopping import Stopping

# Checkpoints


DATA = {"name": "a text", "bytes": 9, "sha256": "abc"}


def model(width: int = 2) -> torch.nn.Module:
    return torch.nn.Linear(width, 1)


def save(
    run: Path,
    step: int,
    states: list[dict[str, Any]],
    keep: int = 2,
    settings: Settings | None = None,
) -> Path:
    folder = checkpoint.partial_folder(run, step)
    hashes = [parts.write_part(folder, rank, state) for rank, state in enumerate(states)]
    manifest = Manifest(
        step=step,
        num_workers=len(states),
        model=checkpoint.shapes_of(model()),
        strategy="ddp",
        seed=0,
        data=DATA,
        samples=4 * step,
        files={f"rank-{rank}.pt": digest for rank, digest in enumerate(hashes)},
        settings=asdict(settings or Settings()),
    )
    return checkpoint.complete(run, manifest, keep)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path):
    state = {"model": {"weight": torch.tensor([1.5])}, "step": 7}
    folder = save(tmp_path, 7, [state])
    manifest = checkpoint.read_manifest(checkpoint.find(str(tmp_path)))
    assert (manifest.step, manifest.samples, manifest.num_workers) == (7, 28, 1)
    assert Settings(**saved_settings(folder, manifest)) == Settings()
    found = parts.read_part(folder, manifest, 0)
    assert found["step"] == 7
    assert torch.equal(found["model"]["weight"], torch.tensor([1.5]))
    assert checkpoint.run_of(folder) == tmp_path


def test_the_mean_of_states_is_that_of_their_floats():
    one = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "list": [torch.tensor([0.0])]}
    other = {"w": torch.tensor([3.0, 6.0]), "n": torch.tensor(9), "list": [torch.tensor([1.0])]}
    mean = parts.mean_state([one | {"lr": 0.5}, other | {"lr": 0.1}])
    assert mean["w"].tolist() == [2.0, 4.0]
    assert mean["list"][0].tolist() == [0.5]
    assert (mean["n"].item(), mean["lr"]) == (3, 0.5)
    assert mean["w"].dtype == torch.float32


@pytest.mark.parametrize("place", [0, -1])
def test_a_byte_that_changed_is_noticed(tmp_path: Path, place: int):
    folder = save(tmp_path, 1, [{"a": torch.ones(9)}])
    content = bytearray((folder / "rank-0.pt").read_bytes())
    content[place] ^= 1
    (folder / "rank-0.pt").write_bytes(content)
    with pytest.raises(BadInput, match=r"rank-0\.pt: corrupted"):
        parts.read_part(folder, checkpoint.read_manifest(folder), 0)


def test_a_part_that_is_missing_is_named(tmp_path: Path):
    folder = save(tmp_path, 1, [{}, {}])
    (folder / "rank-1.pt").unlink()
    manifest = checkpoint.read_manifest(folder)
    parts.read_part(folder, manifest, 0)
    with pytest.raises(BadInput, match=r"rank-1\.pt: missing"):
        parts.read_part(folder, manifest, 1)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "[" * 100_000, '{"format": 1}', '{"format": 2}', '{"format": 99}', "\udcff"],
)
def test_a_broken_manifest_is_refused(tmp_path: Path, content: str):
    folder = save(tmp_path, 1, [{}])
    (folder / checkpoint.MANIFEST).write_text(content, errors="surrogateescape")
    with pytest.raises(BadInput, match=str(folder)):
        checkpoint.read_manifest(folder)


def test_every_digit_of_a_manifest_counts(tmp_path: Path):
    """Its layout does not: what an editor has indented anew is the same."""
    path = save(tmp_path, 1, [{}]) / checkpoint.MANIFEST
    content = path.read_text()
    path.write_text(json.dumps(json.loads(content)))
    checkpoint.read_manifest(path.parent)
    for place in [place for place, letter in enumerate(content) if letter.isdigit()]:
        flipped = chr(ord(content[place]) ^ 1)
        path.write_text(content[:place] + flipped + content[place + 1 :])
        with pytest.raises(BadInput, match=r"corrupted|of format 3|is broken"):
            checkpoint.read_manifest(path.parent)


def test_another_model_or_data_or_order_is_refused(tmp_path: Path):
    folder = save(tmp_path, 1, [{}])
    manifest = checkpoint.read_manifest(folder)
    check_fits(folder, manifest, model(), DATA, seed=0)
    with pytest.raises(BadInput, match=r"weight has shape \[1, 2\] there and \[1, 3\] here"):
        check_fits(folder, manifest, model(3), DATA, seed=0)
    with pytest.raises(BadInput, match="order of --seed 5, not of 0"):
        check_fits(folder, replace(manifest, seed=5), model(), DATA, seed=0)
    with pytest.raises(BadInput, match="its data is a text, 9 bytes, and this is a text, 9 bytes"):
        check_fits(folder, manifest, model(), DATA | {"sha256": "def"}, seed=0)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"heads": 2}, "--heads is 4 there and 2 here; give --heads 4, or start anew"),
        ({"context": 64}, {"context": 32}, "--context is 64 there and 32 here"),
        ({}, {"task": "images"}, "--task is text there and images here"),
        ({"task": "images"}, {"width": 64}, "--width is 128 there and 64 here"),
        ({"task": "images", "data": ("cats",)}, {"image_size": 8}, "--image-size is 32 there"),
        ({"task": "images", "data": ("cats",)}, {"depth": 8}, None),
        ({"task": "images"}, {"image_size": 8}, None),  # the digits are not scaled
        ({}, {"image_size": 8, "lr": 1.0, "batch": 3, "workers": 5}, None),
    ],
)
def test_settings_that_make_another_model_are_refused(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], said: str | None
):
    """Most of them would show in no shape of the state."""
    settings = Settings(**before)
    folder = save(tmp_path, 1, [{}], settings=settings)
    manifest = checkpoint.read_manifest(folder)
    check_settings(folder, manifest, settings)
    if said is None:
        check_settings(folder, manifest, changed(settings, **now))
        return
    with pytest.raises(BadInput, match=f"{folder}: a checkpoint of another model: {said}"):
        check_settings(folder, manifest, changed(settings, **now))


def test_what_was_not_written_to_its_end_is_no_checkpoint(tmp_path: Path):
    whole = save(tmp_path, 3, [{}])
    parts.write_part(checkpoint.partial_folder(tmp_path, 9), 0, {})
    assert checkpoint.find(str(tmp_path)) == whole
    checkpoint.discard(tmp_path, 9)
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


def test_the_last_checkpoints_are_kept_and_the_newest_is_found(tmp_path: Path):
    for step in (5, 50, 500, 6):
        save(tmp_path, step, [{}], keep=2)
    kept = sorted(path.name for path in (tmp_path / checkpoint.FOLDER).iterdir())
    assert kept == ["step-00000050", "step-00000500"]
    assert checkpoint.find(str(tmp_path)).name == "step-00000500"


def test_the_same_step_can_be_saved_again(tmp_path: Path):
    save(tmp_path, 1, [{"a": 1}])
    folder = save(tmp_path, 1, [{"a": 2}])
    assert parts.read_part(folder, checkpoint.read_manifest(folder), 0) == {"a": 2}


def test_a_part_on_another_disk_is_missed_before_anything_is_called_saved(tmp_path: Path):
    """Workers that do not share the folder of the run are told so when they save."""
    folder = checkpoint.partial_folder(tmp_path, 3)
    digest = parts.write_part(folder, 0, {"model": {}})
    manifest = Manifest(3, 2, {}, "ddp", 0, DATA, 12, {"rank-0.pt": digest, "rank-1.pt": ""}, {})
    with pytest.raises(OSError, match="must share the folder"):
        checkpoint.complete(tmp_path, manifest, 2)
    assert not checkpoint.has_checkpoint(tmp_path)


def test_nothing_to_find_is_said(tmp_path: Path):
    assert not checkpoint.has_checkpoint(tmp_path)
    with pytest.raises(BadInput, match="no whole checkpoint in it"):
        checkpoint.find(str(tmp_path))
    with pytest.raises(BadInput, match="no such checkpoint or run"):
        checkpoint.find(str(tmp_path / "none"))


# Stopping


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "hash":
        return HashStore()
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))


@pytest.fixture
def team(store: Store) -> Iterator[Callable[[int], list[Stopping]]]:
    with ExitStack() as undo:

        def make(size: int) -> list[Stopping]:
            members = [Stopping(store, rank, size, timeout=10.0) for rank in range(size)]
            for member in members:
                undo.callback(member.close)
            return members

        yield make


def run(workers: Sequence[Callable[[], int]]) -> list[int]:
    """Run bodies in threads; return what they return."""
    results = [-1] * len(workers)

    def body(number: int) -> None:
        results[number] = workers[number]()

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "workers wait for each other"
    return results


def test_workers_of_different_speed_stop_after_the_same_step(
    team: Callable[[int], list[Stopping]],
):
    members = team(3)

    def body(stopping: Stopping, seconds: float, asks_at: int | None) -> int:
        steps = 0
        while stopping.may_begin():
            steps += 1
            time.sleep(seconds)
            if steps == asks_at:
                stopping.ask("interrupted")
        return steps

    speeds = [(0.001, None), (0.01, 5), (0.004, None)]
    steps = run([partial(body, m, *s) for m, s in zip(members, speeds, strict=True)])
    assert len(set(steps)) == 1
    assert steps[0] > 5 * 0.01 / 0.004  # the fastest was ahead, and nobody turned back
    assert [member.reason for member in members] == ["interrupted"] * 3


def test_a_worker_that_waits_for_others_inside_a_step_is_not_locked_out(
    team: Callable[[int], list[Stopping]],
):
    members, average = team(2), threading.Barrier(2)

    def body(stopping: Stopping, slow: bool) -> int:
        steps = 0
        while stopping.may_begin():
            steps += 1
            time.sleep(0.05 if slow else 0.0)
            if steps == 3 and slow:
                stopping.ask("interrupted")  # while the other waits in the average of step 8
            if steps % 8 == 0:
                average.wait(10)
        return steps

    steps = run([lambda: body(members[0], True), lambda: body(members[1], False)])
    assert steps[0] == steps[1] >= 8


def test_two_who_ask_at_once_for_other_reasons_come_to_the_same_one(
    team: Callable[[int], list[Stopping]],
):
    members, together = team(2), threading.Barrier(2)

    def body(stopping: Stopping, reason: str) -> int:
        stopping.may_begin()
        together.wait(5)
        stopping.ask(reason)
        steps = 1
        while stopping.may_begin():
            steps += 1
            time.sleep(0.005)
        return steps

    steps = run([lambda: body(members[0], "finished"), lambda: body(members[1], "interrupted")])
    assert steps[0] == steps[1]
    assert members[0].reason == members[1].reason != ""


def test_a_store_that_ends_with_its_worker_ends_the_watch_quietly(
    capfd: pytest.CaptureFixture[str],
):
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5))
    member = Stopping(client, 0, 2, timeout=5.0)
    assert member.may_begin()
    del server
    member._thread.join(10)
    assert not member._thread.is_alive()
    assert member.may_begin()  # the next average says who is gone
    assert "Traceback" not in capfd.readouterr().err


# The team of workers, with processes that are quicker to start than real ones


def shell(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-c", body],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome_of(*bodies: str, interrupt: bool = False) -> tuple[int, str]:
    team = Team()
    for body in bodies:
        team.add(shell(body), "orders")
    if interrupt:
        time.sleep(0.3)
        team.interrupt()
    found = team.wait(lambda: None)
    return found.code, found.message


SAID = "echo 'loosestep: {}' >&2; exit {}"


@pytest.mark.parametrize(
    ("bodies", "outcome"),
    [
        (["exit 0", "exit 0"], (0, "")),
        (["exit 130", "exit 130"], (130, "")),
        (["exit 0", "kill -9 $$"], (1, "worker 1 ended by SIGKILL")),
        (["echo odd >&2; exit 7", "exit 0"], (1, "worker 0 failed with code 7: odd")),
        ([SAID.format("peer lost", 3), SAID.format("bad file", 2)], (2, "bad file")),
        ([SAID.format("peer lost", 3), SAID.format("defect", 1)], (1, "defect")),
        ([SAID.format("peer lost", 3), "kill -9 $$"], (1, "worker 1 ended by SIGKILL")),
        ([SAID.format("peer lost", 3), "exit 0"], (1, "peer lost")),
        (["read orders; test $orders = orders", "exit 0"], (0, "")),
    ],
)
def test_the_worker_that_explains_a_failure_is_the_one_that_is_shown(
    bodies: list[str], outcome: tuple[int, str]
):
    assert outcome_of(*bodies) == outcome


def test_workers_that_were_interrupted_before_they_listen_have_stopped_and_not_failed():
    began = time.monotonic()
    assert outcome_of("exec sleep 20", "exec sleep 20", interrupt=True) == (130, "")
    assert time.monotonic() - began < 10


def test_workers_end_when_another_has_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("loosestep.lab.trainer.launch.GRACE_SECONDS", 0.3)
    began = time.monotonic()
    assert outcome_of("exec sleep 60", "exit 2") == (2, "worker 1 failed with code 2")
    assert time.monotonic() - began < 10


def test_what_the_library_warns_of_is_handed_on_once():
    team = Team()
    body = "echo 'a.py:3: LoosestepWarning: no room' >&2; echo '  warn_once(' >&2"
    for _ in range(2):
        team.add(shell(body), "orders")
    assert team.wait(lambda: None).warnings == ["no room"]


def test_long_orders_arrive():
    team = Team()
    orders = "x" * 300_000  # more than fits into a pipe or a variable
    team.add(shell('test "$(head -n 1 | wc -c)" = 300001'), orders)
    assert team.wait(lambda: None).code == 0
