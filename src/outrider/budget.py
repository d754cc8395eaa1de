"""The load policy: verify only nodes that pay for the time they take.

Owns the cost table ``T_target(rows, context)`` and the choice of nodes; under the coupled rule any
choice leaves the text unchanged, so this is about speed alone. Stands between the drafter, whose
``score`` is a calibrated chance of being accepted, and the target's pass.

For the whole batch it takes the most likely nodes, as many as maximise

    (num_requests + sum of scores) / (T_draft + T_target(rows))

which is the adaptive draft length, the tree size and the off switch in one rule: with no node, the
step is plain decoding.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from outrider.models.decoder import Decoder
from outrider.models.layers import Segment
from outrider.tree import DraftTree
from outrider.types import StepRecord

# A node set must promise this much over plain decoding before it is tried: the table is measured
# on a noisy machine, and a gain within its error is no gain.
MIN_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one target pass by packed rows and by context length, measured at start-up.

    ``seconds[c][r]`` belongs to ``contexts[c]`` and ``rows[r]``, both ascending. Values between
    are interpolated; beyond the ends the nearest entry holds (never extrapolated in rows: the
    engine does not verify more rows than the table knows).
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, num_rows: int, context: float) -> float:
        """Interpolated seconds of a pass."""
        by_context = [_interpolate(self.rows, column, num_rows) for column in self.seconds]
        return _interpolate(self.contexts, by_context, context)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """Read back what ``dataclasses.asdict`` wrote."""
        return cls(
            rows=tuple(data["rows"]),
            contexts=tuple(data["contexts"]),
            seconds=tuple(tuple(column) for column in data["seconds"]),
        )


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Piecewise linear through the points, constant beyond them."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    after = bisect_right(xs, x)
    left, right = xs[after - 1], xs[after]
    weight = (x - left) / (right - left)
    return ys[after - 1] * (1 - weight) + ys[after] * weight


# What the start-up measurement covers; a pass never verifies more rows than the last entry.
TABLE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
TABLE_CONTEXTS = (64, 512)
TABLE_REPEATS = 5


def measure_costs(
    target: Decoder, max_model_len: int, on_progress: Callable[[str, float | None], None] | None
) -> CostTable:
    """Time the target's pass over the table's rows and contexts (best of 5, about 2 s).

    The best, since the table is kept and a disturbance only ever adds time. Row counts are
    interleaved, so that none is hit alone, and made non-decreasing: more rows never cost less.
    """
    contexts = tuple(c for c in TABLE_CONTEXTS if c < max_model_len) or (1,)
    cache = target.new_cache(max_batch_size=1, num_slots=contexts[-1] + TABLE_ROWS[-1])
    row = cache.allocate()
    seconds = []
    for place, context in enumerate(contexts):
        if on_progress is not None:
            on_progress("timing the target", place / len(contexts))
        while cache.committed(row) < context:
            count = min(32, context - cache.committed(row))
            target.forward([Segment(row, [0] * count, range(count), num_silent=count)], cache)
            cache.extend(row, count)
        taken: dict[int, list[float]] = {count: [] for count in TABLE_ROWS}
        for _ in range(TABLE_REPEATS):
            for count in TABLE_ROWS:
                started = time.perf_counter()
                target.forward([Segment(row, [0] * count, range(count))], cache)
                taken[count].append(time.perf_counter() - started)
        best = [min(taken[count]) for count in TABLE_ROWS]
        seconds.append(tuple(accumulate(best, max)))
    return CostTable(TABLE_ROWS, contexts, tuple(seconds))


class Budget:
    """Prunes each step's trees.

    Args:
        costs: the target's cost table, or None to verify everything that was drafted (pinned
            settings).
        max_rows: most rows of one pass.
    """

    def __init__(self, costs: CostTable | None, *, max_rows: int) -> None:
        self._costs = costs
        self._max_rows = max_rows
        self._draft_s = 0.0
        self._pass_s = 0.0  # one pass of the drafter's own module

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """The batch's trees reduced to the nodes worth verifying; roots always stay.

        ``contexts`` are the requests' committed lengths, ``num_silent`` the prompt rows that share
        the pass.
        """
        nodes = sorted(
            (-tree.score[node], b, node)
            for b, tree in enumerate(trees)
            for node in range(1, len(tree))
        )
        nodes = nodes[: max(0, self._max_rows - len(trees))]
        if self._costs is not None:
            scores = [-score for score, _, _ in nodes]
            nodes = nodes[: self._best_count(scores, contexts, len(trees) + num_silent)]
        kept: list[list[int]] = [[] for _ in trees]
        for _, b, node in nodes:
            kept[b].append(node)
        return [
            tree if len(keep) == tree.num_drafted else tree.keep(keep)
            for tree, keep in zip(trees, kept, strict=True)
        ]

    def min_score(self, contexts: Sequence[int]) -> float:
        """The chance below which a node cannot be worth the drafter's pass that would extend it.

        One more pass yields at most one more token with that chance, and a token costs at most
        the target's pass. 0 where everything is verified.
        """
        if self._costs is None:
            return 0.0
        return self._pass_s / self._costs.at(len(contexts), fmean(contexts))

    def observe(self, record: StepRecord) -> None:
        """Take in what a step's drafting cost (moving average)."""
        self._draft_s += 0.1 * (record.draft_s - self._draft_s)
        if record.draft_passes:
            self._pass_s += 0.1 * (record.draft_s / record.draft_passes - self._pass_s)

    def _best_count(self, scores: Sequence[float], contexts: Sequence[int], base_rows: int) -> int:
        """How many of the best nodes maximise the expected tokens per second."""
        assert self._costs is not None
        context, expected = fmean(contexts), float(len(contexts))
        best_count = 0
        best_rate = MIN_GAIN * expected / (self._draft_s + self._costs.at(base_rows, context))
        for count, score in enumerate(scores, start=1):
            expected += score
            seconds = self._draft_s + self._costs.at(base_rows + count, context)
            if expected / seconds > best_rate:
                best_count, best_rate = count, expected / seconds
        return best_count
