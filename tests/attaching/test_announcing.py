"""What attaching says: one line of what will happen, and a warning where nothing is gained."""

import logging
import warnings

import torch

from loosestep import (
    LoosestepWarning,
    Topology,
    ZeroRedundancyOptimizer,
    attach,
    ddp,
    desloc,
    diloco,
    hierarchical_sgd,
    post_local_sgd,
    snoo,
    zero,
)
from loosestep.errors import forget_warnings
from loosestep.outer import nesterov
from loosestep.reducers import ErrorFeedback, Int4, Int8, Mean
from loosestep.schedules import after, always, every, levels
from loosestep.strategy.strategy import Strategy
from loosestep.testing import RankPool

HOSTS = {"host": [[0, 1], [2, 3]], "world": [[0, 1, 2, 3]]}


def attached_with(
    strategy: Strategy,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[str], list[str], str]:
    """Return the lines of the log, the warnings, and how the attachment shows itself."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("loosestep.attaching.announcing"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    forget_warnings()
    model = model or torch.nn.Linear(1000, 10)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
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
            Strategy(schedule=every(4, level="host", gradients="world"), topology=hosts),
        ],
        "never joined": [
            hierarchical_sgd({"host": 4}, topology=hosts),
            hierarchical_sgd({"host": 4}, warmup_steps=9, topology=hosts),
            Strategy(schedule=after(9, always(gradients="host")), topology=hosts),
        ],
        "never joined, and nothing saved": [
            hierarchical_sgd({"host": 4}, gradients="host", topology=hosts),
        ],
        "state and outer optimizers": [
            diloco(8, topology=hosts, reducer=Mean()),
            desloc(8, topology=hosts),
            Strategy(schedule=every(4), optimizer_state="average", reducer=Int8(), topology=hosts),
            Strategy(
                schedule=levels({"host": 4, "world": 8}), topology=hosts, outer={"host": nesterov()}
            ),
        ],
        "outer optimizers": [
            snoo(),
            snoo(topology=hosts),
            diloco(gradients="world"),
            hierarchical_sgd({"host": 2, "world": 4}, topology=hosts),
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


def test_outer_optimizers_gain_something_of_equal_replicas(pool: RankPool) -> None:
    """They step from where replicas are, so that a shared gradient is no reason to warn."""
    assert all(told == [] for _, told, _ in pool.run(4, many, "outer optimizers")[0])


def test_ranks_that_are_never_joined_are_told(pool: RankPool) -> None:
    """Where the widest level that averages is not all ranks, and gradients do not join them."""
    for _, (warning,), _ in pool.run(4, many, "never joined")[0]:
        assert warning.startswith("not all ranks are joined by this strategy: it averages")
        assert "{'host': [0, 1] [2, 3], 'world': [0-3]}" in warning
        assert "hierarchical_sgd({'host': 4, 'world': 32})" in warning
    ((_, (nothing, apart), _),) = pool.run(4, many, "never joined, and nothing saved")[0]
    assert nothing.startswith("nothing is saved")
    assert "averages parameters over 'host' at most" in apart


def test_what_else_a_sync_does_is_in_the_line(pool: RankPool) -> None:
    """The outer optimizer, on its level, and what the averaged state adds, uncompressed."""
    told = pool.run(4, many, "state and outer optimizers")[0]
    (outer,), (periods,), (state,), (narrow,) = (lines for lines, _, _ in told)
    rule = "Outer(SGD, lr=0.7, momentum=0.9, nesterov=True)"
    assert f"(first after 8), 60.1 kB a sync, which {rule} steps from; " in outer
    assert (
        "(first after 8), at most 60.1 kB a sync, with 'exp_avg' at every 3rd and 'exp_avg_sq' at "
        "every 6th of these syncs, at most 60.1 kB a sync each; "
    ) in periods
    assert ", with the optimizer's state, 60.1 kB a sync for each of its tensors; " in state
    assert f"'host' every 8 steps (first after 4), at most 40 kB a sync, which {rule} " in narrow
    assert narrow.count(rule) == 1


def sharded() -> list[list[str]]:
    """Attach with an optimizer that is sharded over each host, and a model that is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hosts, net = Topology(HOSTS), torch.nn.Linear(1000, 10)
    group = hosts.process_group("host")
    adam = torch.optim.AdamW
    shards = ZeroRedundancyOptimizer(net.parameters(), adam, process_group=group, lr=0.1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(1000, 10)
    fully_shard(model, mesh=mesh["shard"])
    local = post_local_sgd(8, gradients="shard", topology=Topology.from_mesh(mesh), reducer=Mean())
    return [
        attached_with(zero(8, topology=hosts, reducer=Mean()), net, shards)[0],
        attached_with(local, model)[0],
    ]


def test_of_shards_a_rank_sends_its_own(pool: RankPool) -> None:
    """To those that hold the same; a sharded optimizer's go on to the others of the host."""
    (optimizer,), (model,) = pool.run(4, sharded)[0]
    # Half the weights and the biases, 20,040 bytes, to the other host, and on to the other rank.
    assert "averaged over 'world' every 8 steps (first after 8), 40.1 kB a sync; " in optimizer
    assert "averaged over 'replicate' every 8 steps (first after 8), 20 kB a sync; " in model


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
