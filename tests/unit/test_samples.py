"""Percentiles, their floors and intervals; trends."""

from __future__ import annotations

import random

import pytest

from outrider.bench.samples import (
    MIN_SAMPLES,
    cluster_bootstrap,
    is_printable,
    percentile,
    trend,
)


def test_a_percentile_lies_linearly_between_order_statistics():
    assert 2.5 == percentile([1.0, 2.0, 3.0, 4.0], 50)
    assert pytest.approx(3.85) == percentile([4.0, 1.0, 3.0, 2.0], 95)
    assert percentile([], 50) is None


@pytest.mark.parametrize(("percent", "count"), MIN_SAMPLES.items())
def test_all_samples_lie_below_a_printed_percentile_in_at_most_0_13_percent(percent, count):
    assert (percent / 100) ** count <= 0.00131
    assert is_printable(count, percent)
    assert not is_printable(count - 1, percent)


def test_blocks_that_differ_widen_the_interval_of_their_percentile():
    """Within-block spread alone would say +-0.1; the blocks differ by 1."""
    source = random.Random(1)
    alike = [[source.gauss(5.0, 0.1) for _ in range(40)] for _ in range(8)]
    apart = [[source.gauss(5.0 + k % 2, 0.1) for _ in range(40)] for k in range(8)]

    narrow, wide = cluster_bootstrap(alike, 50), cluster_bootstrap(apart, 50)

    assert narrow is not None
    assert wide is not None
    assert narrow[1] - narrow[0] < 0.1
    assert wide[1] - wide[0] > 0.5
    assert cluster_bootstrap([[], []], 50) is None


def test_a_straight_line_is_a_clear_trend_and_noise_is_none():
    line = trend([0.0, 0.1, 0.2001, 0.3, 0.4])
    noise = trend([0.01, -0.02, 0.015, -0.01, 0.005, -0.008])

    assert line is not None
    assert pytest.approx(0.4, abs=1e-3) == line.change
    assert line.is_clear
    assert noise is not None
    assert not noise.is_clear
    assert trend([0.0, 1.0, 2.0]) is None
