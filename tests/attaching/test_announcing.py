"""What attaching says: one line of what will happen, and a warning where nothing is gained."""

import logging
import warnings

import torch

from loosestep import LoosestepWarning, Topology, attach, ddp, hierarchical_sgd, post_local_sgd
from loosestep.errors import forget_warnings
from loosestep.reducers import ErrorFeedback, Int4
from loosestep.schedules import every
from loosestep.strategy.strategy import Strategy
from loosestep.testing import RankPool

HOSTS = {"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}


def attached_with(strategy: Strategy) -> tuple[list[str], list[str], str]:
    """Return the lines of the log, the warnings, and how the attachment shows itself."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("loosestep.attaching.announcing"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    forget_warnings()
    model = torch.nn.Linear(1000, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attach(model, optimizer, strategy) as run:
            shown = repr(run)
    logger.removeHandler(handler)
    told = [str(w.message) for w in caught if issubclass(w.category, LoosestepWarning)]
    return lines, told, shown


def many(which: str) -> list[tuple[list[str], list[str], str]]:
    hosts = Topology(HOSTS)
    strategies = {
        "what is said": [
            post_local_sgd(8, warmup_steps=100, topology=hosts),
            hierarchical_sgd({"host": 4, "world": 16}, topology=hosts),
            ddp(gradient_reducer=ErrorFeedback(Int4())),
        ],
        "nothing saved": [
            post_local_sgd(8),  # one machine: the host is the world
            post_local_sgd(8, warmup_steps=100),
            hierarchical_sgd({"host": 2, "world": 4}, gradients="world"),
        ],
        "nothing saved on two hosts": [
            hierarchical_sgd({"host": 2, "world": 4}, gradients="world", topology=hosts),
            hierarchical_sgd({"host": 4}, gradients="host", topology=hosts),
            Strategy(schedule=every(4, level="host", gradients="world"), topology=hosts),
        ],
        "something saved": [
            ddp(),
            post_local_sgd(8, gradients=None),
            post_local_sgd(8, topology=hosts),
            hierarchical_sgd({"host": 2, "world": 4}, topology=hosts),
            hierarchical_sgd({"host": 2, "world": 4}, gradients="host", topology=hosts),
        ],
    }
    return [attached_with(strategy) for strategy in strategies[which]]


def test_one_line_says_what_will_happen(pool: RankPool) -> None:
    """Levels and their ranks, warm-up, periods, bytes and memory, by the first rank only."""
    told = pool.run(4, many, "what is said")
    (post_local,), (hierarchical,), (compressed,) = (lines for lines, _, _ in told[0])
    # 10,010 float32 values: 40,040 bytes. An all-reduce of 4 sends 3/2 of them, one of 2 as many.
    assert post_local == (
        "attached: Topology({'host': [0, 1] [2, 3], 'world': [0-3]}); gradients from step 0 on "
        "over 'world', 60.1 kB a step, from step 100 on over 'host', 40 kB a step; parameters "
        "averaged over 'world' every 8 steps (first after 108), at most 60.1 kB a sync; some "
        "40 kB of memory beside model, gradients and optimizer"
    )
    assert "gradients local; parameters averaged over 'host' every 4 steps (first" in hierarchical
    assert "'world' every 16 steps (first after 16)" in hierarchical
    assert "some 0 bytes of memory" in hierarchical
    # A bucket for all gradients, and what feedback keeps of each.
    assert "no averages; some 80.1 kB of memory" in compressed
    assert all(lines == [] for rank in told[1:] for lines, _, _ in rank)


def test_a_strategy_that_saves_nothing_is_warned_of(pool: RankPool) -> None:
    """Gradients that all ranks share at every step leave nothing to average."""
    for (_, (warning,), _), on_others in zip(*(pool.run(2, many, "nothing saved")), strict=True):
        assert warning.startswith(
            "nothing is saved by this strategy: gradients are shared at every"
        )
        assert "gradients=None" in warning
        assert on_others[1] == []
    for _, (warning,), _ in pool.run(4, many, "nothing saved on two hosts")[0]:
        assert warning.startswith("nothing is saved by this strategy: gradients are shared at")
    assert all(told == [] for _, told, _ in pool.run(4, many, "something saved")[0])


def test_attachments_show_themselves(pool: RankPool) -> None:
    """Whoever prints one sees model, optimizer, step, schedule and ranks."""
    assert pool.run(4, many, "something saved")[0][2][2] == (
        "Attached(Linear, SGD, step 0, After(start=0, then=Levels(periods=(('world', 8),), "
        "gradients='host'), before=Always(due=Due(gradients='world', parameters=None))), "
        "Topology({'host': [0, 1] [2, 3], 'world': [0-3]}))"
    )


def test_topologies_show_themselves() -> None:
    """Runs of ranks are short, single ones are spelt out."""
    levels = {"host": [[0, 2, 3, 4], [1, 5]], "world": [[0, 1, 2, 3, 4, 5]]}
    assert repr(Topology(levels)) == "Topology({'host': [0, 2-4] [1, 5], 'world': [0-5]})"
    weighted = Topology({"world": [[0, 1]]}, weights=[1, 2], timeout=3)
    assert repr(weighted) == "Topology({'world': [0, 1]}, weights={0: 1.0, 1: 2.0}, timeout=3)"
