"""Low-communication training at equal tokens: held-out loss against bytes that a worker sent.

Every family of contenders has its inner learning rate tuned by one of its members, on a seed that
is not reported and with fewer steps; outer rates are the papers'. Then all contenders train with
every seed, seed by seed. What is finished is kept in ``results/<date>-family_runs-<settings>.json``
and the same command goes on where it was stopped. ``python -m benchmarks.family_page`` shows what
there is.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.family_page import FILES, TUNING_SEED, Run, read, rows_of, show
from benchmarks.family_training import SHORT, contenders, settings, train
from benchmarks.report import RESULTS, Row, machine
from loosestep.testing import RankPool

REPRESENTATIVES = {  # by family: whose loss its learning rate is chosen by
    "gradients": "DDP",
    "averaging": f"local SGD, H={SHORT}",
    "outer": f"DiLoCo, H={SHORT}",
    "muon": "MuLoCo, 2 bits",
    "one worker": "one worker",
}
RATES = (2e-3, 4e-3, 8e-3)  # then twice the largest or half the smallest, while that one is best
MOST_RATES = 6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is trained."""

    steps: int = 1200  # a multiple of all periods, so that nobody ends in the middle of one
    tuning_steps: int = 480
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Job:
    """A training that is wanted."""

    contender: str
    seed: int
    rate: float
    steps: int


@dataclass
class Bench:
    """Trains what is wanted and was not trained before, and keeps what came of it."""

    pool: RankPool
    path: Path
    settings: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)

    def result(self, job: Job) -> Run:
        """Return what a training has led to; train if nobody has."""
        found = self.known(job)
        return self._train(job) if found is None else found

    def known(self, job: Job) -> Run | None:
        """Return the training if it was done, with the same strategy."""
        asked = (job, repr(contenders()[job.contender].strategy))
        return next((run for run in self.runs if (_job(run), run.strategy) == asked), None)

    def _train(self, job: Job) -> Run:
        contender, began = contenders()[job.contender], time.monotonic()
        order = (job.contender, job.seed, job.rate, job.steps)
        told = self.pool.run(contender.workers, train, *order, timeout=7200, group_timeout=900)
        run = Run(
            **asdict(job),
            strategy=repr(contender.strategy),
            loss=statistics.fmean(one.loss for one in told),
            bytes_sent=round(statistics.fmean(one.bytes_sent for one in told)),
            seconds=round(time.monotonic() - began, 1),
        )
        self.runs.append(run)
        self._save()
        return run

    def _save(self) -> None:
        content = {
            "command": "python -m benchmarks family",
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "settings": self.settings,
            "runs": [asdict(run) for run in self.runs],
        }
        whole = self.path.with_suffix(".partial")
        whole.write_text(json.dumps(content, indent=1) + "\n")
        whole.replace(self.path)

    def seconds(self, jobs: list[Job]) -> float:
        """Estimate what trainings will take that are not done, by those that are."""
        paces: dict[str, float] = {run.contender: run.seconds / run.steps for run in self.runs}
        usual = statistics.fmean(paces.values()) if paces else 0.0
        wanted = [job for job in jobs if self.known(job) is None]
        return sum(job.steps * paces.get(job.contender, usual) for job in wanted)


def _job(run: Run) -> Job:
    return Job(run.contender, run.seed, run.rate, run.steps)


def run(rounds: int) -> list[Row]:
    """Train with as many seeds as there are rounds, five at most."""
    bench = measure(Plan(seeds=Plan.seeds[:rounds]), RESULTS)
    show(bench.path, RESULTS / "family.svg")
    return rows_of(read(bench.path))


def measure(plan: Plan, folder: Path) -> Bench:
    """Train what is missing in the newest file of the same settings, or in a new one."""
    with RankPool(max(one.workers for one in contenders().values())) as pool:
        bench = opened(pool, plan, folder)
        rates = {family: tuned(bench, plan, family) for family in REPRESENTATIVES}
        jobs = [*wanted(plan, rates)]
        for job in jobs:
            new = bench.known(job) is None
            result = bench.result(job)
            if new:
                _tell(f"seed {job.seed}, {job.contender}", result, bench.seconds(jobs))
    return bench


def opened(pool: RankPool, plan: Plan, folder: Path) -> Bench:
    """Return what was trained with the same settings, if anything."""
    folder.mkdir(exist_ok=True)
    mine = {**settings(), "steps": plan.steps, "tuning steps": plan.tuning_steps}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()[:8]
    head, tail = FILES.rsplit("*", 1)
    if found := sorted(folder.glob(head + digest + tail)):
        return Bench(pool, found[-1], mine, read(found[-1]))
    today = datetime.date.today().isoformat()
    return Bench(pool, folder / (head.replace("*", today) + digest + tail), mine)


def tuned(bench: Bench, plan: Plan, family: str) -> float:
    """Return the best learning rate of a family."""
    losses: dict[float, float] = {}
    while (rate := next_rate(losses)) is not None:
        job = Job(REPRESENTATIVES[family], TUNING_SEED, rate, plan.tuning_steps)
        new = bench.known(job) is None
        result = bench.result(job)
        losses[rate] = result.loss
        if new:
            _tell(f"tuning {family}, rate {rate:g}", result, bench.seconds(planned(plan)))
    best = min(losses, key=lambda rate: losses[rate])
    edge = "" if min(losses) < best < max(losses) else ", at the edge of what was tried"
    print(f"{family}: learning rate {best:g}{edge}", flush=True)
    return best


def next_rate(losses: Mapping[float, float]) -> float | None:
    """Return what to try next; None: the best has neighbours on both sides, or it is enough.

    >>> next_rate({2e-3: 2.0, 4e-3: 1.9, 8e-3: 1.8})
    0.016
    """
    untried = [rate for rate in RATES if rate not in losses]
    if untried or len(losses) >= MOST_RATES:
        return untried[0] if untried else None
    best = min(losses, key=lambda rate: losses[rate])
    if best == max(losses):
        return 2 * best
    return best / 2 if best == min(losses) else None


def wanted(plan: Plan, rates: Mapping[str, float]) -> Iterator[Job]:
    """Yield all trainings that are reported, seed by seed: a table is fair at any time."""
    for seed in plan.seeds:
        for name, one in contenders().items():
            yield Job(name, seed, rates[one.family], plan.steps)


def planned(plan: Plan) -> list[Job]:
    """Return all trainings as far as they are known before learning rates are."""
    names = REPRESENTATIVES.values()
    grid = [Job(name, TUNING_SEED, rate, plan.tuning_steps) for name in names for rate in RATES]
    return [*grid, *wanted(plan, dict.fromkeys(REPRESENTATIVES, RATES[0]))]


def _tell(what: str, run: Run, left: float) -> None:
    sent, hours = run.bytes_sent / 1e6, left / 3600
    line = f"{what}: {run.loss:.4f} nats, {sent:.4g} MB sent, {run.seconds:.0f} s"
    print(f"{line}; some {hours:.1f} h left", flush=True)
