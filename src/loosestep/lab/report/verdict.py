"""The verdict in plain words: which run was first at the target, and what that cost or saved.

The target is given, or the best final validation loss of all finished runs plus 1 %: near enough
to be as good, and one number for all. Where runs cannot be compared, no winner is named; those of
different lengths can be by their time to a target that is given. A run that shares nothing does not
take part: it says what computing takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from loosestep.lab.report import words
from loosestep.lab.report.comparability import Differences
from loosestep.lab.report.facts import Facts
from loosestep.lab.runs import RunInfo

MARGIN = 0.01  # of the best final loss: what counts as equally good
TIE = 0.03  # times nearer than this are the machine's mood
_BASELINES = ("torch-ddp", "torch_ddp", "ddp")  # what everyone runs; first found counts


@dataclass(frozen=True)
class Verdict:
    """One sentence that says it, what backs it up, and what to keep in mind."""

    headline: str
    sentences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    target: float | None = None


def verdict(facts: Sequence[Facts], differ: Differences, target: float | None = None) -> Verdict:
    """Return the verdict on runs; ``target`` is the validation loss to reach, if one is given."""
    notes = _notes(facts, differ)
    if len(facts) == 1:
        return Verdict(_took(facts[0]), _costs(facts[0]), notes, target)
    each = [_took(run) for run in facts]
    if differ.decisive or (differ.length and target is None):
        what = words.listed([*differ.decisive, *differ.length])
        return Verdict(f"Not comparable: these runs differ in {what}.", each, notes)
    ranked = _rivals(facts)
    if len(ranked) < 2:
        several = sum(run.shares for run in facts) > 1
        how = "finished with a validation loss" if several else "share anything"
        return Verdict(f"No winner: fewer than two of these runs {how}.", each, notes, target)
    if differ.length:
        notes.append(_about_length(differ))
    notes.append(_about_target(ranked, target))
    target = target_loss(ranked) if target is None else target
    if all(run.seconds_to(target) is None for run in ranked):
        why = f"No winner: no run reached a validation loss of {words.loss(target)}."
        return Verdict(why, each, notes, target)
    return _ranked(ranked, target, notes)


def target_loss(facts: Sequence[Facts]) -> float:
    """Return what counts as reached: the best final validation loss, plus 1 %."""
    rivals = [run for run in facts if run.shares and run.final_loss is not None] or facts
    best = min(run.final_loss for run in rivals if run.final_loss is not None)
    return best + MARGIN * abs(best)


def _rivals(facts: Sequence[Facts]) -> list[Facts]:
    """Return the runs that may win: those that shared, and finished with a loss."""
    whole = [run for run in facts if run.trouble is None and not run.diverged]
    return [run for run in whole if run.shares and run.final_loss is not None]


def baseline(facts: Sequence[Facts]) -> Facts:
    """Return the run to compare with: plain DDP, or else the first one given."""
    for name in _BASELINES:
        for run in facts:
            if name in (run.info.strategy.split(":")[0], run.info.name):
                return run
    return facts[0]


def _ranked(facts: list[Facts], target: float, notes: list[str]) -> Verdict:
    reached = [(run.seconds_to(target), run) for run in facts]
    order = sorted(((at, run) for at, run in reached if at is not None), key=lambda pair: pair[0])
    (first, best), base = order[0], baseline(facts)
    tied = [run for at, run in order if at <= first * (1 + TIE)]
    slower = [run for _, run in order[1:]] + [run for at, run in reached if at is None]
    other = base if base is not best else slower[0]
    if base in tied and len(tied) > 1:
        return Verdict(_tie(tied, target), [_took(run) for run in facts], notes, target)
    sentences = [_totals(best, other), *_savings(best, other), *_sooner(facts, best, target)]
    if len(tied) > 1:
        near = words.listed([run.label for run in tied if run is not best])
        sentences.insert(0, f"{near} came within 3 % of that time: too near to tell apart.")
    if base is best:
        sentences.insert(0, "Nothing here beat the baseline.")
    return Verdict(_first(best, other, target), sentences, notes, target)


def _first(best: Facts, other: Facts, target: float) -> str:
    mine, theirs = best.seconds_to(target), other.seconds_to(target)
    assert mine is not None  # it is the first that reached the target
    start = f"{best.label} was first at a validation loss of {words.loss(target)}: "
    if theirs is None:
        return f"{start}{words.seconds(mine)}. {other.label} never reached it."
    if mine <= 0:
        return f"{start}at once. {other.label} took {words.seconds(theirs)}."
    ratio = words.times(theirs / mine)
    return f"{start}{words.seconds(mine)}, {ratio} as fast as {other.label} ({_s(theirs)})."


def _totals(best: Facts, other: Facts) -> str:
    assert best.final_loss is not None
    assert other.final_loss is not None
    if not best.is_as_long_as(other):  # who trained for longer has a better end for that alone
        return f"A step took {_s(best.seconds_per_step)} against {_s(other.seconds_per_step)}."
    ends = f"{words.loss(best.final_loss)} against {words.loss(other.final_loss)}"
    change = words.change(best.final_loss, other.final_loss)
    steps = words.counted(best.steps, "step")
    took = f"All {steps} took {_s(best.seconds)} against {_s(other.seconds)}"
    if best.steps != other.steps:
        theirs = words.counted(other.steps, "step")
        took = f"{steps} took {_s(best.seconds)} against {theirs} in {_s(other.seconds)}"
    return f"{took} and ended at a validation loss of {ends} ({change})."


def _savings(best: Facts, other: Facts) -> list[str]:
    sentences = []
    # Totals of different numbers of steps say nothing.
    per, when = (
        ((1, 1), "") if best.is_as_long_as(other) else ((best.steps, other.steps), " in a step")
    )
    for text, mine, its in (
        ("It sent {} per worker", best.bytes_sent, other.bytes_sent),
        ("{} left its host", best.uplink if best.info.link else None, other.uplink),
    ):
        if mine and its:
            part = _part(mine / per[0], its / per[1])
            sentences.append(f"{text.format(words.size(mine / per[0]))}{when}, {part}.")
    if best.waited is not None and other.waited is not None:
        waited, theirs = words.share(best.waited), words.share(other.waited)
        sentences.append(f"It waited for {waited} of its time, {other.label} for {theirs}.")
    return sentences


def _part(mine: float, theirs: float) -> str:
    ratio = mine / theirs
    if 0.98 <= ratio <= 1.02:
        return "as much as the other"
    part = words.share(ratio) + " of" if ratio < 1 else words.times(ratio)
    return f"{part} the other's {words.size(theirs)}"


def _sooner(facts: Sequence[Facts], best: Facts, target: float) -> list[str]:
    """Name runs of the same length that were done sooner but are not as good."""
    assert best.final_loss is not None
    return [
        f"{run.label} was done sooner ({_s(run.seconds)}), but at a validation loss of "
        f"{words.loss(run.final_loss)} ({words.change(run.final_loss, best.final_loss)})."
        for run in facts
        if run.seconds < best.seconds and run.final_loss is not None and run.final_loss > target
        if run.is_as_long_as(best)
    ]


def _tie(tied: list[Facts], target: float) -> str:
    times = words.listed([f"{run.label} ({_s(run.seconds_to(target))})" for run in tied])
    return (
        f"No clear winner: {times} reached a validation loss of {words.loss(target)} "
        "within 3 % of each other's time."
    )


def _took(run: Facts) -> str:
    text = f"{run.label} took {_s(run.seconds)} for {words.counted(run.steps, 'step')}"
    if run.final_loss is not None:
        return f"{text} and ended at a validation loss of {words.loss(run.final_loss)}."
    last = run.course.train[-1].loss
    if run.diverged or last is None:
        return f"{text} and diverged: its last loss is not a number."
    return f"{text} and ended at a training loss of {words.loss(last)}."


def _costs(run: Facts) -> list[str]:
    workers = words.counted(run.info.num_workers, "worker")
    sentences = [f"{workers}, {_s(run.seconds_per_step)} a step."]
    if run.bytes_sent is not None:
        sentences.append(f"Each worker sent {words.size(run.bytes_sent)}.")
    if run.waited is not None:
        text = f"Workers waited for {words.share(run.waited)} of the time"
        if run.waited_for and run.waited > 0:
            what, part = run.waited_for
            text += f", {words.share(part)} of that for {what}"
        sentences.append(f"{text}.")
    return sentences


def _notes(facts: Sequence[Facts], differ: Differences) -> list[str]:
    notes = [f"{run.label} {run.trouble} (step {run.last_step:,})." for run in facts if run.trouble]
    for run in facts:
        if run.diverged:
            notes.append(f"{run.label} diverged: its last loss is not a number.")
        elif not run.course.evals:
            notes.append(f"{run.label} recorded no validation loss.")
        if run.warms_up:
            notes.append(
                f"{run.label} is still in its warm-up: it shared gradients with all workers at "
                "every step."
            )
        if not run.shares and len(facts) > 1:
            notes.append(
                f"{run.label} shares nothing and is not ranked: its {_s(run.seconds_per_step)} a "
                "step are what computing takes."
            )
    if differ.other:
        notes.append(f"The runs also differ in {words.listed(differ.other)}.")
    return [*notes, *_about_loopback(facts)]


def _about_loopback(facts: Sequence[Facts]) -> list[str]:
    hosts = [run.info.config.get("hosts") for run in facts if _is_here(run.info)]
    several = [number for number in hosts if isinstance(number, int) and number > 1]
    if len(several) < len(facts):
        return []
    return [
        f"All workers talked over this machine's loopback: no link between the {max(several)} "
        "hosts was emulated, so none was slow."
    ]


def _is_here(info: RunInfo) -> bool:
    """Say whether one machine is known to have had all workers, without an emulated link."""
    # Others may have been placed by torchrun or SLURM.
    started = info.command[1:2] == ["compare"] or info.config.get("workers") is not None
    return started and not info.link


def _about_length(differ: Differences) -> str:
    return (
        f"The runs differ in {words.listed(differ.length)}: their times to the target are "
        "compared, and their losses at the end are not."
    )


def _about_target(facts: Sequence[Facts], given: float | None) -> str:
    best = "the best final validation loss of the finished runs plus 1 %, "
    start = f"{best}{words.loss(target_loss(facts))}" if given is None else "the one given"
    text = f"Target: {start}. A run is there at its first evaluation at or below it."
    if len({run.info.strategy for run in facts}) == len(facts):
        text += " With one run per strategy, small differences in loss may be chance."
    return text


def _s(value: float | None) -> str:
    return words.seconds(value)
