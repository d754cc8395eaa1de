"""The load at which speculation stops paying, as an interval.

Owns the fit. The logarithm of the ratio is taken to fall, or stay, as load grows; between loads it
is drawn as a straight line over the logarithm of the load, and never beyond those tested. Reads
per-block logarithms, writes for :mod:`outrider.bench.judgement`; pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from outrider.bench.statistics import CONFIDENCE, log_interval, simultaneous_confidence

NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where the ratio falls to 1: ``low`` to ``high`` in the loads' unit.

    0 stands for below the least load tested, infinity for above the most. Both are None where no
    single place can be told, and ``reason`` says why.
    """

    low: float | None
    high: float | None
    least: float
    most: float
    unit: str
    reason: str = ""

    @property
    def is_told(self) -> bool:
        """The interval leaves out some load that was tested."""
        return self.low is not None and not (self.low == 0.0 and self.high == math.inf)

    @property
    def text(self) -> str:
        """For people; an end that was not reached is told as a bound."""
        if self.low is None or self.high is None:
            return f"no break-even load: {self.reason}"
        if self.low == math.inf:
            return f"break-even above {self.most:g} {self.unit}, the most tested"
        if self.high == 0.0:
            return f"break-even below {self.least:g} {self.unit}, the least tested"
        if self.low == 0.0 and self.high == math.inf:
            return (
                f"break-even not found: it may be anywhere from {self.least:g} to {self.most:g} "
                f"{self.unit}, or beyond; more blocks narrow it"
            )
        if self.high == math.inf:
            return (
                f"break-even above {self.low:.3g} {self.unit}, maybe above the {self.most:g} tested"
            )
        if self.low == 0.0:
            return f"break-even below {self.high:.3g} {self.unit}"
        return f"break-even between {self.low:.3g} and {self.high:.3g} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document; infinity is null with ``is_beyond``."""
        finite = {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in (("low", self.low), ("high", self.high))
        }
        return {
            **finite,
            "is_above_tested": self.low == math.inf,
            "is_below_tested": self.high == 0.0,
            "least": self.least,
            "most": self.most,
            "unit": self.unit,
            "text": self.text,
        }


def break_even(
    logs: Mapping[float, Sequence[float]],
    unit: str,
    *,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> BreakEven | None:
    """From per-block logarithms of the ratio by load; None below two loads with two blocks each.

    The interval is of crossings of fitted lines, with each load's mean drawn from its own t
    distribution: resampling a handful of blocks instead would make it too narrow.
    """
    usable = {load: list(values) for load, values in sorted(logs.items()) if len(values) >= 2}
    if len(usable) < 2:
        return None
    loads = list(usable)
    if rising := _rising(usable, confidence):
        first, later = rising
        reason = (
            f"the ratio is higher at {later:g} than at {first:g} {unit}, so it does not just fall"
        )
        return BreakEven(None, None, loads[0], loads[-1], unit, reason)
    source = np.random.default_rng(seed)
    x = np.log(loads)
    weights = np.array([len(values) for values in usable.values()], dtype=np.float64)
    means = np.array([fmean(values) for values in usable.values()])
    errors = np.array(
        [np.std(values, ddof=1) / math.sqrt(len(values)) for values in usable.values()]
    )
    noise = np.column_stack([source.standard_t(n - 1, NUM_DRAWS) for n in weights])
    crossings = [_crossing(x, falling(row, weights)) for row in means + noise * errors]
    tail = (1.0 - confidence) / 2
    low, high = np.quantile(crossings, [tail, 1.0 - tail], method="inverted_cdf")
    return BreakEven(float(low), float(high), loads[0], loads[-1], unit)


def falling(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The closest sequence that never rises: pool neighbours until none does (weighted squares)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pools.append((float(value), float(weight), 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, weight_a, count_a), (b, weight_b, count_b) = pools[-2:]
            mean = (a * weight_a + b * weight_b) / (weight_a + weight_b)
            pools[-2:] = [(mean, weight_a + weight_b, count_a + count_b)]
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


def _crossing(x: np.ndarray, y: np.ndarray) -> float:
    """Where a falling line passes 0, as a load; 0 or infinity where it does not."""
    if y[0] < 0.0:
        return 0.0
    if y[-1] >= 0.0:
        return math.inf
    place = int(np.argmax(y < 0.0))
    share = y[place - 1] / (y[place - 1] - y[place])
    return float(np.exp(x[place - 1] + share * (x[place] - x[place - 1])))


def _rising(logs: Mapping[float, Sequence[float]], confidence: float) -> tuple[float, float] | None:
    """Two loads of which the higher has clearly the higher ratio."""
    level = simultaneous_confidence(len(logs), confidence)
    intervals = {load: log_interval(values, level) for load, values in logs.items()}
    for first, left in intervals.items():
        for later, right in intervals.items():
            if later > first and (right.low or 0.0) > (left.high or math.inf):
                return first, later
    return None
