"""In what runs differ, other than by strategy: whether they can be compared at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loosestep.runs import RunInfo

# Settings of the strategy, of where a run writes, or that `RunInfo` has as what came of them.
_OWN = {
    *("strategy", "period", "levels", "wire", "overlap", "warmup"),
    *("out", "resume", "save_every", "keep", "tensorboard", "trace", "timeout"),
    *("data", "steps", "workers", "hosts"),
}
# Settings that make losses those of another experiment.
_DECISIVE = {
    *("seed", "task", "model", "width", "depth", "heads", "context", "image_size"),
    *("tokens", "seconds", "eval_batches"),
}


@dataclass(frozen=True)
class Differences:
    """Each as ``steps (100; 200)``."""

    decisive: list[str]  # losses or times of these runs cannot be compared
    other: list[str]  # may matter: learning rate, versions


def differences(infos: Sequence[RunInfo]) -> Differences:
    """Return in what runs differ."""
    found = Differences([], [])
    seen: set[str] = set()
    for name, values, is_decisive in _facets(infos):
        shown = list(dict.fromkeys(_shown(value) for value in values))
        if len(shown) > 1 and name not in seen:
            seen.add(name)
            (found.decisive if is_decisive else found.other).append(f"{name} ({'; '.join(shown)})")
    return found


def flat(found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one table: ``model.width``."""
    rows: dict[str, Any] = {}
    for key, value in found.items():
        name = f"{prefix}{key}"
        rows |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return rows


def _facets(infos: Sequence[RunInfo]) -> list[tuple[str, list[Any], bool]]:
    facets: list[tuple[str, list[Any], bool]] = [
        ("data", [info.data.get("sha256") or info.data.get("name") for info in infos], True),
        ("parameters", [info.num_parameters for info in infos], True),
        ("steps", [info.steps for info in infos], True),
        ("tokens per step", [info.tokens_per_step for info in infos], True),
        ("link", [info.link for info in infos], True),
        ("workers", [info.num_workers for info in infos], False),
        ("groups of workers", [info.topology for info in infos], False),
    ]
    configs = [flat(info.config) for info in infos]
    for name in dict.fromkeys(name for config in configs for name in config):
        parts = name.split(".")
        if not _OWN & {parts[0], parts[-1]}:
            values = [config.get(name) for config in configs]
            facets.append((name, values, bool(_DECISIVE & {parts[0], parts[-1]})))
    environments = [flat(info.environment) for info in infos]
    for name in dict.fromkeys(name for found in environments for name in found):
        facets.append((name, [found.get(name) for found in environments], False))
    return facets


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= 60 else f"{text[:12]}…{text[-12:]}"
