"""Power, blocks needed, noise floor: against closed forms, tables and simulation."""

from __future__ import annotations

import math
import random

import pytest

from outrider.bench.planning import (
    MIN_BLOCKS,
    blocks_needed,
    detectable_ratio,
    noise_floor,
    power,
)
from outrider.bench.statistics import log_interval


def simulated(truth: float, spread: float, num_blocks: int, count: int) -> list[list[float]]:
    source = random.Random(7)
    return [
        [source.gauss(math.log(truth), spread) for _ in range(num_blocks)] for _ in range(count)
    ]


def test_blocks_against_themselves_show_no_difference_in_at_least_94_of_100_repetitions():
    runs = simulated(1.0, 0.03, 8, 100)
    quiet = [
        run for run in runs if not (log_interval(run).is_faster or log_interval(run).is_slower)
    ]

    assert 94 <= len(quiet)


def test_no_difference_is_said_as_often_as_the_confidence_promises():
    """2,000 repetitions at 95 %: 1,900 expected, 4 sigma is 39."""
    runs = simulated(1.0, 0.03, 8, 2000)
    quiet = sum(not (log_interval(r).is_faster or log_interval(r).is_slower) for r in runs)

    assert 1861 <= quiet <= 1939


@pytest.mark.parametrize("num_blocks", [6, 8, 12])
def test_a_difference_of_5_percent_is_found_with_the_announced_power(num_blocks: int):
    announced = power(num_blocks, 0.04, math.log(1.05))
    runs = simulated(1.05, 0.04, num_blocks, 1000)
    found = sum(log_interval(run).is_faster for run in runs) / 1000

    four_sigma = 4 * math.sqrt(announced * (1 - announced) / 1000)
    assert announced == pytest.approx(found, abs=four_sigma)


def test_the_blocks_needed_have_the_wanted_power_and_one_fewer_has_not():
    needed = blocks_needed(0.04, 0.03)

    assert needed is not None
    assert power(needed, 0.04, 0.03) >= 0.8 > power(needed - 1, 0.04, 0.03)


def test_blocks_needed_are_those_of_the_rule_of_thumb():
    """7.85 (s/d)^2 + 2: 9.85 for equal s and d, 51 for 5 % and 2 %."""
    assert 10 == blocks_needed(0.03, 0.03)
    assert 52 == blocks_needed(0.05, 0.02)


def test_a_large_difference_still_needs_six_blocks():
    assert MIN_BLOCKS == blocks_needed(0.01, 0.5)


def test_no_difference_at_all_needs_more_blocks_than_there_are():
    assert blocks_needed(0.03, 0.0) is None


def test_the_detectable_ratio_is_the_one_with_the_wanted_power():
    ratio = detectable_ratio(8, 0.03)

    assert ratio is not None
    assert pytest.approx(0.8, abs=1e-6) == power(8, 0.03, math.log(ratio))
    assert detectable_ratio(1, 0.03) is None


def test_without_spread_any_difference_is_certain_and_none_is_never_found():
    assert 1.0 == power(6, 0.0, 0.01)
    assert 0.0 == power(6, 0.0, 0.0)


def test_the_noise_floor_is_the_standard_deviation_of_the_logs():
    floor = noise_floor([0.02, -0.02, 0.01, -0.01])

    assert floor is not None
    assert pytest.approx(math.sqrt(0.001 / 3)) == floor.spread
    assert floor.is_fair
    assert noise_floor([]) is None


def test_a_server_that_differs_from_itself_is_not_fair():
    floor = noise_floor([0.10, 0.11, 0.10, 0.09])

    assert floor is not None
    assert not floor.is_fair
