"""Training a transformer of 10.7M parameters on two hosts with two workers each, at 100 Mbit/s.

The hosts are network namespaces. In one run, seed by seed: computing alone (the floor), DDP,
PyTorch's hierarchical averaging with gradients shared inside a host, and loosestep at the same
periods. Measured are seconds a step, from the first to the last; the held-out loss after the tokens
that DDP has seen; and the time to the loss that DDP reaches with them. Learning rates are constant
after a warm-up, so that those who may train longer have trained alike until then. Time and bytes of
evaluations are left out.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Row
from loosestep.lab import EmulatedHosts, Link, missing
from loosestep.report import write_report
from loosestep.report.facts import Facts, facts_of
from loosestep.runs import read_run
from loosestep.trainer.launch import run_here
from loosestep.trainer.orders import Orders
from loosestep.trainer.settings import Settings

RATE, HOSTS, EACH = "100mbit", 2, 2
STEPS = 45  # of DDP, after which losses are compared
LONGER = 60  # of the others, so that they can come to DDP's loss
EVERY = 15  # steps between evaluations: never while an average is under way, which they wait for
RESULTS = Path(__file__).parent / "results"

LOOSE = "post_local_sgd:period={},warmup=0,gradient_wire=resident,wire=int4,overlap=4"


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
    Contender("loosestep, period 8", LOOSE.format(8)),
    Contender("compute alone", "alone", STEPS),  # beside those that should come near it
    Contender("loosestep, period 32", LOOSE.format(32)),
)

SHARING = [contender.name for contender in CONTENDERS if contender.spec != "alone"]

SETTINGS = Settings(
    width=384,
    depth=6,
    heads=6,
    context=128,
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
        runs = [
            {contender.name: train(contender, seed, Path(folder)) for contender in CONTENDERS}
            for seed in range(min(rounds, 3))
        ]
        last = sorted(Path(folder).glob("0-*"))
        RESULTS.mkdir(exist_ok=True)
        write_report([run for run in last if "compute" not in run.name], RESULTS / "training.html")
    return [*_speeds(runs), *_losses(runs), *_times(runs)]


def train(contender: Contender, seed: int, folder: Path) -> Facts:
    """Train once, on hosts of its own."""
    own = folder / f"{seed}-{contender.name.replace(' ', '-').replace(',', '')}"
    own.mkdir()
    settings = replace(SETTINGS, strategy=contender.spec, seed=seed, steps=contender.steps)
    link = {"rate": RATE, "hosts": HOSTS, "workers_per_host": EACH}
    orders = Orders(settings=settings, folder=own, name=contender.name, link=link)
    with EmulatedHosts(HOSTS, Link(RATE)) as hosts:
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
    return next(p.loss for p in facts.course.evals if p.step == step and p.loss is not None)


def _speeds(runs: list[dict[str, Facts]]) -> list[Row]:
    found = {name: [step_seconds(one[name]) for one in runs] for name in runs[0]}
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


def _others(name: str) -> list[str]:
    period = [f"in-tree, {name.split(', ')[1]}"] if name.startswith("loosestep") else []
    return [other for other in ("compute alone", "DDP", *period) if other != name]


def _losses(runs: list[dict[str, Facts]]) -> list[Row]:
    """Held-out losses after as many tokens, and how much above DDP's they are."""
    result = []
    for name in SHARING:
        values = [loss_at(one[name], STEPS) for one in runs]
        over = [loss_at(one[name], STEPS) / loss_at(one["DDP"], STEPS) for one in runs]
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
