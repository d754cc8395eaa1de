"""Ratios of paired measurements with an interval; pure functions, no tensors.

Owns the estimator that every speed comparison in the project uses: per pair the logarithm of the
ratio, their mean with a Student t interval, and the exponential of both. Used by
:mod:`outrider.commands.demo` and the scripts in ``benchmarks/``; knows neither models nor clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

CONFIDENCE = 0.95


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
    num_pairs = len(logs)
    mean = fmean(logs)
    if num_pairs == 1:
        return RatioInterval(math.exp(mean), None, None, 1, confidence)
    quantile = float(stdtrit(num_pairs - 1, 0.5 + confidence / 2))
    margin = quantile * stdev(logs) / math.sqrt(num_pairs)
    return RatioInterval(
        math.exp(mean), math.exp(mean - margin), math.exp(mean + margin), num_pairs, confidence
    )
