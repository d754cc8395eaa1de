from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.statistics import (
    holm,
    log_interval,
    mean_interval,
    p_value_above,
    ratio_interval,
    sign_flip_p,
    simultaneous_confidence,
)

positive = st.floats(min_value=1e-3, max_value=1e3)
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=20)


def test_matches_a_hand_computed_interval():
    """Logs 0.1, 0.2, 0.3: mean 0.2, s 0.1, t(2, .975) = 4.302652729911275 (printed tables)."""
    interval = ratio_interval([math.exp(x) for x in (0.1, 0.2, 0.3)], [1.0, 1.0, 1.0])

    margin = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert pytest.approx(interval.ratio) == math.exp(0.2)
    assert pytest.approx(interval.low) == math.exp(0.2 - margin)
    assert pytest.approx(interval.high) == math.exp(0.2 + margin)
    assert 3 == interval.num_pairs


def test_one_pair_has_a_ratio_but_no_interval():
    interval = ratio_interval([3.0], [2.0])

    assert pytest.approx(1.5) == interval.ratio
    assert (None, None) == (interval.low, interval.high)
    assert not interval.is_faster
    assert not interval.is_slower
    assert "1.50 (one pair)" == str(interval)


@given(pairs)
def test_swapping_the_arms_inverts_ratio_and_interval(pairs):
    above, below = zip(*pairs, strict=True)
    there, back = ratio_interval(above, below), ratio_interval(below, above)

    assert there.low is not None
    assert back.high is not None
    assert there.low <= there.ratio <= there.high
    assert 1.0 == pytest.approx(there.ratio * back.ratio)
    assert pytest.approx(-math.log(back.high), abs=1e-9) == math.log(there.low)


@given(pairs, positive)
def test_the_unit_of_the_measurements_does_not_matter(pairs, unit):
    above, below = zip(*pairs, strict=True)
    scaled = ratio_interval([unit * x for x in above], [unit * x for x in below])

    assert pytest.approx(scaled.ratio) == ratio_interval(above, below).ratio


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """1,000 experiments of 6 pairs with 10 % noise: about 950 cover; 4 sigma is 28."""
    source = random.Random(1)
    covered = 0
    for _ in range(1000):
        above = [1.3 * math.exp(source.gauss(0.0, 0.1)) for _ in range(6)]
        interval = ratio_interval(above, [1.0] * 6)
        assert interval.low is not None
        covered += interval.low <= 1.3 <= interval.high

    assert 922 <= covered <= 978


def test_faster_and_slower_need_the_whole_interval_on_one_side():
    faster = ratio_interval([1.5, 1.6, 1.4], [1.0, 1.0, 1.0])
    unclear = ratio_interval([1.5, 0.7, 1.1], [1.0, 1.0, 1.0])
    slower = ratio_interval([0.8, 0.81, 0.79], [1.0, 1.0, 1.0])

    assert (True, False) == (faster.is_faster, faster.is_slower)
    assert (False, False) == (unclear.is_faster, unclear.is_slower)
    assert (False, True) == (slower.is_faster, slower.is_slower)


@pytest.mark.parametrize(
    ("above", "below"),
    [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0]), ([math.nan], [1.0])],
)
def test_what_has_no_ratio_is_refused(above, below):
    with pytest.raises(ValueError, match=r"need as many|not a positive finite"):
        ratio_interval(above, below)


def test_a_confidence_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"outside \(0, 1\)"):
        ratio_interval([1.0, 2.0], [1.0, 1.0], confidence=1.0)


def test_a_mean_has_the_t_interval_of_the_tables():
    """Values 1, 2, 3: mean 2, s 1, t(2, .975) = 4.302652729911275."""
    interval = mean_interval([1.0, 2.0, 3.0])

    margin = 4.302652729911275 / math.sqrt(3)
    assert (2.0, 3) == (interval.mean, interval.num_values)
    assert pytest.approx((2.0 - margin, 2.0 + margin)) == (interval.low, interval.high)
    assert (None, None) == (mean_interval([5.0]).low, mean_interval([5.0]).high)
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])


def test_sign_flips_of_five_pairs_cannot_reach_5_percent_and_of_six_can():
    assert 2 / 32 == sign_flip_p([0.1] * 5)
    assert 2 / 64 == sign_flip_p([0.1] * 6)
    assert 1.0 == sign_flip_p([0.1, -0.1])


def test_sign_flips_of_many_pairs_are_drawn_and_agree_with_the_t_test():
    source = random.Random(3)
    logs = [source.gauss(0.03, 0.05) for _ in range(30)]

    assert pytest.approx(2 * p_value_above(logs, 1.0), abs=0.01) == sign_flip_p(logs)


def test_the_one_sided_p_value_is_a_half_percent_where_the_99_percent_interval_ends():
    logs = [0.10, 0.14, 0.11, 0.16, 0.12, 0.15]
    end = log_interval(logs, 0.99).low

    assert end is not None
    assert pytest.approx(0.005) == p_value_above(logs, end)
    assert 1.0 == p_value_above([0.3], 1.0)
    assert (0.0, 1.0) == (p_value_above([0.25, 0.25], 1.0), p_value_above([-0.25, -0.25], 1.0))


def test_holm_multiplies_the_least_by_all_and_never_falls():
    """By hand: .01 x 3; .03 x 2; .04 x 1 lifted to .06."""
    assert pytest.approx([0.03, 0.06, 0.06]) == holm([0.01, 0.04, 0.03])
    assert [1.0] == holm([1.0])


def test_simultaneous_intervals_hold_together():
    """Three arms, no difference, one shared noisy baseline, 1,000 times: at most 5 % + 4 sigma."""
    source = random.Random(5)
    confidence = simultaneous_confidence(3)
    wrong = 0
    for _ in range(1000):
        base = [source.gauss(0.0, 0.05) for _ in range(6)]
        arms = [[source.gauss(0.0, 0.05) - b for b in base] for _ in range(3)]
        found = [log_interval(arm, confidence) for arm in arms]
        wrong += any(interval.is_faster or interval.is_slower for interval in found)

    assert pytest.approx(1 - 0.05 / 3) == confidence
    assert wrong <= 50 + 4 * math.sqrt(1000 * 0.05 * 0.95)
