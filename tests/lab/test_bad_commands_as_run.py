"""Bad commands in processes of their own: what they print and how they end.

One that is refused at once, and one that its workers end on the way; the others are in
test_bad_commands.py, in one process.
"""

from __future__ import annotations

import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.commands import TINY, Done, begun

SECONDS = 120  # all of them at once, on few processors


def small_files() -> None:
    """Let no file grow beyond some kilobytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


BAD: dict[str, tuple[str, ...]] = {
    "did you mean '--steps'": ("train", "--stesp", "3"),
    "File too large": ("train", *TINY, "--steps", "2000", "--out", "full"),
}


def test_each_is_one_line_and_a_code_and_changes_nothing(tmp_path: Path):
    """Nothing but that line is printed as an error, by workers neither."""
    with ExitStack() as held:
        running: dict[str, Any] = {}
        for said, arguments in BAD.items():
            limit = small_files if said == "File too large" else None
            started = begun(*arguments, cwd=tmp_path, preexec_fn=limit)
            running[said] = held.enter_context(started)
        for said, process in running.items():
            out, err = process.communicate(timeout=SECONDS)
            assert said in Done(process.returncode, out, err).refused()
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
