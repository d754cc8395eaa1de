"""Break-even: where a falling line passes 1, with an interval that covers it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from outrider.bench.breakeven import break_even, falling


def logs(ratios: dict[float, float], spread: float = 0.0, seed: int = 0, num: int = 6):
    source = random.Random(seed)
    return {
        load: [math.log(ratio) + source.gauss(0.0, spread) for _ in range(num)]
        for load, ratio in ratios.items()
    }


def test_without_noise_it_is_the_crossing_on_the_logarithm_of_the_load():
    """ln ratio falls from .2 at 4 to -.2 at 16: 0 at 8, halfway in ln."""
    found = break_even(logs({4: math.exp(0.2), 16: math.exp(-0.2)}), "users")

    assert found is not None
    assert pytest.approx((8.0, 8.0)) == (found.low, found.high)
    assert "break-even between 8 and 8 users" == found.text


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """100 runs, 6 blocks, 5 % noise: 95 expected to cover 8; 4 sigma is 9."""
    truth = {2: math.exp(0.3), 4: math.exp(0.15), 16: math.exp(-0.15), 32: math.exp(-0.3)}
    covered = 0
    for seed in range(100):
        found = break_even(logs(truth, 0.05, seed), "users")
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 8.0 <= found.high

    assert covered >= 86


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ({1: 1.5, 4: 1.4}, "break-even above 4 users, the most tested"),
        ({1: 0.8, 4: 0.7}, "break-even below 1 users, the least tested"),
    ],
)
def test_what_lies_beyond_the_tested_loads_is_a_bound_and_not_extrapolated(ratios, text):
    found = break_even(logs(ratios, 0.01), "users")

    assert found is not None
    assert text == found.text


def test_a_load_near_1_at_the_end_leaves_the_interval_open():
    near_1 = [0.02, -0.02, 0.03, -0.01, 0.01, -0.02]
    found = break_even({1: [0.3, 0.31, 0.29, 0.3, 0.3, 0.3], 8: near_1}, "users")

    assert found is not None
    assert math.inf == found.high
    assert "maybe above the 8 tested" in found.text
    assert found.to_json()["high"] is None


def test_a_ratio_that_clearly_rises_with_load_has_no_single_break_even():
    found = break_even(logs({1: 0.8, 4: 1.3, 16: 0.9}, 0.01), "users")

    assert found is not None
    assert (None, None) == (found.low, found.high)
    assert "higher at 4 than at 1 users" in found.text


def test_one_load_or_one_block_has_no_break_even():
    assert break_even(logs({4: 1.2}), "users") is None
    assert break_even(logs({1: 1.2, 4: 0.9}, num=1), "users") is None


def test_pooling_gives_the_closest_falling_sequence():
    """3 and 5 pool to 4; 4 stays above 2; weights count."""
    weights = np.ones(3)

    assert [4.0, 4.0, 2.0] == list(falling(np.array([3.0, 5.0, 2.0]), weights))
    assert [4.5, 4.5] == list(falling(np.array([3.0, 5.0]), np.array([1.0, 3.0])))
    assert [3.0, 2.0, 1.0] == list(falling(np.array([3.0, 2.0, 1.0]), weights))
