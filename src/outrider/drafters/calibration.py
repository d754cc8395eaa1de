"""What a drafter learns from the target's verdicts: how far to trust its own guesses.

Owns two counts, both over all requests of a drafter: how often guesses of one kind turned out
right, which makes scores honest, and how much of the shared noise the drafter should believe. None
of it can change the text: it only decides which guesses are made and verified.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from outrider.warping import Row

NOISE_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PRIOR_HITS = dict(zip(NOISE_WEIGHTS, (0.0, 0.5, 1.0, 0.5, 0.0), strict=True))
_FADE = 0.99  # of the evidence, per verdict
_GROUP_SIZE = 64  # entries of which only the largest matters at first; see _lower_bound


class ChanceTable:
    """Hits and trials per kind of guess, on top of a prior worth ``prior_weight`` trials.

    Old counts fade, so that a change of workload shows.
    """

    def __init__(self, *, prior_weight: float = 8.0, max_trials: int = 512) -> None:
        self._prior_weight = prior_weight
        self._max_trials = max_trials
        self._hits: dict[Hashable, int] = {}
        self._trials: dict[Hashable, int] = {}

    def chance(self, kind: Hashable, prior: float) -> float:
        """Chance in [0, 1] that a guess of this kind is right; ``prior`` without experience."""
        hits = self._hits.get(kind, 0) + self._prior_weight * prior
        return hits / (self._trials.get(kind, 0) + self._prior_weight)

    def record(self, kind: Hashable, is_right: bool) -> None:
        """Count one trial."""
        hits = self._hits.get(kind, 0) + is_right
        trials = self._trials.get(kind, 0) + 1
        if trials > self._max_trials:
            hits, trials = hits // 2, trials // 2
        self._hits[kind], self._trials[kind] = hits, trials


def odds_class(probability: float) -> int:
    """Probabilities in classes that behave alike: steps of half a unit of log odds, -6 to 6."""
    bounded = min(max(probability, 1e-9), 1 - 1e-9)
    return round(2 * min(max(math.log(bounded / (1 - bounded)), -6), 6))


class NoiseWeight:
    """How much of the target's noise a drafter adds to its own logits, per temperature (to 0.1).

    A perfect drafter would add all of it, a poor one hardly any: its errors are as large as the
    noise. Every verdict shows for each weight whether it would have ranked the target's pick among
    the children, so all weights are judged on the same evidence, which fades.
    """

    def __init__(self) -> None:
        self._hits: dict[float, dict[float, float]] = {}

    def at(self, temperature: float) -> float:
        """The weight in [0, 1] that has done best at this temperature; 0.5 at the start."""
        hits = self._hits.get(round(temperature, 1), _PRIOR_HITS)
        return max(NOISE_WEIGHTS, key=lambda weight: (hits[weight], -abs(weight - 0.5)))

    def record(
        self, temperature: float, warped_W: Row, noise_W: Row, pick: int, num_children: int
    ) -> None:
        """Judge the weights by one pick (a draft id) of the target."""
        hits = self._hits.setdefault(round(temperature, 1), dict(_PRIOR_HITS))
        for weight in NOISE_WEIGHTS:
            shifted_W = warped_W + np.float32(weight) * noise_W
            rank = int(np.count_nonzero(shifted_W > shifted_W[pick]))
            rank += int(np.count_nonzero(shifted_W[:pick] == shifted_W[pick]))
            is_hit = rank < num_children and shifted_W[pick] > -np.inf
            hits[weight] = _FADE * hits[weight] + is_hit


def largest(row: Row, count: int) -> Sequence[int]:
    """Indices of the ``count`` largest entries above minus infinity, falling; ties by index."""
    if count == 1:
        best = int(row.argmax())
        return [best] if row[best] > -np.inf else []
    bound = _lower_bound(row, count)
    chosen = np.flatnonzero(row >= bound) if bound > -np.inf else np.flatnonzero(row > bound)
    return chosen[np.argsort(-row[chosen], kind="stable")][:count].tolist()


def _lower_bound(row: Row, count: int) -> np.float32:
    """At most the ``count``-th largest entry, and near it; minus infinity where there are fewer.

    The ``count``-th largest of the maxima of disjoint groups: each is an entry of its own, so as
    many entries are at least as large. One cheap look at a whole vocabulary, where a partition
    costs ten times as much.
    """
    num_columns = row.size // _GROUP_SIZE
    if num_columns <= count:
        return np.float32(-np.inf)
    highest = row[: num_columns * _GROUP_SIZE].reshape(_GROUP_SIZE, num_columns).max(axis=0)
    return np.partition(highest, num_columns - count)[num_columns - count]
