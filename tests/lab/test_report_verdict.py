"""The verdict in words, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loosestep.lab.report.facts import ALONE
from loosestep.lab.report.verdict import baseline, target_loss
from loosestep.lab.trainer.specs import alone
from tests.support.report_runs import DDP, LOCAL, TWO_LEVELS, facts_and_verdict, val_loss, write_run

pytestmark = pytest.mark.fast


def test_verdict_on_one_run(tmp_path):
    """8 steps compute and 1 waits: 25 times 0.054 s of 17.35 s is 7.8 %."""
    _, found = facts_and_verdict(write_run(tmp_path / "local", LOCAL))
    assert found.headline == (
        "post_local_sgd:period=8,reducer=int4 took 17 s for 200 steps "
        "and ended at a validation loss of 2.210."
    )
    assert found.sentences == [
        "4 workers, 87 ms a step.",
        "Each worker sent 12 MB.",
        "Workers waited for 7.8 % of the time, 100 % of that for parameters over world.",
    ]
    assert found.target is None


def test_verdict_on_three_runs(tmp_path):
    """The target is 2.203 * 1.01 = 2.225.

    torch-ddp is there at step 150 (2.2 + 3.4 exp(-150 / 28) = 2.216): 150 * 0.664 = 99.6 s.
    The other's loss is 0.007 higher and there at step 150 too: 12.96 s, 7.7 times as fast.
    """
    folders = [write_run(tmp_path / made.name, made) for made in (LOCAL, TWO_LEVELS, DDP)]
    _, found = facts_and_verdict(*folders)
    assert found.target == pytest.approx(1.01 * val_loss(DDP, 200))
    assert found.headline == (
        "post_local_sgd:period=8,reducer=int4 was first at a validation loss of 2.225: 13 s, "
        "7.7 times as fast as torch-ddp (100 s)."
    )
    assert found.sentences == [
        "All 200 steps took 17 s against 133 s and ended at a validation loss of "
        "2.210 against 2.203 (+0.3 %).",
        "It sent 12 MB per worker, 0.6 % of the other's 1.9 GB.",
        "It waited for 7.8 % of its time, torch-ddp for 88 %.",
    ]
    assert "best final validation loss of the finished runs plus 1 %, 2.225" in found.notes[-1]
    assert "may be chance" in found.notes[-1]


def test_a_baseline_that_wins_is_named(tmp_path):
    """3 % more loss never reaches a target of 1 % more."""
    quick = replace(DDP, wait=0.01)
    slow = replace(LOCAL, floor=2.27, wait=1.0)
    folders = [write_run(tmp_path / "quick", quick), write_run(tmp_path / "slow", slow)]
    _, found = facts_and_verdict(*folders)
    assert found.headline.startswith("torch-ddp was first at a validation loss of 2.225: 14 s.")
    assert found.headline.endswith(f"{LOCAL.name} never reached it.")
    assert found.sentences[0] == "Nothing here beat the baseline."


def test_no_winner_within_three_percent(tmp_path):
    near = replace(DDP, name="other", wait=DDP.wait + 0.01)
    folders = [write_run(tmp_path / "a", DDP), write_run(tmp_path / "b", near)]
    _, found = facts_and_verdict(*folders)
    assert found.headline == (
        "No clear winner: torch-ddp (100 s) and other (101 s) reached a validation loss of 2.225 "
        "within 3 % of each other's time."
    )


def test_two_that_tie_ahead_of_the_baseline(tmp_path):
    twin = replace(LOCAL, name="twin", wait=LOCAL.wait + 0.001)
    runs = {"a": DDP, "b": LOCAL, "c": twin}
    _, found = facts_and_verdict(*(write_run(tmp_path / k, made) for k, made in runs.items()))
    assert found.headline.startswith(f"{LOCAL.name} was first")
    assert found.sentences[0] == "twin came within 3 % of that time: too near to tell apart."


@pytest.mark.parametrize(
    ("field", "value", "words_"),
    [
        ("data", {"name": "other", "sha256": "cd" * 32}, "data (abababababab…abababababab; cd"),
        ("num_parameters", 10, "parameters (3200000; 10)"),
        ("steps", 100, "steps (200; 100)"),
        ("config", {"seed": 2, "lr": 0.003, "model": {"width": 256, "layers": 4}}, "seed (1; 2)"),
        ("link", {"rate": "1gbit"}, 'link (none; {"rate": "1gbit"})'),
    ],
)
def test_runs_that_differ_are_not_compared(tmp_path, field, value, words_):
    a = write_run(tmp_path / "a", DDP)
    b = write_run(tmp_path / "b", LOCAL, **{field: value})
    _, found = facts_and_verdict(a, b)
    assert found.headline.startswith("Not comparable: these runs differ in ")
    assert words_ in found.headline
    assert found.target is None
    assert [text.split(" took")[0] for text in found.sentences] == [DDP.name, LOCAL.name]


def test_other_differences_are_said_beside_the_verdict(tmp_path):
    config = {"seed": 1, "lr": 0.006, "model": {"width": 256, "layers": 4}, "strategy": "x"}
    a, b = write_run(tmp_path / "a", DDP), write_run(tmp_path / "b", LOCAL, config=config)
    _, found = facts_and_verdict(a, b)
    assert found.headline.startswith(LOCAL.name)
    assert "The runs also differ in lr (0.003; 0.006)." in found.notes


def test_the_baseline_is_plain_ddp_or_else_the_first(tmp_path):
    runs = {"a": LOCAL, "b": replace(DDP, name="ddp"), "c": DDP}
    folders = [write_run(tmp_path / name, replace(made, steps=2)) for name, made in runs.items()]
    facts, _ = facts_and_verdict(*folders)
    assert baseline(facts) is facts[2]
    assert baseline(facts[:2]) is facts[1]
    assert baseline(facts[:1]) is facts[0]


def test_a_target_can_be_given(tmp_path):
    """At 2.5, torch-ddp is there at step 75 (2.2 + 3.4 exp(-75 / 28) = 2.433): 49.8 s."""
    folders = [write_run(tmp_path / made.name, made) for made in (DDP, LOCAL)]
    _, found = facts_and_verdict(*folders, target=2.5)
    assert found.headline.endswith(
        "was first at a validation loss of 2.500: 6.5 s, 7.7 times as fast as torch-ddp (50 s)."
    )
    assert found.notes[-1].startswith("Target: the one given. ")
    _, found = facts_and_verdict(*folders, target=2.0)
    assert found.headline == "No winner: no run reached a validation loss of 2.000."


def test_runs_for_a_time_may_differ_in_steps(tmp_path):
    a = write_run(tmp_path / "a", DDP, steps=None)
    b = write_run(tmp_path / "b", replace(LOCAL, steps=400), steps=None)
    _, found = facts_and_verdict(a, b)
    assert found.sentences[0].startswith("400 steps took 35 s against 200 steps in 133 s and ended")


SHORT_DDP = replace(DDP, steps=30, eval_every=15)
LONGER = replace(LOCAL, steps=45, eval_every=15)


def test_a_target_compares_runs_of_different_lengths(tmp_path):
    """By the time to it: 30 * 0.664 = 19.9 s against 45 * 0.08 + 5 * 0.054 = 3.87 s.

    Totals are not compared: 5 * 0.48 MB in 45 steps are 53 kB in a step.
    """
    folders = [write_run(tmp_path / made.name, made) for made in (SHORT_DDP, LONGER)]
    _, found = facts_and_verdict(*folders, target=val_loss(SHORT_DDP, 30))
    assert found.headline == (
        f"{LOCAL.name} was first at a validation loss of 3.365: 3.9 s, "
        "5.1 times as fast as torch-ddp (20 s)."
    )
    assert found.sentences == [
        "A step took 86 ms against 664 ms.",
        "It sent 53 kB per worker in a step, 0.6 % of the other's 9.5 MB.",
        "It waited for 7.0 % of its time, torch-ddp for 88 %.",
    ]
    assert found.notes[0] == (
        "The runs differ in steps (30; 45): their times to the target are compared, and their "
        "losses at the end are not."
    )
    _, found = facts_and_verdict(*folders)
    assert found.headline == "Not comparable: these runs differ in steps (30; 45)."


def test_a_target_compares_nothing_else_that_differs(tmp_path):
    folders = [
        write_run(tmp_path / "a", SHORT_DDP),
        write_run(tmp_path / "b", LONGER, num_parameters=10),
    ]
    _, found = facts_and_verdict(*folders, target=3.0)
    assert found.headline.endswith("differ in parameters (3200000; 10) and steps (30; 45).")


def test_tokens_and_seconds_are_lengths_too(tmp_path):
    for name, values in {"tokens": (1, 2), "seconds": (10.0, 20.0)}.items():
        folders = [
            write_run(tmp_path / name / made.name, made, steps=None, config={name: value})
            for made, value in zip((SHORT_DDP, LONGER), values, strict=True)
        ]
        _, found = facts_and_verdict(*folders)
        assert found.headline.startswith(f"Not comparable: these runs differ in {name} (")
        _, found = facts_and_verdict(*folders, target=val_loss(SHORT_DDP, 30))
        assert found.headline.startswith(f"{LOCAL.name} was first")


def test_shorter_runs_are_not_called_sooner_but_worse(tmp_path):
    """Of the same length as the best only: with as many steps they might have been as good."""
    short = replace(LONGER, name="short", steps=15, floor=3.0)
    poor = replace(LONGER, name="poor", wait=0.0, floor=3.0)
    folders = [write_run(tmp_path / made.name, made) for made in (SHORT_DDP, LONGER, short, poor)]
    _, found = facts_and_verdict(*folders, target=val_loss(SHORT_DDP, 30))
    (sooner,) = [text for text in found.sentences if "sooner" in text]
    assert sooner.startswith("poor was done sooner (")


# ---- runs that share nothing ----

NOTHING = replace(DDP, name="floor", strategy="alone", wait=0.0, megabytes=0.0, floor=2.0)


def test_a_run_that_shares_nothing_is_no_winner(tmp_path):
    """It is the quickest and the best here, and its loss does not make the target either."""
    assert alone.__name__ == ALONE
    folders = [write_run(tmp_path / made.name, made) for made in (DDP, NOTHING, LOCAL)]
    facts, found = facts_and_verdict(*folders)
    assert found.target == target_loss(facts) == pytest.approx(1.01 * val_loss(DDP, 200))
    assert found.headline.startswith(f"{LOCAL.name} was first at a validation loss of 2.225")
    note = "floor shares nothing and is not ranked: its 84 ms a step are what computing takes."
    assert found.notes[0] == note
    assert "floor" not in " ".join([found.headline, *found.sentences])
    assert target_loss(facts[1:2]) == pytest.approx(1.01 * val_loss(NOTHING, 200))


def test_one_run_beside_one_that_shares_nothing(tmp_path):
    folders = [write_run(tmp_path / made.name, made) for made in (NOTHING, DDP)]
    _, found = facts_and_verdict(*folders)
    assert found.headline == "No winner: fewer than two of these runs share anything."
    _, found = facts_and_verdict(folders[0])
    assert found.headline.startswith("floor took")
    assert found.notes == []


# ---- hosts that are one machine ----


@pytest.mark.parametrize(
    ("command", "config", "link", "is_said"),
    [
        (["loosestep", "compare", "ddp"], {"hosts": 2}, None, True),
        (["loosestep", "train"], {"hosts": 2, "workers": 4}, None, True),
        (["loosestep", "train"], {"hosts": 2, "workers": None}, None, False),  # maybe by torchrun
        (["loosestep", "compare", "ddp"], {"hosts": 1}, None, False),
        (["loosestep", "compare", "ddp"], {"hosts": 2}, {"rate": "1gbit"}, False),
        (["loosestep", "compare", "ddp"], {"hosts": "2"}, None, False),
        ([], {}, None, False),
    ],
)
def test_hosts_that_talked_over_the_loopback_are_said_to(tmp_path, command, config, link, is_said):
    info = {"command": command, "config": config, "link": link}
    folders = [write_run(tmp_path / made.name, made, **info) for made in (DDP, LOCAL)]
    note = (
        "All workers talked over this machine's loopback: no link between the 2 hosts was "
        "emulated, so none was slow."
    )
    for some in (folders, folders[:1]):
        _, found = facts_and_verdict(*some)
        assert (note in found.notes) == is_said


def test_what_left_the_host_is_told_where_a_link_was_emulated(tmp_path):
    """By the made-up kernel two workers' bytes leave a host: 2 * 25 * 0.48 MB = 24 MB."""
    link = {"rate": "100mbit", "hosts": 2, "workers_per_host": 2}
    folders = [write_run(tmp_path / made.name, made, link=link) for made in (DDP, LOCAL)]
    _, found = facts_and_verdict(*folders)
    assert "24 MB left its host, 0.6 % of the other's 3.8 GB." in found.sentences


def test_a_run_that_is_only_quick_is_named_as_such(tmp_path):
    """2.3 against a target of 2.225: (2.303 - 2.203) / 2.203 = 4.5 %."""
    quick = replace(LOCAL, name="quick", floor=2.3)
    folders = [write_run(tmp_path / made.name, made) for made in (DDP, quick)]
    _, found = facts_and_verdict(*folders)
    assert found.headline == (
        "torch-ddp was first at a validation loss of 2.225: 100 s. quick never reached it."
    )
    assert found.sentences[-1] == (
        "quick was done sooner (17 s), but at a validation loss of 2.303 (+4.5 %)."
    )


def test_equal_bytes_are_called_equal(tmp_path):
    folders = [
        write_run(tmp_path / made.name, made) for made in (DDP, replace(DDP, name="x", wait=0.1))
    ]
    _, found = facts_and_verdict(*folders)
    assert "It sent 1.9 GB per worker, as much as the other." in found.sentences
