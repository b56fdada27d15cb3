"""In what runs differ, other than by strategy: whether they can be compared at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loosestep.lab.runs import RunInfo

# Settings of the strategy, of where a run writes, or that `RunInfo` has as what came of them.
_OWN = {
    *("strategy", "period", "periods", "reducer", "overlap_steps", "warmup_steps"),
    *("out", "resume", "save_every", "keep", "tensorboard", "trace", "timeout"),
    *("data", "steps", "workers", "hosts"),
}
# Settings that make losses those of another experiment.
_DECISIVE = {
    *("seed", "task", "model", "width", "depth", "heads", "context", "image_size"),
    "eval_batches",
}
_LENGTH = {"tokens", "seconds"}  # settings that say when a run ends


@dataclass(frozen=True)
class Differences:
    """Each as ``steps (100; 200)``."""

    decisive: list[str]  # losses or times of these runs cannot be compared
    length: list[str]  # those at the end cannot either, but times to one loss can
    other: list[str]  # may matter: learning rate, versions


def differences(infos: Sequence[RunInfo]) -> Differences:
    """Return in what runs differ."""
    found = Differences([], [], [])
    seen: set[str] = set()
    for name, values, place in _facets(infos, found):
        shown = list(dict.fromkeys(_shown(value) for value in values))
        if len(shown) > 1 and name not in seen:
            seen.add(name)
            place.append(f"{name} ({'; '.join(shown)})")
    return found


def flat(found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one table: ``model.width``."""
    rows: dict[str, Any] = {}
    for key, value in found.items():
        name = f"{prefix}{key}"
        rows |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return rows


_Facet = tuple[str, list[Any], list[str]]  # a name, each run's value, where a difference belongs


def _facets(infos: Sequence[RunInfo], found: Differences) -> list[_Facet]:
    facets: list[_Facet] = [
        ("data", [i.data.get("sha256") or i.data.get("name") for i in infos], found.decisive),
        ("parameters", [info.num_parameters for info in infos], found.decisive),
        ("steps", [info.steps for info in infos], found.length),
        ("tokens per step", [info.tokens_per_step for info in infos], found.decisive),
        ("link", [info.link for info in infos], found.decisive),
        ("workers", [info.num_workers for info in infos], found.other),
        ("groups of workers", [info.topology for info in infos], found.other),
    ]
    configs = [flat(info.config) for info in infos]
    for name in dict.fromkeys(name for config in configs for name in config):
        parts = {name.split(".")[0], name.split(".")[-1]}
        if not _OWN & parts:
            place = found.decisive if _DECISIVE & parts else found.other
            place = found.length if _LENGTH & parts else place
            facets.append((name, [config.get(name) for config in configs], place))
    environments = [flat(info.environment) for info in infos]
    for name in dict.fromkeys(name for each in environments for name in each):
        facets.append((name, [each.get(name) for each in environments], found.other))
    return facets


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= 60 else f"{text[:12]}…{text[-12:]}"
