"""Text as bytes: files, folders and globs, or the sources of Python's own standard library.

The bytes are cut into windows of a context and one more byte. Every twentieth run of windows is
held out, so that training never sees the bytes that it is judged by.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from loosestep.lab.trainer.mistakes import BadInput
from loosestep.lab.trainer.tasks import Batch
from loosestep.lab.trainer.transformer import Shape, Transformer

VOCABULARY = 256
DEFAULT_BYTES = 8 << 20  # of the standard library
HELD_OUT = 20  # one in so many runs of windows
RUN = 16  # windows in a run
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}
LOOKED_AT = 8192  # bytes of a file in which binary content shows


class Text:
    """Windows of a text, and a model of its next byte."""

    unit = "tokens"

    def __init__(self, name: str, content: bytes, shape: Shape) -> None:
        self._name, self._content, self._shape = name, content, shape
        self.units_per_sample = shape.context
        windows = (len(content) - 1) // shape.context
        if windows < 2 * HELD_OUT:
            raise BadInput(
                f"{name}: {len(content)} bytes make {max(windows, 0)} windows of {shape.context} "
                f"bytes, at least {2 * HELD_OUT} are needed; give more text or a smaller --context"
            )
        self._bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        runs = torch.arange(windows) // min(RUN, max(1, windows // (2 * HELD_OUT)))
        self._held_out = (runs % HELD_OUT == HELD_OUT - 1).nonzero().flatten()
        self._training = (runs % HELD_OUT != HELD_OUT - 1).nonzero().flatten()
        self.num_samples, self.num_held_out = len(self._training), len(self._held_out)

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Return training windows, and the same one byte later."""
        return self._windows(self._training[numbers])

    def held_out(self, numbers: torch.Tensor) -> Batch:
        """Return windows that are never trained on."""
        return self._windows(self._held_out[numbers])

    def _windows(self, windows: torch.Tensor) -> Batch:
        at = windows[:, None] * self._shape.context + torch.arange(self._shape.context + 1)
        found = self._bytes[at].long()
        return found[:, :-1], found[:, 1:]

    def make_model(self) -> torch.nn.Module:
        """Return a transformer for bytes."""
        return Transformer(VOCABULARY, self._shape)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the nats a byte."""
        logits = model(batch[0])
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

    def describe(self) -> dict[str, Any]:
        """Return what was read."""
        digest = hashlib.sha256(self._content).hexdigest()
        return {"name": self._name, "bytes": len(self._content), "sha256": digest}


def read_text(sources: Sequence[str], limit: int | None, shape: Shape) -> Text:
    """Read files, folders and globs in a fixed order, or the standard library if none is given."""
    if not sources:
        content = _read(_standard_library(), limit or DEFAULT_BYTES)
        return Text("Python standard library", content, shape)
    content = _read(_files(sources), limit)
    name = ", ".join(Path(source).name or source for source in sources)
    if not content:
        raise BadInput(f"{', '.join(sources)}: no text in it; give files that are not empty")
    return Text(name, content, shape)


def _read(files: Iterator[Path], limit: int | None) -> bytes:
    parts: list[bytes] = []
    length = 0
    for file in files:
        content = _content(file)
        parts.append(content if limit is None else content[: limit - length])
        length += len(parts[-1])
        if limit is not None and length >= limit:
            break
    return b"".join(parts)


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    return content if content.endswith(b"\n") or not content else content + b"\n"


def _standard_library() -> Iterator[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_paths()["stdlib"]):
        inner[:] = [name for name in inner if name not in NOT_LIBRARY]  # not even looked into
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from sorted(found)


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        path = Path(source)
        if path.is_dir():
            yield from _in_folder(path)
        elif path.exists():
            if is_binary(path):
                raise BadInput(f"{path}: this is binary data and no text; give text files")
            yield path
        else:
            yield from _matching(source)


def _matching(pattern: str) -> Iterator[Path]:
    found = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    if not found:
        raise BadInput(f"{pattern}: no such file or folder, and no file matches it")
    for path in found:
        if path.is_dir():
            yield from _in_folder(path)
        elif not is_binary(path):
            yield path


def _in_folder(folder: Path) -> Iterator[Path]:
    paths = sorted(folder.rglob("*"))
    found = [p for p in paths if p.is_file() and not _hidden(p.relative_to(folder))]
    texts = [path for path in found if not is_binary(path)]
    if not texts:
        raise BadInput(f"{folder}: none of its {len(found)} files is text")
    yield from texts


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") and part not in (".", "..") for part in path.parts)


def is_binary(path: Path) -> bool:
    """Say whether a file holds what no text does: zero bytes, or mostly control characters."""
    try:
        with open(path, "rb") as file:
            start = file.read(LOOKED_AT)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    control = sum(byte < 32 and byte not in b"\t\n\r\f\x1b" for byte in start)
    return b"\0" in start or control > len(start) // 10
