"""How many blocks a difference needs, and what a number of blocks can find.

Owns the power of the t test on logarithms of ratios; pure functions. Used by
:mod:`outrider.bench.verdict` to say how many blocks are still missing, and to announce before a run
what it will be able to see. A *spread* is always the standard deviation of the per-block logarithm
of a ratio: 0.03 is about 3 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from scipy.special import nctdtr, stdtrit

from outrider.bench.statistics import CONFIDENCE, RatioInterval, log_interval

MIN_BLOCKS = 6  # fewer cannot reach p = 0.05 by sign flips, whatever they show
MAX_BLOCKS = 1000  # beyond, the answer is "too close to call", not a number
POWER = 0.8


def power(
    num_blocks: int, spread: float, log_difference: float, confidence: float = CONFIDENCE
) -> float:
    """Chance that ``num_blocks`` blocks show a true difference, by a two-sided t test.

    ``log_difference`` is the logarithm of the true ratio over the one it is compared with. From the
    noncentral t distribution, so exact for normal logarithms.
    """
    if num_blocks < 2:
        return 0.0
    if spread <= 0.0:
        return 1.0 if log_difference else 0.0
    quantile = float(stdtrit(num_blocks - 1, 0.5 + confidence / 2))
    shift = abs(log_difference) * math.sqrt(num_blocks) / spread
    if shift > 20.0 * quantile:
        return 1.0  # beyond what the distribution function resolves, and as good as certain
    return float(1.0 - nctdtr(num_blocks - 1, shift, quantile))


def blocks_needed(
    spread: float,
    log_difference: float,
    *,
    confidence: float = CONFIDENCE,
    wanted_power: float = POWER,
    at_least: int = MIN_BLOCKS,
) -> int | None:
    """The fewest blocks with that power; None above ``MAX_BLOCKS``.

    Never below ``at_least``.
    """
    if power(MAX_BLOCKS, spread, log_difference, confidence) < wanted_power:
        return None
    low, high = at_least - 1, max(at_least, MAX_BLOCKS)
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle, spread, log_difference, confidence) >= wanted_power:
            high = middle
        else:
            low = middle
    return high


def detectable_ratio(
    num_blocks: int, spread: float, *, confidence: float = CONFIDENCE, wanted_power: float = POWER
) -> float | None:
    """The smallest true ratio above 1 that so many blocks show with that power; None below two."""
    if num_blocks < 2:
        return None
    low, high = 0.0, 10.0
    if power(num_blocks, spread, high, confidence) < wanted_power:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        if power(num_blocks, spread, middle, confidence) >= wanted_power:
            high = middle
        else:
            low = middle
    return math.exp(high)


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """What the baseline against itself showed at one load.

    ``spread`` is None for a single A/A block. ``interval`` should contain 1: if not, order or drift
    makes a difference where there is none.
    """

    interval: RatioInterval
    spread: float | None

    @property
    def is_fair(self) -> bool:
        """The interval contains 1."""
        return not (self.interval.is_faster or self.interval.is_slower)

    @property
    def text(self) -> str:
        """For people: how much the same server differed from itself."""
        if self.spread is None:
            return "one A/A block: no noise floor"
        return f"A/A blocks differ by {self.spread:.1%} (one standard deviation)"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "spread": self.spread,
            "is_fair": self.is_fair,
            "interval": self.interval.to_json(),
        }


def noise_floor(logs: Sequence[float], confidence: float = 0.99) -> NoiseFloor | None:
    """The noise floor from A/A blocks' logarithms of ratios; None without any.

    At 99 %: a false alarm here would void a sound load.
    """
    if not logs:
        return None
    spread = stdev(logs) if len(logs) > 1 else None
    return NoiseFloor(log_interval(logs, confidence), spread)
