"""Where records go."""

from __future__ import annotations

import json
import math
import os
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """Takes records, one at a time."""

    def write(self, record: dict[str, Any]) -> None:
        """Keep one record."""

    def close(self) -> None:
        """Let go of files."""


class JsonLines:
    """One JSON object a line, flushed at once, so that a crash loses nothing.

    Give every rank a file of its own: ``JsonLines(f"run-{rank}.jsonl")``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        place = _checked("path", path, "run-0.jsonl")
        self._file = open(place, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        finite = {key: _finite(value) for key, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _checked(what: str, path: object, example: str) -> str:
    """Return a path as text; raise for what is none. Whether it can be written, the system says."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{what} must be a path such as {example!r}, got {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(
            f"{what} must be a path that is not empty and has no zero in it, got {path!r}; give "
            f"for example {example!r}"
        )
    return text


def _finite(value: Any) -> Any:
    # JSON has no infinity; most readers refuse the word.
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Scalars ``kind/level/quantity`` for TensorBoard (``pip install loosestep[tensorboard]``)."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        place = _checked("log_dir", log_dir, "runs/first")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "the TensorBoard sink needs tensorboard: pip install 'loosestep[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(place)

    def write(self, record: dict[str, Any]) -> None:
        """Add one scalar for every number of the record."""
        prefix = f"{record['kind']}/{record['level']}"
        for quantity in ("seconds", "seconds_waited", "bytes_sent", "bytes_copied", "drift"):
            if record[quantity] is not None:
                self.add(f"{prefix}/{quantity}", record[quantity], record["step"])

    def add(self, name: str, value: float, step: int) -> None:
        """Add a scalar of your own, such as the loss."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
