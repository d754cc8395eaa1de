"""What rounds cost: the table reads as documented, and served rounds correct it."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.costs import TABLE_ROWS, CostTable, RoundCosts, measure_costs
from tests.models import random_decoder

TABLE = CostTable((1, 2, 4, 8, 16), (64,), ((0.020, 0.020, 0.022, 0.025, 0.030),))


def test_the_table_interpolates_and_never_extrapolates() -> None:
    table = CostTable((1, 3), (10, 20), ((1.0, 2.0), (3.0, 4.0)))

    assert 1.5 == table.at(2, 10)
    assert 2.5 == table.at(2, 15)
    assert 4.0 == table.at(99, 99)
    assert 1.0 == table.at(0, 0)


def test_measured_costs_never_fall_with_rows() -> None:
    table = measure_costs(random_decoder(), max_model_len=128, on_progress=None)

    assert TABLE_ROWS == table.rows
    assert (64,) == table.contexts
    for column in table.seconds:
        assert all(0 < a <= b for a, b in itertools.pairwise(column))
    assert table == CostTable.from_json(
        {"rows": list(table.rows), "contexts": [64], "seconds": [list(table.seconds[0])]}
    )


def test_prices_are_the_tables_until_a_round_was_served() -> None:
    costs = RoundCosts(TABLE)

    assert TABLE.at(5, 64) == costs.at(4, 5, 64)


def test_served_rounds_correct_the_price_of_their_load_and_rows() -> None:
    """At 4 requests a round takes 20 ms longer than the table says, at 1 request as long."""
    costs = RoundCosts(TABLE)
    for _ in range(200):
        costs.observe(1, 1, 64, TABLE.at(1, 64))
        costs.observe(4, 4, 64, TABLE.at(4, 64) + 0.02)

    assert TABLE.at(1, 64) == pytest.approx(costs.at(1, 1, 64), rel=0.02)
    assert TABLE.at(4, 64) + 0.02 == pytest.approx(costs.at(4, 4, 64), rel=0.02)
    # Rows that were not served: as much longer as those that were, at the same load.
    assert TABLE.at(16, 64) + 0.02 == pytest.approx(costs.at(4, 16, 64), rel=0.02)
    assert TABLE.at(16, 64) == pytest.approx(costs.at(1, 16, 64), rel=0.02)


def test_rows_between_served_ones_are_interpolated() -> None:
    costs = RoundCosts(TABLE)
    for _ in range(200):
        costs.observe(1, 1, 64, TABLE.at(1, 64))
        costs.observe(1, 16, 64, TABLE.at(16, 64) + 0.015)

    assert TABLE.at(8, 64) + 0.007 == pytest.approx(costs.at(1, 8, 64), rel=0.02)


def test_a_machine_that_slows_down_is_dearer_for_what_is_not_done_too() -> None:
    costs = RoundCosts(TABLE)
    for _ in range(50):
        costs.observe(1, 1, 64, TABLE.at(1, 64))
        costs.observe(1, 8, 64, TABLE.at(8, 64))
    before = costs.at(1, 1, 64)
    for _ in range(20):
        costs.observe(1, 8, 64, 2 * TABLE.at(8, 64))

    assert costs.at(1, 1, 64) == pytest.approx(2 * before, rel=0.25)


def test_a_disturbed_round_teaches_little() -> None:
    costs = RoundCosts(TABLE)
    for _ in range(20):
        costs.observe(1, 4, 64, TABLE.at(4, 64))
    costs.observe(1, 4, 64, 1000.0)

    assert costs.at(1, 4, 64) < 1.04 * TABLE.at(4, 64)


def test_noise_averages_out() -> None:
    costs, dice = RoundCosts(TABLE), random.Random(1)
    for _ in range(400):
        costs.observe(2, 6, 64, TABLE.at(6, 64) * dice.lognormvariate(0.0, 0.2))

    assert TABLE.at(6, 64) == pytest.approx(costs.at(2, 6, 64), rel=0.2)
