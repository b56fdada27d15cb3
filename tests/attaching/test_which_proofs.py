"""Which proof holds for which recipe, where it is, and what is proved where one cannot hold."""

from __future__ import annotations

import ast
from pathlib import Path

from loosestep.strategy import recipes

TESTS = Path(__file__).parents[1]

# Every proof, and the tests that prove it for all recipes, or for the engine that all of them use.
PROOFS: dict[str, tuple[str, ...]] = {
    "period 1 with plain SGD equals DDP": (
        "attaching/test_proofs.py::test_period_one_with_plain_sgd_equals_ddp",
        "comm/reducers/test_reducer_proofs.py::test_period_one_with_plain_sgd_is_ddp",
    ),
    "ranks equal the oracle, to the bit": (
        "attaching/test_proofs.py::test_ranks_equal_the_replicas_of_one_process",
        "comm/reducers/test_reducer_proofs.py::test_ranks_equal_the_replicas_of_one_process",
    ),
    "no overlap equals blocking": (
        "sync/test_overlap.py::test_no_overlap_is_blocking_to_the_bit",
        "comm/reducers/test_reducer_proofs.py::test_an_overlapped_average_is_the_blocking_one",
        "sync/test_streaming.py::test_one_part_that_nobody_waits_for_is_diloco",
    ),
    "stopped and resumed equals uninterrupted": (
        "attaching/test_proofs.py::test_resuming_at_any_step_continues_to_the_bit",
        "sync/test_adaptive.py::test_resuming_at_any_step_continues_to_the_bit",
    ),
    "a subgroup works like the world": (
        "attaching/test_proofs.py::test_a_subgroup_works_like_the_world",
    ),
    "one rank without gradients, with an inf, with fewer batches": (
        "attaching/test_proofs.py::test_parameters_without_a_gradient_take_part",
        "attaching/test_proofs.py::test_an_inf_on_one_rank_reaches_all_and_nothing_else",
        "attaching/test_proofs.py::test_ranks_may_run_out_of_batches",
        "sync/test_streaming.py::test_ranks_may_run_out_of_batches",
        "sync/test_adaptive.py::test_ranks_may_run_out_of_batches",
    ),
    "fuzzed sizes and shapes": (
        "sync/test_averaging.py::test_any_shapes_and_window_sizes_give_the_mean_to_the_bit",
        "comm/reducers/test_ways.py::test_random_shapes",
        "sync/test_streaming.py::test_every_parameter_is_in_one_part_and_none_is_empty",
    ),
    "every optimizer in every variant": (
        "attaching/test_optimizers.py::test_every_optimizer_trains_as_by_hand",
        "sync/test_outer_steps.py::test_any_optimizer_of_torch_may_be_outside",
    ),
    "worlds of 1, 2, 3 and 4": (
        "attaching/test_proofs.py::test_ranks_equal_the_replicas_of_one_process",
    ),
    "storage, strides and dtypes stay": (
        "sync/test_averaging.py::test_storage_strides_and_dtypes_stay",
    ),
    "a killed rank is an error that names it": (
        "comm/test_failures.py::test_a_killed_rank_is_named_at_once",
        "sync/test_overlap.py::test_a_rank_that_dies_in_flight_is_named",
    ),
    "one strategy for two models": (
        "attaching/test_one_strategy.py::test_one_strategy_serves_two_models",
    ),
}

# Where a proof cannot hold: why, and what is proved in its place.
OUTER = "an outer optimizer with momentum leads elsewhere than to the mean"
NULL = "sync/test_outer_steps.py::test_sgd_at_a_rate_of_1_is_the_plain_mean"
LOOP = "sync/test_outer_steps.py::test_diloco_is_the_plain_loop"
BITS = "comm/reducers/test_reducer_proofs.py::test_ranks_equal_the_replicas_of_one_process"
FIRST = "period 1 with plain SGD equals DDP"
SECOND = "ranks equal the oracle, to the bit"
NOT: dict[tuple[str, str], tuple[str, str]] = {
    ("diloco", FIRST): (OUTER, NULL),
    ("slowmo", FIRST): (OUTER, NULL),
    ("snoo", FIRST): (OUTER, NULL),
    ("streaming_diloco", FIRST): (OUTER, NULL),
    ("muloco", FIRST): (OUTER, NULL),
    ("sparseloco", FIRST): ("the largest of a difference are not all of it", BITS),
    ("desloc", FIRST): (
        "an optimizer without state has no momentum to average: it is local SGD then",
        "attaching/test_proofs.py::test_period_one_with_plain_sgd_equals_ddp",
    ),
    ("muloco", SECOND): ("two bits are a codec's; with an exact mean it is proved", BITS),
    ("sparseloco", SECOND): ("so they are here", BITS),
}


def exists(test: str) -> bool:
    path, _, name = test.partition("::")
    tree = ast.parse((TESTS / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_every_proof_is_a_test() -> None:
    """There are twelve, and each is where the table says."""
    assert len(PROOFS) == 12
    named = {test for tests in PROOFS.values() for test in tests}
    missing = [test for test in sorted(named) if not exists(test)]
    assert missing == []


def test_what_cannot_hold_says_why_and_what_does() -> None:
    """Of recipes and proofs that there are, with a test in its place."""
    for (recipe, proof), (why, instead) in NOT.items():
        assert recipe in recipes.RECIPES
        assert proof in PROOFS
        assert why
        assert exists(instead), instead


def test_recipes_with_an_outer_optimizer_are_not_ddp() -> None:
    """Each of them stands in the table, and no other does for that reason."""
    with_outer = {
        name
        for name, recipe in recipes.RECIPES.items()
        if name != "hierarchical_sgd" and recipe().outer is not None
    }
    listed = {recipe for recipe, proof in NOT if proof == FIRST}
    assert with_outer <= listed
