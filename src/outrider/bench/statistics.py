"""Ratios of paired measurements with an interval; pure functions, no tensors.

Owns the estimator that every speed comparison in the project uses: per pair the logarithm of the
ratio, their mean with a Student t interval, and the exponential of both. Used by the scripts in
``benchmarks/`` and all judgement of :mod:`outrider.bench`; how many pairs a difference needs is in
:mod:`outrider.bench.planning`. Knows neither models nor clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
MAX_EXACT_FLIPS = 14  # pairs up to which all sign flips are enumerated: 2**14


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """A geometric mean ratio over ``num_pairs`` pairs, with its two-sided interval.

    ``low`` and ``high`` are None for a single pair, which has no spread to judge by.
    """

    ratio: float
    low: float | None
    high: float | None
    num_pairs: int
    confidence: float = CONFIDENCE

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f} (one pair)"
        return f"{self.ratio:.2f} ({self.low:.2f}-{self.high:.2f})"

    @property
    def is_faster(self) -> bool:
        """The whole interval lies above 1."""
        return self.low is not None and self.low > 1.0

    @property
    def is_slower(self) -> bool:
        """The whole interval lies below 1."""
        return self.high is not None and self.high < 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "num_pairs": self.num_pairs,
            "confidence": self.confidence,
        }


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = CONFIDENCE
) -> RatioInterval:
    """Geometric mean of ``numerators[i] / denominators[i]`` with a t interval on the logarithms.

    Pairs must be independent of each other (one per prompt). On few noisy pairs this keeps its
    nominal coverage, which a percentile bootstrap does not.

    Raises:
        ValueError: no pairs, unequal lengths, a value that is not positive and finite, or a
            confidence outside (0, 1).
    """
    if not numerators or len(numerators) != len(denominators):
        raise ValueError(
            f"need as many numerators as denominators and at least one; got {len(numerators)} "
            f"and {len(denominators)}"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence {confidence} is outside (0, 1)")
    for value in (*numerators, *denominators):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{value!r} is not a positive finite number; a ratio needs two")
    logs = [
        math.log(above) - math.log(below)
        for above, below in zip(numerators, denominators, strict=True)
    ]
    return log_interval(logs, confidence)


def log_interval(logs: Sequence[float], confidence: float = CONFIDENCE) -> RatioInterval:
    """The interval of :func:`ratio_interval` from logarithms of ratios; at least one."""
    mean = mean_interval(logs, confidence)
    low, high = (None if end is None else math.exp(end) for end in (mean.low, mean.high))
    return RatioInterval(math.exp(mean.mean), low, high, mean.num_values, confidence)


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its two-sided t interval; ``low`` and ``high`` are None for a single value."""

    mean: float
    low: float | None
    high: float | None
    num_values: int
    confidence: float = CONFIDENCE

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "num_values": self.num_values,
            "confidence": self.confidence,
        }


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> MeanInterval:
    """Mean of independent values with a Student t interval.

    Raises:
        ValueError: no values.
    """
    num_values = len(values)
    if not num_values:
        raise ValueError("need at least one value; got none")
    mean = fmean(values)
    if num_values == 1:
        return MeanInterval(mean, None, None, 1, confidence)
    quantile = float(stdtrit(num_values - 1, 0.5 + confidence / 2))
    margin = quantile * stdev(values) / math.sqrt(num_values)
    return MeanInterval(mean, mean - margin, mean + margin, num_values, confidence)


def p_value_above(logs: Sequence[float], ratio: float) -> float:
    """Chance of means at least this large if the true ratio were ``ratio``: one-sided t test.

    1 for a single pair, which proves nothing.
    """
    if len(logs) < 2:
        return 1.0
    difference, spread = fmean(logs) - math.log(ratio), stdev(logs)
    if spread == 0.0:
        return 0.0 if difference > 0.0 else 1.0
    return float(1.0 - stdtr(len(logs) - 1, difference * math.sqrt(len(logs)) / spread))


def sign_flip_p(logs: Sequence[float]) -> float:
    """Two-sided permutation p-value of "no difference": under it every sign is a coin's.

    Exact up to ``MAX_EXACT_FLIPS`` pairs, whose least value is 2 / 2**n: five pairs cannot reach
    0.05, six can. Beyond, 16,384 flips with a fixed seed.
    """
    values = np.asarray(logs, dtype=np.float64)
    if len(values) <= MAX_EXACT_FLIPS:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), (2**MAX_EXACT_FLIPS, len(values)))
        signs[0] = 1.0  # what was observed belongs to the set it is compared with
    sums = np.abs(signs @ values)
    observed = abs(float(values.sum()))
    return float(np.mean(sums >= observed - 1e-12 * max(1.0, observed)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that keep the chance of any false finding at the level (Holm 1979).

    Valid however the tests depend on each other, as comparisons with a shared baseline do.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def simultaneous_confidence(num_comparisons: int, confidence: float = CONFIDENCE) -> float:
    """The level of each interval so that all of them hold together at ``confidence``.

    Bonferroni: the arms of a load share one baseline, and this holds under any dependence.
    """
    return 1.0 - (1.0 - confidence) / max(1, num_comparisons)
