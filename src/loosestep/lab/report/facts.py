"""What one run came to: time, final loss, bytes and waiting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loosestep.lab.report.course import Course, course, needed, number
from loosestep.lab.runs import Run, RunInfo

ALONE = "alone"  # the recipe of the trainer that shares nothing


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The figures of one run."""

    label: str  # as the report calls it; no two runs have the same
    info: RunInfo
    course: Course
    steps: int  # finished in this run
    last_step: int
    trouble: str | None  # why it did not finish, as the rest of a sentence; None: it did
    seconds: float  # until the last step or average was finished on every worker
    sent: dict[str, float]  # bytes by kind/level, mean of all workers
    copied: dict[str, float]  # as sent, but through memory and not over the network
    waited: float | None  # share of the time, mean of all workers
    waited_for: tuple[str, float] | None  # what most, and its share of the waiting
    uplink: float | None  # bytes that left one host, mean of all workers' counts

    @property
    def final_loss(self) -> float | None:
        """The last loss on held-out data; None where there was none, or it is not a number."""
        return self.course.evals[-1].loss if self.course.evals else None

    @property
    def warms_up(self) -> bool:
        """Whether it ended before its warm-up did: it was plain data parallelism throughout."""
        warmup = re.search(r"[:,]warmup_steps=(\d+)", self.info.strategy)
        return warmup is not None and 0 < self.last_step <= int(warmup[1])

    @property
    def shares(self) -> bool:
        """Whether workers tell each other anything: if not, its speed is a bound, not a rival."""
        return self.info.strategy.split(":")[0] != ALONE

    @property
    def bytes_sent(self) -> float | None:
        """Bytes per worker that went over the network; None where they were not recorded."""
        return self.course.train[-1].sent

    @property
    def seconds_per_step(self) -> float:
        """Mean over the run, with everything that happened between steps."""
        return self.seconds / self.steps

    @property
    def diverged(self) -> bool:
        """Whether the last losses are not numbers."""
        evals = self.course.evals
        return self.course.train[-1].loss is None or bool(evals and evals[-1].loss is None)

    def is_as_long_as(self, other: Facts) -> bool:
        """Say whether both were to end alike, so that what they ended at can be compared."""
        mine, its = self.info, other.info
        return (mine.steps, mine.config.get("seconds")) == (its.steps, its.config.get("seconds"))

    def seconds_to(self, target: float | None) -> float | None:
        """Return when held-out loss was first at or below a target; None: never."""
        if target is None:
            return None
        reached = (p for p in self.course.evals if p.loss is not None and p.loss <= target)
        return next((point.seconds for point in reached), None)


def facts_of(runs: Sequence[Run]) -> list[Facts]:
    """Return the figures of every run."""
    return [_facts(run, label) for run, label in zip(runs, _labels(runs), strict=True)]


def _facts(run: Run, label: str) -> Facts:
    its_course = course(run)
    return Facts(
        label=label,
        info=run.info,
        course=its_course,
        steps=_steps_done(its_course),
        last_step=its_course.train[-1].step,
        trouble=_trouble(run),
        seconds=_seconds(run),
        sent=_mean_bytes(run, "sent"),
        copied=_mean_bytes(run, "copied"),
        waited=_waited(run),
        waited_for=_waited_for(run),
        uplink=_uplink(run),
    )


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return names; where two runs share one, with the name of the folder, or else a number."""
    names = [run.info.name or run.info.strategy for run in runs]
    shared = Counter(names)
    labels = [
        name if shared[name] == 1 else f"{name} ({run.folder.name})"
        for name, run in zip(names, runs, strict=True)
    ]
    still = Counter(labels)
    return [
        label if still[label] == 1 else f"{label} #{number}"
        for number, label in enumerate(labels, start=1)
    ]


def _steps_done(its_course: Course) -> int:
    # A run may go on from a checkpoint, and may record every tenth step only.
    steps = [point.step for point in its_course.train]
    stride = steps[1] - steps[0] if len(steps) > 1 else 1
    return max(1, steps[-1] - steps[0] + max(1, stride))


def _trouble(run: Run) -> str | None:
    cut: list[int] = []
    for rank in range(run.info.num_workers):
        ends = run.of("end", rank)
        reason = str(ends[-1].get("reason")) if ends else None
        if reason == "interrupted":
            return "was interrupted"
        if reason not in (None, "finished"):
            return f"failed on worker {rank}: {reason}"
        if reason is None:
            cut.append(rank)
    if not cut:
        return None
    whose = "its" if len(cut) == run.info.num_workers else f"worker {cut[0]}'s"
    return f"has no record of {whose} end: it still runs, or was killed"


def _seconds(run: Run) -> float:
    ends = [
        needed(run, rank, record, "at")
        for rank, records in run.records.items()
        for record in records
        if record["event"] in ("step", "sync")
    ]
    return max(ends)


def _mean_bytes(run: Run, key: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    last = [run.of("step", rank)[-1:] for rank in run.records]
    found = [records[0].get(key) for records in last if records]
    maps = [entry for entry in found if isinstance(entry, dict)]
    for entry in maps:
        for name in entry:
            sums[name] = sums.get(name, 0.0) + (number(entry, name) or 0.0)
    return {name: value / len(maps) for name, value in sums.items()}


def _waited(run: Run) -> float | None:
    shares = []
    for rank in run.records:
        for record in run.of("step", rank)[-1:]:
            waited, at = number(record, "seconds_waited"), needed(run, rank, record, "at")
            if waited is None or at <= 0:
                return None
            shares.append(min(1.0, waited / at))
    return sum(shares) / len(shares) if shares else None


def _waited_for(run: Run) -> tuple[str, float] | None:
    """Return what most of the waiting was for: from syncs, or else from the timeline."""
    waits: dict[str, float] = {}
    for rank in run.records:
        for record in run.of("sync", rank):
            name = f"{record.get('kind')} over {record.get('level')}"
            waits[name] = waits.get(name, 0.0) + (number(record, "seconds_waited") or 0.0)
    if not any(waits.values()):
        waits = _span_waits(run)
    whole = sum(waits.values())
    if whole <= 0:
        return None
    name = max(waits, key=lambda key: waits[key])
    return name, waits[name] / whole


def _span_waits(run: Run) -> dict[str, float]:
    waits: dict[str, float] = {}
    for rank in run.records:
        for span in run.of("span", rank):
            if span.get("kind") == "wait":
                name = str(span.get("level") or "others")
                long = needed(run, rank, span, "end") - needed(run, rank, span, "begin")
                waits[name] = waits.get(name, 0.0) + long
    return waits


def _uplink(run: Run) -> float | None:
    ends = [record for rank in run.records for record in run.of("end", rank)[-1:]]
    counts = [count for count in (number(end, "uplink") for end in ends) if count is not None]
    return sum(counts) / len(counts) if counts else None
