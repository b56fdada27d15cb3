"""What every recipe would cost on the links that were measured; see [Note: the cost model]."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

from loosestep.comm.reducers import Mean, TwoLevel
from loosestep.lab.doctor.advice import Cost, Job
from loosestep.lab.doctor.links import ALL_REDUCE, AVERAGE, Links
from loosestep.lab.trainer.specs import Spec, Value, needs
from loosestep.strategy.recipes import RECIPES
from loosestep.strategy.strategy import Strategy

STEPS = 4_000  # that are looked at: whole periods of all recipes, or nearly


def cost_of_recipes(links: Links, num_parameters: int, step_seconds: float) -> tuple[Cost, ...]:
    """Return what each recipe costs as it is, with its usual period; nothing for one rank."""
    job = Job.of(links, num_parameters, step_seconds)
    if links.num_ranks == 1:
        return ()
    return tuple(_Recipe(job, str(spec), spec.strategy()).cost() for spec in _specs())


def _specs() -> Iterator[Spec]:
    for name, recipe in RECIPES.items():
        period = inspect.signature(recipe).parameters.get("period")
        usual = None if period is None else period.default
        options: dict[str, Value] | None = needs(recipe)
        if isinstance(usual, int):
            options = {"period": usual}
        if options is not None:
            yield Spec(name, options)


class _Recipe:
    """A strategy on a job's links, once its warm-up is over."""

    def __init__(self, job: Job, text: str, strategy: Strategy) -> None:
        self._job, self._text, self._strategy = job, text, strategy

    def cost(self) -> Cost:
        """Return what a step costs, on the mean over many."""
        schedule, seconds, sent = self._strategy.schedule, 0.0, 0.0
        for step in range(schedule.begins, schedule.begins + STEPS):
            level, due = schedule(step).gradients, schedule(step + 1).parameters
            shared = 0.0 if level is None else self._gradients(level)
            hidden = self._strategy.overlap_steps * (self._job.step_seconds + shared)
            seconds += shared
            sent += self._leaving(level, self._job.links.num_ranks, 1.0)
            if due is not None:
                seconds += max(0.0, self._average(due) - hidden)
                sent += self._leaving(due, len(self._job.links.hosts), self._share)
        return self._job.cost_of(self._text, sent / STEPS, seconds / STEPS)

    def _gradients(self, level: str) -> float:
        links = self._job.links
        measured = links.widest if level == "world" else level
        return links.seconds_for(measured, ALL_REDUCE, self._job.num_bytes)

    def _average(self, level: str) -> float:
        links, size = self._job.links, self._job.num_bytes / self._strategy.schedule.num_fragments
        inside = links.seconds_for("host", AVERAGE, size)
        whole = links.seconds_for(links.widest, AVERAGE, size) if level == "world" else inside
        share = self._share * self._strategy.schedule.num_fragments
        return inside + share * max(0.0, whole - inside)

    @property
    def _share(self) -> float:
        """What a sync sends of the bytes that the exact mean of everything would send."""
        hosts, numel = max(2, len(self._job.links.hosts)), self._job.num_bytes // 4
        whole = Mean().bytes_on_wire(numel, torch.float32, hosts)
        talks_to = hosts if self._strategy.gossip is None else 2
        reducer = self._strategy.reducer
        between = reducer.inner if isinstance(reducer, TwoLevel) else reducer
        sent = between.bytes_on_wire(numel, torch.float32, talks_to)
        return sent / max(1, whole) / self._strategy.schedule.num_fragments

    def _leaving(self, level: str | None, num: int, share: float) -> float:
        if level != "world" or len(self._job.links.hosts) == 1:
            return 0.0
        return 2 * (num - 1) / num * self._job.num_bytes * share
