"""Everything that a run can be told, once: flags, TOML files and logs are made of it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from loosestep.lab.trainer.mistakes import BadInput, nearest
from loosestep.lab.trainer.specs import Spec, parse_periods, parse_spec

TASKS = ("text", "images")
MOST_SEEDS = 1 << 31


def option(default: Any, group: str, text: str, metavar: str = "N") -> Any:
    """Declare a setting: its default, where ``--help`` lists it, and what it says there."""
    return field(default=default, metadata={"group": group, "help": text, "metavar": metavar})


DATA, MODEL, TRAIN, SHARE, RUN, LOG = (
    "what is trained on",
    "the model",
    "how it is trained",
    "what workers share",
    "where it runs",
    "what is kept",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training run."""

    data: tuple[str, ...] = ()  # files, folders, globs
    task: str = option("text", DATA, "text or images", "TASK")
    data_bytes: int | None = option(
        None, DATA, "read at most so many bytes (default: all; 8 MB of the standard library)"
    )
    image_size: int = option(32, DATA, "pixels on a side to which images are scaled")

    width: int = option(128, MODEL, "numbers at every position")
    depth: int = option(4, MODEL, "layers")
    heads: int = option(4, MODEL, "attention heads")
    context: int = option(128, MODEL, "bytes that the model sees")

    batch: int = option(8, TRAIN, "samples of a worker in a micro-batch")
    accumulate: int = option(1, TRAIN, "micro-batches in a step")
    steps: int | None = option(None, TRAIN, "optimizer steps (default: 200)")
    tokens: int | None = option(None, TRAIN, "or: tokens (images) of all workers together")
    seconds: float | None = option(None, TRAIN, "or: seconds of training", "S")
    lr: float = option(2e-3, TRAIN, "highest learning rate", "LR")
    lr_warmup: int = option(20, TRAIN, "steps in which it grows")
    lr_floor: float = option(0.1, TRAIN, "what the cosine leaves of it", "SHARE")
    weight_decay: float = option(0.1, TRAIN, "of AdamW", "W")
    clip: float = option(1.0, TRAIN, "largest norm of the gradient; 0: do not clip", "NORM")
    seed: int = option(0, TRAIN, "of the model and of the order of the data")
    bf16: bool = option(False, TRAIN, "compute in bfloat16 (parameters stay in float32)")
    compile: bool = option(False, TRAIN, "compile the model with torch.compile")

    strategy: str = option(
        "ddp", SHARE, "a recipe and its options: post_local_sgd:period=8,reducer=int4", "SPEC"
    )
    period: int | None = option(None, SHARE, "steps between averages")
    periods: str | None = option(None, SHARE, "the same by level: host=4,world=32", "PERIODS")
    reducer: str | None = option(
        None,
        SHARE,
        "mean, shared, bf16, fp16, int8, int4, int2, ternary, top1%%, top1%%2bit, mask0.5%%; "
        "+ef, +rf: with feedback",
        "REDUCER",
    )
    overlap_steps: int | None = option(None, SHARE, "steps that an average may travel for")
    warmup_steps: int | None = option(None, SHARE, "steps that share gradients with all at first")

    workers: int | None = option(None, RUN, "start so many workers on this machine (default: 2)")
    hosts: int | None = option(None, RUN, "take the workers for so many hosts, in equal parts")
    timeout: float = option(60.0, RUN, "longest wait for another worker", "S")
    threads: int = option(1, RUN, "of torch in every worker")

    out: str | None = option(None, LOG, "folder of the run (default: runs/STRATEGY-DATE)", "DIR")
    eval_every: int = option(50, LOG, "steps between looks at held-out data; 0: only at the end")
    eval_batches: int = option(8, LOG, "batches of held-out data that all workers look at")
    save_every: int = option(0, LOG, "steps between checkpoints; 0: none but when interrupted")
    keep: int = option(2, LOG, "checkpoints that are kept")
    resume: str | None = option(
        None, LOG, "go on from a checkpoint or the last one of a run", "DIR"
    )
    tensorboard: bool = option(False, LOG, "write TensorBoard's event files too")
    trace: bool = option(False, LOG, "write a trace for Perfetto or chrome://tracing")

    def __post_init__(self) -> None:
        """Refuse what makes no run."""
        _check_numbers(self)
        _check_choices(self)

    @property
    def spec(self) -> Spec:
        """The strategy, with what was given beside it."""
        periods = None if self.periods is None else parse_periods(self.periods)
        return parse_spec(self.strategy).having(
            period=self.period,
            periods=periods,
            reducer=self.reducer,
            overlap_steps=self.overlap_steps,
            warmup_steps=self.warmup_steps,
        )

    def num_steps(self, tokens_per_step: int, done: int = 0, seen: int = 0) -> int | None:
        """Return how many steps there are, done ones included; None: as many as fit in the time.

        Other workers may have ``seen`` more or fewer tokens in a step.
        """
        if self.tokens is not None:
            return max(1, done + max(0, self.tokens - seen) // tokens_per_step)
        if self.seconds is not None:
            return self.steps
        return 200 if self.steps is None else self.steps


def _check_numbers(settings: Settings) -> None:
    positive = "batch accumulate lr eval_batches keep timeout threads image_size".split()
    positive += "steps tokens seconds workers hosts data_bytes".split()
    for name in positive:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"{flag(name)} must be more than 0, got {value}")
    for name in "lr_warmup lr_floor weight_decay clip eval_every save_every".split():
        if not 0 <= getattr(settings, name) < math.inf:
            raise BadInput(f"{flag(name)} must not be less than 0, got {getattr(settings, name)}")
    if not 0 <= settings.seed < MOST_SEEDS:
        raise BadInput(f"--seed must be from 0 to {MOST_SEEDS - 1}, got {settings.seed}")


def _check_choices(settings: Settings) -> None:
    if settings.task not in TASKS:
        hint = nearest(settings.task, TASKS)
        raise BadInput(f"--task must be text or images, got {settings.task!r}{hint}")
    if settings.steps is not None and settings.tokens is not None:
        raise BadInput("give --steps or --tokens, not both")
    if settings.hosts and settings.workers and settings.workers % settings.hosts:
        raise BadInput(
            f"--workers must be a multiple of --hosts: {settings.workers} is none of "
            f"{settings.hosts}"
        )


def options() -> list[Field[Any]]:
    """Return the settings that have a flag."""
    return [f for f in fields(Settings) if "group" in f.metadata]


def read_toml(path: str) -> dict[str, Any]:
    """Return the settings in a TOML file, by name; ``[strategy]`` may be a table."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: no TOML: {error}") from error
    given = {name.replace("-", "_"): value for name, value in content.items()}
    known = [f.name for f in fields(Settings)]
    for name, value in given.items():
        if name not in known:
            raise BadInput(f"{path}: there is no setting {name!r}{nearest(name, known)}")
        given[name] = _read_value(path, name, value)
    return given


def read_saved(place: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run has written down; raise for those that it cannot have had."""
    given = dict(saved)
    for name, value in given.items():
        if value is not None or default_of(_field(name)) is not None:
            given[name] = _read_value(place, name, value)
    return given


def settings_from(given: Mapping[str, Any]) -> Settings:
    """Make settings of what was given; what was not has its default."""
    return Settings(**{name: value for name, value in given.items() if value is not None})


def changed(settings: Settings, **changes: Any) -> Settings:
    """Return the same settings with some changed."""
    return replace(settings, **changes)


def _read_value(place: str, name: str, value: Any) -> Any:
    if name == "strategy" and isinstance(value, dict):
        if "name" not in value:
            raise BadInput(f"{place}: [strategy] needs a name, such as name = 'post_local_sgd'")
        options = {key: item for key, item in value.items() if key != "name"}
        return str(Spec(str(value["name"]), options))
    if name == "periods" and isinstance(value, dict):
        return ",".join(f"{level}={period}" for level, period in value.items())
    if name == "data":
        return _read_data(place, [value] if isinstance(value, str) else value)
    kind = kind_of(_field(name))
    allowed = (int, float) if kind is float else kind
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, allowed):
        raise BadInput(f"{place}: {name} must be of type {kind.__name__}, got {value!r}")
    return value


def _read_data(place: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(source, str) for source in value):
        raise BadInput(f"{place}: data must be a name or a list of names, got {value!r}")
    return tuple(value)


def kind_of(setting: Field[Any]) -> type:
    """Return the type of a setting's values.

    >>> kind_of(next(f for f in options() if f.name == "seconds"))
    <class 'float'>
    """
    text = str(setting.type).split(" |")[0]
    return {"int": int, "float": float, "bool": bool}.get(text, str)


def default_of(setting: Field[Any]) -> Any:
    """Return what a setting is when it is not given."""
    return None if setting.default is MISSING else setting.default


def _field(name: str) -> Field[Any]:
    return next(f for f in fields(Settings) if f.name == name)


def flag(name: str) -> str:
    """Return how a setting is given on a command line."""
    return "--" + name.replace("_", "-")
