"""What a step costs as a function of load, fitted on some loads and checked on others.

Owns the model, its fit and the rule by which a projection is hidden. With B requests in flight, m
drafted tokens per request and step, and tau tokens won per step (bonus included)::

    plain step        fixed + per_request B
    speculative step  the same + draft_fixed + draft_token B m
    ratio             tau x plain step / speculative step

which is the usual decomposition (Leviathan et al. 2023; SmartSpec, Liu et al. 2024) at the measured
context length. It is linear, so it is wrong past the point where a pass becomes compute-bound, or
with mixtures of experts: that is what the held-out loads are for. Reads decode times of
:mod:`outrider.bench.metrics`; writes for :mod:`outrider.bench.judgement`. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.optimize import nnls

MIN_LOADS, MIN_HELD_OUT = 4, 2
MAX_MEDIAN_ERROR, MAX_ERROR = 0.05, 0.15  # |ln(predicted / measured)| over the held-out loads


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step by part, all at least 0; see the module for what multiplies them."""

    fixed_s: float
    per_request_s: float
    draft_fixed_s: float
    draft_token_s: float

    def plain_s(self, users: float) -> float:
        """A step of plain decoding, one token per request."""
        return self.fixed_s + self.per_request_s * users

    def speculative_s(self, users: float, num_drafted: float) -> float:
        """A step that drafts and verifies ``num_drafted`` tokens per request."""
        extra_s = self.draft_fixed_s + self.draft_token_s * users * num_drafted
        return self.plain_s(users) + extra_s

    def ratio(self, users: float, num_drafted: float, length: float) -> float:
        """Decode speed over plain decoding's at an acceptance length."""
        return length * self.plain_s(users) / self.speculative_s(users, num_drafted)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What was measured at one number of users: steps, drafts per step, acceptance length."""

    users: int
    plain_s: float
    speculative_s: float
    num_drafted: float
    length: float

    @property
    def ratio(self) -> float:
        """Measured decode speed over plain decoding's."""
        return self.length * self.plain_s / self.speculative_s


@dataclass(frozen=True, slots=True)
class Projection:
    """A fitted model and how it did on loads it had not seen; ``cost`` is None if it is hidden.

    ``ratios`` are decode-phase ratios by users: (measured, predicted, is_held_out).
    """

    cost: StepCost | None
    num_drafted: float
    length: float
    ratios: dict[int, tuple[float, float, bool]]
    reason: str = ""

    @property
    def is_shown(self) -> bool:
        """The held-out loads agreed with it."""
        return self.cost is not None

    def at(self, users: float) -> float | None:
        """Predicted ratio; None if hidden or beyond the loads that were measured."""
        is_tested = min(self.ratios, default=1) <= users <= max(self.ratios, default=0)
        if self.cost is None or not is_tested:
            return None
        return self.cost.ratio(users, self.num_drafted, self.length)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document; a hidden projection gives its reason, no figures."""
        if self.cost is None:
            return {"is_shown": False, "reason": self.reason}
        rows = [
            {"users": users, "measured": seen, "predicted": told, "is_held_out": is_held_out}
            for users, (seen, told, is_held_out) in self.ratios.items()
        ]
        return {"is_shown": True, "cost": asdict(self.cost), "ratios": rows}


def project(points: Sequence[LoadPoint]) -> Projection:
    """Fit on some loads, check on at least two others between them, hide what misses."""
    points = sorted(points, key=lambda point: point.users)
    if len(points) < MIN_LOADS:
        reason = (
            f"{len(points)} loads with acceptance counts; a projection needs {MIN_LOADS}, "
            f"{MIN_HELD_OUT} of them to check it"
        )
        return Projection(None, 0.0, 0.0, {}, reason)
    held_out = held_out_places(len(points))
    seen = [point for place, point in enumerate(points) if place not in held_out]
    cost = fit(seen)
    drafted = fmean(point.num_drafted for point in seen)
    length = fmean(point.length for point in seen)
    ratios = {
        point.users: (point.ratio, cost.ratio(point.users, drafted, length), place in held_out)
        for place, point in enumerate(points)
    }
    checked = [(measured, told) for measured, told, is_held_out in ratios.values() if is_held_out]
    errors = [abs(math.log(told / measured)) for measured, told in checked]
    is_other_side = any(
        (measured - 1.0) * (told - 1.0) < 0.0 and abs(math.log(measured)) > MAX_MEDIAN_ERROR
        for measured, told in checked
    )
    if median(errors) > MAX_MEDIAN_ERROR or max(errors) > MAX_ERROR or is_other_side:
        reason = (
            f"on loads it had not seen the model is off by {median(errors):.0%} in the median and "
            f"{max(errors):.0%} at most (allowed {MAX_MEDIAN_ERROR:.0%} and {MAX_ERROR:.0%}"
            f"{', and it puts a load on the wrong side of 1' if is_other_side else ''})"
        )
        return Projection(None, drafted, length, ratios, reason)
    return Projection(cost, drafted, length, ratios)


def held_out_places(num_loads: int) -> set[int]:
    """Every second load between the ends; with four loads both, as two are the least."""
    places = set(range(1, num_loads - 1, 2))
    return places if len(places) >= MIN_HELD_OUT else set(range(1, num_loads - 1))


def fit(points: Sequence[LoadPoint]) -> StepCost:
    """Least squares of relative errors, no part below 0: the baseline first, then what is added."""
    users = np.array([point.users for point in points], dtype=np.float64)
    drafted = np.array([point.num_drafted for point in points])
    plain = np.array([point.plain_s for point in points])
    fixed, per_request = _fit_line(users, plain, plain)
    extra = np.array([point.speculative_s for point in points]) - (fixed + per_request * users)
    draft_fixed, draft_token = _fit_line(users * drafted, extra, plain + np.maximum(extra, 0.0))
    return StepCost(fixed, per_request, draft_fixed, draft_token)


def _fit_line(x: np.ndarray, y: np.ndarray, scale: np.ndarray) -> tuple[float, float]:
    """Offset and slope, both at least 0, of ``y / scale``."""
    rows = np.column_stack([1.0 / scale, x / scale])
    (offset, slope), _ = nnls(rows, y / scale)
    return float(offset), float(slope)
