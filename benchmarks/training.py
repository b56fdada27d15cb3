"""Training a transformer of 10.7M parameters on two hosts with two workers each, at 100 Mbit/s.

The hosts are network namespaces. In one run, seed by seed: computing alone (the floor), DDP,
PyTorch's hierarchical averaging with gradients shared inside a host, and loosestep at the same
periods, at a short one, and with gradients in few bits at every step. Measured are seconds a step,
from the first to the last; the held-out loss after the tokens that DDP has seen; and the time to
the loss that DDP reaches with them. Learning rates are constant after a warm-up, so that those who
may train longer have trained alike until then; ``training_losses`` has the losses of whole
trainings. Time and bytes of evaluations are left out.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Row
from loosestep.lab.emulation import EmulatedHosts, Link, missing
from loosestep.lab.report import write_report
from loosestep.lab.report.facts import Facts, facts_of
from loosestep.lab.runs import read_run
from loosestep.lab.trainer.launch import run_here
from loosestep.lab.trainer.orders import Orders
from loosestep.lab.trainer.settings import Settings

RATE, HOSTS, EACH = "100mbit", 2, 2
STEPS = 30  # of DDP, after which losses are compared
LONGER = 45  # of the others, so that they can come to DDP's loss
EVERY = 15  # steps between evaluations: never while an average is under way, which they wait for
RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m benchmarks training".split()  # as the report shows it

LOOSE = "post_local_sgd:period={},warmup_steps=0,gradient_reducer=shared,"
HIDDEN = LOOSE + "reducer=int4,overlap_steps=4"
EVERY_STEP = "ddp:gradient_reducer=shared+ternary"  # 1.6 bits of gradients between hosts
OFTEN = LOOSE.format(4) + "reducer=int2+rf"  # a delay would cost more of the loss than it hides


@dataclass(frozen=True)
class Contender:
    """A strategy, and for how long it trains."""

    name: str
    spec: str
    steps: int = LONGER


CONTENDERS = (
    Contender("DDP", "torch-ddp", STEPS),
    Contender("in-tree, period 8", "torch-hierarchical:world=8"),
    Contender("in-tree, period 32", "torch-hierarchical:world=32"),
    Contender("loosestep, period 8", HIDDEN.format(8)),
    Contender("loosestep, period 4", OFTEN),
    Contender("loosestep, every step", EVERY_STEP),
    Contender("compute alone", "alone", STEPS),  # beside those that should come near it
    Contender("loosestep, period 32", HIDDEN.format(32)),
)
AGAIN = CONTENDERS[-3:]  # a second time: they differ by less than the machine does

SHARING = [contender.name for contender in CONTENDERS if contender.spec != "alone"]

SETTINGS = Settings(
    width=384,
    depth=6,
    heads=6,
    context=100,  # so that computing alone takes 0.4 to 0.5 s on two slow processors
    batch=2,
    lr=1e-3,
    lr_warmup=8,
    lr_floor=1.0,
    hosts=HOSTS,
    eval_every=EVERY,
    eval_batches=16,
    timeout=300.0,
)


def run(rounds: int) -> list[Row]:
    """Train with ``min(rounds, 3)`` seeds."""
    if missing():
        print(f"left out: {missing()}")
        return []
    with tempfile.TemporaryDirectory() as folder:
        runs = [_train_all(seed, Path(folder)) for seed in range(min(rounds, 3))]
        RESULTS.mkdir(exist_ok=True)
        own = [run_folder(Path(folder), contender.name, 0) for contender in CONTENDERS]
        # DDP's loss, since the others train for longer; computing alone is shown and not ranked.
        target = loss_at(runs[0]["DDP"][0], STEPS)
        write_report(own, RESULTS / "training.html", target=target)
    return [*_speeds(runs), *_pairs(runs), *losses(_first(runs)), *_times(_first(runs))]


def _train_all(seed: int, folder: Path) -> dict[str, list[Facts]]:
    found = {contender.name: [train(contender, seed, folder)] for contender in CONTENDERS}
    for contender in AGAIN:
        found[contender.name].append(train(contender, seed, folder / "again"))
    return found


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{seed}-{name.replace(' ', '-').replace(',', '')}"


def train(
    contender: Contender,
    seed: int,
    folder: Path,
    settings: Settings = SETTINGS,
    rate: str = RATE,
) -> Facts:
    """Train once, on hosts of its own."""
    own = run_folder(folder, contender.name, seed)
    own.mkdir(parents=True)
    settings = replace(settings, strategy=contender.spec, seed=seed, steps=contender.steps)
    link = {"rate": rate, "hosts": HOSTS, "workers_per_host": EACH}
    orders = Orders(settings=settings, folder=own, name=contender.name, command=COMMAND, link=link)
    with EmulatedHosts(HOSTS, Link(rate)) as hosts:
        outcome = run_here(orders, HOSTS, HOSTS * EACH, hosts, lambda: None)
    if outcome.code:
        raise RuntimeError(f"{contender.name}: {outcome.message}")
    (facts,) = facts_of([read_run(own)])
    print(f"seed {seed}  {contender.name:22} {step_seconds(facts):6.2f} s a step", flush=True)
    return facts


def step_seconds(facts: Facts) -> float:
    """Return the mean time of a step, from the end of the first one to that of the last."""
    first, last = facts.course.train[0], facts.course.train[-1]
    return (last.seconds - first.seconds) / (last.step - first.step)


def loss_at(facts: Facts, step: int) -> float:
    """Return the loss after a step; at the end of training, that of the result."""
    return [p.loss for p in facts.course.evals if p.step == step and p.loss is not None][-1]


def _first(runs: list[dict[str, list[Facts]]]) -> list[dict[str, Facts]]:
    return [{name: found[0] for name, found in one.items()} for one in runs]


def _speeds(runs: list[dict[str, list[Facts]]]) -> list[Row]:
    found = {name: [step_seconds(f) for one in runs for f in one[name]] for name in runs[0]}
    medians = {name: statistics.median(values) for name, values in found.items()}
    return [
        Row(
            "seconds a step",
            name,
            medians[name],
            (min(values), max(values)),
            {other: medians[other] / medians[name] for other in _others(name)},
            "s",
        )
        for name, values in found.items()
    ]


def _pairs(runs: list[dict[str, list[Facts]]]) -> list[Row]:
    """How much longer steps take than computing alone right before or after."""
    result, (alone,) = [], [one.name for one in AGAIN if one.spec == "alone"]
    for near in (one.name for one in AGAIN if one.spec != "alone"):
        ratios = [
            step_seconds(b) / step_seconds(a)
            for one in runs
            for a, b in zip(one[alone], one[near], strict=True)
        ]
        print(f"{near}, times computing alone, in pairs: {[round(ratio, 2) for ratio in ratios]}")
        spread, median = (min(ratios), max(ratios)), statistics.median(ratios)
        result.append(Row("times compute alone, in pairs", near, median, spread, {}, "x"))
    return result


def _others(name: str) -> list[str]:
    period = f"in-tree, {name.split(', ')[-1]}"
    rivals = ["compute alone", "DDP", *([period] if period in SHARING else [])]
    return [other for other in rivals if other != name]


def losses(runs: list[dict[str, Facts]], step: int = STEPS) -> list[Row]:
    """Held-out losses after as many tokens, and how many times DDP's they are."""
    result = []
    for name in (name for name in SHARING if name in runs[0]):
        values = [loss_at(one[name], step) for one in runs]
        over = [loss_at(one[name], step) / loss_at(one["DDP"], step) for one in runs]
        print(f"{name}, times DDP's loss, by seed: {[round(ratio, 4) for ratio in over]}")
        ratios = {"DDP's loss": statistics.mean(over)}
        spread = (min(values), max(values))
        result.append(
            Row("loss, same tokens", name, statistics.mean(values), spread, ratios, "nats")
        )
    return result


def _times(runs: list[dict[str, Facts]]) -> list[Row]:
    """Seconds until the loss that DDP has reached; those that never do are left out."""
    result, ddp = [], statistics.median([one["DDP"].seconds for one in runs])
    for name in SHARING:
        found = [one[name].seconds_to(loss_at(one["DDP"], STEPS)) for one in runs]
        times = [seconds for seconds in found if seconds is not None]
        if len(times) < len(runs):
            print(f"{name} came to DDP's loss with {len(times)} of {len(runs)} seeds")
        if times:
            median, spread = statistics.median(times), (min(times), max(times))
            result.append(
                Row("time to DDP's loss", name, median, spread, {"DDP": ddp / median}, "s")
            )
    return result
