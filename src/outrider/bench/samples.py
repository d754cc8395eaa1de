"""Percentiles and trends of samples, with what their number allows to say.

Owns the definition of a percentile, the number of samples below which one is not printed, the
cluster bootstrap for its interval and the test for drift; pure functions. Used by
:mod:`outrider.bench.metrics`, :mod:`outrider.bench.guards` and the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

# Samples from which the largest one bounds the percentile from above: all lie below it with a
# chance of at most 0.13 %. MLPerf's floors for 90 and above, and by the same rule below.
MIN_SAMPLES = {50: 10, 75: 24, 90: 64, 95: 130, 99: 662}
NUM_RESAMPLES = 1000


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between order statistics, numpy's default; None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def is_printable(num_samples: int, percent: int) -> bool:
    """Whether so many samples say anything about that percentile."""
    return num_samples >= MIN_SAMPLES[percent]


def cluster_bootstrap(
    clusters: Sequence[Sequence[float]], percent: float, *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile interval of a percentile: blocks are drawn again, then requests within each.

    For spread shown beside a figure only; with few blocks its coverage is below nominal, so no
    verdict rests on it. None without samples.
    """
    filled = [np.asarray(cluster) for cluster in clusters if len(cluster)]
    if not filled:
        return None
    source = np.random.default_rng(seed)
    found = np.empty(NUM_RESAMPLES)
    for index in range(NUM_RESAMPLES):
        drawn = [filled[i] for i in source.integers(len(filled), size=len(filled))]
        again = [cluster[source.integers(len(cluster), size=len(cluster))] for cluster in drawn]
        found[index] = np.percentile(np.concatenate(again), percent)
    tail = (1.0 - confidence) / 2
    return float(np.quantile(found, tail)), float(np.quantile(found, 1.0 - tail))


@dataclass(frozen=True, slots=True)
class Trend:
    """Change of a logarithm from the first value to the last, with its t interval."""

    change: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """The interval lies on one side of 0."""
        return self.low > 0.0 or self.high < 0.0


def trend(logs: Sequence[float], confidence: float = 0.99) -> Trend | None:
    """Least-squares line through the values in order; None below four, which fit any line."""
    count = len(logs)
    if count < 4:
        return None
    x = np.arange(count) - (count - 1) / 2
    y = np.asarray(logs, dtype=np.float64)
    slope = float(x @ y / (x @ x))
    residuals = y - y.mean() - slope * x
    error = float(np.sqrt(residuals @ residuals / (count - 2) / (x @ x)))
    margin = float(stdtrit(count - 2, 0.5 + confidence / 2)) * error
    span = count - 1
    return Trend(slope * span, (slope - margin) * span, (slope + margin) * span)
