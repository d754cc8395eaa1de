"""The load policy: which nodes are verified, and that it reads its table as documented."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.budget import MIN_GAIN, TABLE_ROWS, Budget, CostTable, measure_costs
from outrider.tree import DraftTree
from outrider.types import StepRecord
from tests.models import random_decoder
from tests.strategies import trees

FLAT = CostTable(rows=(1, 64), contexts=(64,), seconds=((0.02, 0.02),))
STEEP = CostTable(rows=(1, 64), contexts=(64,), seconds=((0.02, 0.02 * 64),))


def test_free_rows_are_all_used_and_linear_rows_are_not() -> None:
    """Where rows cost nothing every node pays; where each costs a whole pass, none does."""
    tree = DraftTree.root(1)
    for token, score in ((2, 0.9), (3, 0.05), (4, 0.01)):
        tree.add(0, token, score)

    assert [3] == [t.num_drafted for t in Budget(FLAT, max_rows=64).prune([tree], [10])]
    assert [0] == [t.num_drafted for t in Budget(STEEP, max_rows=64).prune([tree], [10])]


@given(st.lists(trees(), min_size=1, max_size=3), st.floats(0.001, 2.0))
def test_the_kept_nodes_maximise_expected_tokens_per_second(
    batch: list[DraftTree], row_cost: float
) -> None:
    """Brute force over how many of the best nodes to keep; a gain below the margin is none."""
    costs = CostTable((1, 100), (64,), ((1.0, 1.0 + 99 * row_cost),))
    kept = Budget(costs, max_rows=100).prune(batch, [10] * len(batch))
    scores = sorted((s for tree in batch for s in tree.score[1:]), reverse=True)

    def rate(count: int) -> float:
        return (len(batch) + sum(scores[:count])) / costs.at(len(batch) + count, 10)

    num_kept = sum(tree.num_drafted for tree in kept)
    best = max(rate(count) for count in range(len(scores) + 1))
    if num_kept:
        assert rate(num_kept) == pytest.approx(best)
    else:
        assert best <= rate(0) * MIN_GAIN * (1 + 1e-9)
    for before, after in zip(batch, kept, strict=True):
        paths = {tuple(before.path_tokens(n)) for n in range(len(before))}
        assert {tuple(after.path_tokens(n)) for n in range(len(after))} <= paths


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 12))
def test_rows_never_exceed_the_pass(batch: list[DraftTree], max_rows: int) -> None:
    kept = Budget(None, max_rows=max_rows).prune(batch, [5] * len(batch))

    assert sum(len(tree) for tree in kept) <= max(max_rows, len(batch))


def test_the_table_interpolates_and_never_extrapolates() -> None:
    table = CostTable((1, 3), (10, 20), ((1.0, 2.0), (3.0, 4.0)))

    assert 1.5 == table.at(2, 10)
    assert 2.5 == table.at(2, 15)
    assert 4.0 == table.at(99, 99)
    assert 1.0 == table.at(0, 0)


def test_time_already_spent_on_drafting_makes_more_nodes_worth_it() -> None:
    """Drafting is paid when the nodes are chosen: the dearer it was, the less to waste of it."""
    tree = DraftTree.root(1)
    tree.add(0, 2, 0.5)
    costs = CostTable((1, 2), (64,), ((1.0, 1.6),))
    budget = Budget(costs, max_rows=8)

    assert 0 == budget.prune([tree], [10])[0].num_drafted
    for _ in range(100):
        budget.observe(StepRecord(1, 2, draft_s=50.0, verify_s=1.2, rest_s=0.0))
    assert 1 == budget.prune([tree], [10])[0].num_drafted


def test_measured_costs_never_fall_with_rows() -> None:
    table = measure_costs(random_decoder(), max_model_len=128, on_progress=None)

    assert TABLE_ROWS == table.rows
    assert (64,) == table.contexts
    for column in table.seconds:
        assert all(0 < a <= b for a, b in itertools.pairwise(column))
    assert table == CostTable.from_json(
        {"rows": list(table.rows), "contexts": [64], "seconds": [list(table.seconds[0])]}
    )
