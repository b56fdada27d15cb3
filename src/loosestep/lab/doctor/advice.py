"""Which strategy suits the links, by a cost model that fits on a page.

[Note: the cost model]

A model of P parameters has 4 P bytes of gradients and as many of parameters. Let a step compute
for c seconds. Measured are: A(n), the seconds of the backend's all-reduce of n bytes over all
ranks; a(n), the same inside a host; M(n) and m(n), our own average over all ranks and inside a
host. Nothing is taken to be hidden by the backward pass, so that waiting is at most what is said:

    ddp                 waits A(4 P) a step
    post_local_sgd      waits a(4 P) a step where gradients are shared inside hosts, and every
                        ``period`` steps for the average: W = m(4 P) + s (M(4 P) - m(4 P)), where
                        the reducer sends a share s of the bytes between hosts (int4: 0.129)
    with overlap k      of W only what k steps do not hide: W - k (c + a)

The share of time waited is w / (w + c). The first strategy of a list that waits for no more than
a tenth is taken; the list begins with what is closest to ddp: seldom averages let replicas drift
apart, few bits lose some of them, and an overlap applies what is some steps old. Gradients are
shared inside hosts where that takes no more than half of the tenth, and the average has the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loosestep.lab.doctor.findings import Finding, Level
from loosestep.lab.doctor.links import ALL_REDUCE, AVERAGE, Links
from loosestep.lab.doctor.units import rate, seconds, share, size

MOST_WAITING = 0.1  # of the time
BYTES = 4  # of a float32
REDUCERS = {"mean": 1.0, "bf16": 0.5, "int8": 0.254, "int4+ef": 0.129}  # share of the bytes
LADDER = (
    *((4, "mean"), (8, "mean"), (8, "bf16"), (8, "int8"), (8, "int4+ef")),
    *((period, "int4+ef") for period in (16, 32, 64)),
)
WARMUP_STEPS = 100  # that papers begin with, by way of example
MOST_OVERLAP = 8  # steps; older averages than that disturb training
PORT = 29_500  # where torchrun's processes meet


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a strategy costs in every step, on the mean."""

    strategy: str  # as it can be given on the command line
    bytes_per_host: float  # that leave a host
    seconds_waited: float
    share_waited: float  # of the time


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A strategy, the command line, why, and what it costs beside plain ddp."""

    strategy: str
    command: str
    reasons: tuple[str, ...]
    costs: tuple[Cost, ...]  # of ddp first, of the strategy last


def recommend(
    machine: Sequence[Finding], links: Links, num_parameters: int, step_seconds: float
) -> Recommendation:
    """Return the strategy for a model of a size that computes ``step_seconds`` a step."""
    job = Job.of(links, num_parameters, step_seconds)
    plain = job.ddp()
    best, reasons = plain, [_why_ddp(job, plain)]
    if plain.share_waited > MOST_WAITING:
        plan = _first_that_fits(job)
        best, reasons = (
            job.cost(plan),
            [f"{_what_ddp_does(job, plain)}: too much.", *_why(job, plan)],
        )
    reasons += _where(links)
    problems = [f.name for f in machine if f.level is Level.PROBLEM]
    reasons += [f"See to the problems first: {', '.join(problems)}."] if problems else []
    return Recommendation(
        strategy=best.strategy,
        command=_command(links, best.strategy),
        reasons=tuple(reasons),
        costs=(plain,) if best is plain else (plain, best),
    )


def _command(links: Links, strategy: str) -> str:
    """Return what trains on as many ranks as were measured, on their hosts."""
    if len(links.hosts) == 1:
        return f"loosestep train --workers {links.num_ranks} --strategy {strategy}"
    each = "N" if _is_uneven(links) else len(links.hosts[0])
    return (
        f"torchrun --nnodes {len(links.hosts)} --nproc-per-node {each} --rdzv-backend c10d "
        f"--rdzv-endpoint {links.host_names[0]}:{PORT} -m loosestep train --out DIR "
        f"--strategy {strategy}"
    )


def _where(links: Links) -> list[str]:
    if len(links.hosts) == 1:
        return []
    text = "Start the command on every host, with the same DIR, a folder that all of them share"
    if _is_uneven(links):
        named = zip(links.hosts, links.host_names, strict=True)
        text += (
            f"; N is a host's own: {', '.join(f'{len(host)} on {name}' for host, name in named)}"
        )
    return [f"{text}."]


def _is_uneven(links: Links) -> bool:
    return len({len(host) for host in links.hosts}) > 1


@dataclass(frozen=True)
class Plan:
    """The settings of post_local_sgd."""

    period: int
    reducer: str = "mean"
    overlap_steps: int = 0
    gradients: bool = True  # whether they are shared inside hosts

    def __str__(self) -> str:
        """Return it as it can be given on the command line."""
        options = [f"period={self.period}"]
        options += [f"reducer={self.reducer}"] if self.reducer != "mean" else []
        options += [f"overlap_steps={self.overlap_steps}"] if self.overlap_steps else []
        options += [] if self.gradients else ["gradients=none"]
        return f"post_local_sgd:{','.join(options)}"


@dataclass(frozen=True)
class Job:
    """A model on these links; see [Note: the cost model]."""

    links: Links
    num_bytes: int  # of its gradients, and of its parameters
    step_seconds: float

    @classmethod
    def of(cls, links: Links, num_parameters: int, step_seconds: float) -> Job:
        """Return it for float32 parameters; raise ``ValueError`` where there is no such job."""
        if num_parameters < 1:
            raise ValueError(f"num_parameters must be >= 1, got {num_parameters!r}")
        if not 0 < step_seconds < math.inf:
            raise ValueError(
                f"step_seconds must be > 0, got {step_seconds!r}; time a step on one rank"
            )
        return cls(links, num_parameters * BYTES, step_seconds)

    @property
    def host_seconds(self) -> float:
        """What sharing gradients inside a host takes."""
        return self.links.seconds_for("host", ALL_REDUCE, self.num_bytes)

    def ddp(self) -> Cost:
        """Return what plain data parallelism costs."""
        waited = self.links.seconds_for(self.links.widest, ALL_REDUCE, self.num_bytes)
        num_ranks = self.links.num_ranks
        leaving = 2 * (num_ranks - 1) / num_ranks * self.num_bytes
        return self.cost_of("ddp", leaving if len(self.links.hosts) > 1 else 0.0, waited)

    def cost(self, plan: Plan) -> Cost:
        """Return what a plan costs in a step, on the mean over a period."""
        local = self.host_seconds if plan.gradients else 0.0
        hidden = plan.overlap_steps * (self.step_seconds + local)
        waited = local + max(0.0, self.average_seconds(plan.reducer) - hidden) / plan.period
        num_hosts = len(self.links.hosts)
        leaving = 2 * (num_hosts - 1) / num_hosts * self.num_bytes * REDUCERS[plan.reducer]
        return self.cost_of(str(plan), leaving / plan.period, waited)

    def average_seconds(self, reducer: str) -> float:
        """Return what one average over all ranks takes: W in the note."""
        inside = self.links.seconds_for("host", AVERAGE, self.num_bytes)
        whole = self.links.seconds_for(self.links.widest, AVERAGE, self.num_bytes)
        return inside + REDUCERS[reducer] * max(0.0, whole - inside)

    def cost_of(self, strategy: str, bytes_per_host: float, waited: float) -> Cost:
        """Return it for what leaves a host, and what is waited, in a step on the mean."""
        return Cost(
            strategy=strategy,
            bytes_per_host=bytes_per_host,
            seconds_waited=waited,
            share_waited=waited / (waited + self.step_seconds),
        )


def _first_that_fits(job: Job) -> Plan:
    """Return the first plan that hardly waits, or the one that waits least."""
    plans = list(_plans(job))
    for plan in plans:
        if job.cost(plan).share_waited <= MOST_WAITING:
            return plan
    return min(plans, key=lambda plan: job.cost(plan).seconds_waited)


def _plans(job: Job) -> Iterator[Plan]:
    """Yield the ladder, each rung first without an overlap, then with one that hides it."""
    one_host = len(job.links.hosts) == 1
    local = job.host_seconds
    # On one host sharing gradients there is ddp itself.
    gradients = not one_host and local / (local + job.step_seconds) <= MOST_WAITING / 2
    for period, named in LADDER:
        reducer = "mean" if one_host else named  # inside a host nothing is compressed
        yield Plan(period, reducer, 0, gradients)
        most = min(period * 5 // 8, MOST_OVERLAP)
        # Bounded before it is rounded: beside a step of next to no time it is infinite.
        needed = math.ceil(min(job.average_seconds(reducer) / job.step_seconds, most))
        yield Plan(period, reducer, needed, gradients)


def _why_ddp(job: Job, cost: Cost) -> str:
    if job.links.num_ranks == 1:
        return "There is one rank: nothing is shared, and nobody waits."
    return f"{_what_ddp_does(job, cost)}, which is fast enough; nothing is as exact."


def _what_ddp_does(job: Job, cost: Cost) -> str:
    speed = job.num_bytes / max(cost.seconds_waited, 1e-9)
    return (
        f"ddp reduces {size(job.num_bytes)} of gradients a step; over all ranks the links do "
        f"{rate(speed)}, so that takes {seconds(cost.seconds_waited)} beside "
        f"{seconds(job.step_seconds)} of computing. Up to {share(cost.share_waited)} of the time "
        "would be waiting"
    )


def _why(job: Job, plan: Plan) -> list[str]:
    cost, took = job.cost(plan), job.average_seconds(plan.reducer)
    text = f"An average of all parameters every {plan.period} steps takes {seconds(took)}"
    if plan.reducer != "mean":
        percent = f"{100 * REDUCERS[plan.reducer]:.3g} %"
        text += f" where {plan.reducer} sends {percent} of the bytes between hosts"
    if plan.overlap_steps:
        text += f"; it travels while {plan.overlap_steps} steps are taken"
    reasons = [f"{text}. {_remaining(cost)}"]
    if plan.gradients:
        local = seconds(job.host_seconds)
        reasons += [f"In between gradients are shared inside hosts only, in {local} a step."]
    elif len(job.links.hosts) > 1:
        reasons += ["Gradients are not shared inside hosts either: that would take too long."]
    return [*reasons, _warmup(job)]


def _warmup(job: Job) -> str:
    takes = WARMUP_STEPS * (job.ddp().seconds_waited + job.step_seconds)
    return (
        f"Where the first steps are rough, warmup_steps={WARMUP_STEPS} lets so many of them share "
        f"gradients as ddp does, which takes {seconds(takes)}."
    )


def _remaining(cost: Cost) -> str:
    left = share(cost.share_waited)
    if cost.share_waited <= MOST_WAITING:
        return f"Waiting is down to {left} of the time."
    return f"Still {left} of the time is waiting: larger batches, or a faster link, would help."
