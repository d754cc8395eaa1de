"""What rounds cost: the table reads as documented, and served rounds correct it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from outrider import costs as costs_module
from outrider.costs import TABLE_ROWS, CostTable, RoundCosts, measure_costs, still_holds
from outrider.llm import _cost_table
from outrider.models.decoder import Decoder
from outrider.models.machine import ResultCache
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


class Clock:
    """Seconds that stand still except during a pass, which takes as long per row as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, second_per_row: float) -> None:
        self.now, self.num_passes = 0.0, 0
        forward = Decoder.forward

        def timed(decoder, segments, cache, **more):
            self.now += second_per_row * sum(len(segment.tokens) for segment in segments)
            self.num_passes += 1
            return forward(decoder, segments, cache, **more)

        monkeypatch.setattr(costs_module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Decoder, "forward", timed)


def table_of(second_per_row: float, rows: tuple[int, ...] = TABLE_ROWS) -> CostTable:
    return CostTable(rows, (64,), (tuple(second_per_row * count for count in rows),))


@pytest.mark.parametrize(("now", "holds"), [(1.0, True), (1.2, True), (1.5, False), (0.5, False)])
def test_a_remembered_table_holds_while_passes_take_what_it_says(
    now: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, now * 1e-3)

    assert holds == still_holds(table_of(1e-3), random_decoder())


def test_the_check_of_a_slow_target_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Clock(monkeypatch, 1.0)

    assert still_holds(table_of(1.0), random_decoder())
    assert len(costs_module.CHECKED_ROWS) == slow.num_passes


def test_a_table_of_other_rows_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1e-3)

    assert not still_holds(table_of(1e-3, (1, 64)), random_decoder())
    assert 0 == clock.num_passes


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


def test_a_remembered_table_that_holds_no_more_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, results = random_decoder(), ResultCache(tmp_path)

    def found(second_per_row: float) -> CostTable:
        Clock(monkeypatch, second_per_row)
        return _cost_table(target, "weights", 128, results, None)

    first, same, slower = found(1e-3), found(1e-3), found(5e-3)

    assert first == same
    assert 5 * first.at(16, 64) == pytest.approx(slower.at(16, 64))
