"""What a round costs: the target's pass timed at start-up, corrected by rounds as they are served.

Owns the cost table and its corrections. :mod:`outrider.budget` asks it what a choice of nodes would
cost and tells it what each round did cost.

The table times the pass alone, for one request, at one moment. A served round also samples,
commits and decodes text, attends to every request's own cache, and shares the machine with others::

    seconds of a round = pace x (table + number of requests x what each takes beyond it)

What each request takes is learnt by the number of requests and of rows, from their first rounds;
between rows that were served it is interpolated, beyond them the nearest holds. Later rounds move
the pace, which all prices share: what is done stays comparable with what is not done while the
machine slows down.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.decoder import Decoder
from outrider.models.layers import Segment

# What the start-up measurement covers; a pass never verifies more rows than the last entry.
TABLE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
TABLE_CONTEXTS = (64, 512)
TABLE_REPEATS = 5

# A remembered table is checked on these rows at its shortest context, and measured anew if either
# of them takes more than so many times what it says, or less than its share.
CHECKED_ROWS = (1, 16)
CHECK_REPEATS = 3
CHECK_S = 0.2  # after which no further repeat is begun
MAX_DISAGREEMENT = 1.3

NEW_ROUNDS = 10  # whose mean says what rounds of one load and so many rows take
LEARNING = 0.02  # weight of a later round in that
PACING = 0.1  # its weight in the pace, which all prices share
MAX_SURPRISE = 1.25  # a later round counts as no more than so many times its price
MAX_NEW_SURPRISE = 4.0  # and a first one: the table may be that far off


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
        return float(self.curve(np.array([num_rows]), context)[0])

    def curve(self, rows: NDArray[Any], context: float) -> NDArray[Any]:
        """The same for several numbers of rows."""
        place = float(np.interp(context, self.contexts, range(len(self.contexts))))
        left = int(place)
        right = min(left + 1, len(self.contexts) - 1)
        shorter, longer = (np.interp(rows, self.rows, self.seconds[c]) for c in (left, right))
        return shorter + (place - left) * (longer - shorter)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostTable:
        """Read back what ``dataclasses.asdict`` wrote."""
        return cls(
            rows=tuple(data["rows"]),
            contexts=tuple(data["contexts"]),
            seconds=tuple(tuple(column) for column in data["seconds"]),
        )


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


def still_holds(table: CostTable, target: Decoder) -> bool:
    """Whether a remembered table is about what passes take now (best of 3, under 0.3 s).

    It may have been measured while the machine was busy, or be of another form than today's.
    """
    if table.rows != TABLE_ROWS:
        return False
    context = table.contexts[0]
    cache = target.new_cache(max_batch_size=1, num_slots=context + max(CHECKED_ROWS))
    row = cache.allocate(committed=context)  # of zeros, which take as long as any
    best = dict.fromkeys(CHECKED_ROWS, math.inf)
    began = time.perf_counter()
    for _ in range(CHECK_REPEATS):
        for count in CHECKED_ROWS:
            started = time.perf_counter()
            target.forward([Segment(row, [0] * count, range(count))], cache)
            best[count] = min(best[count], time.perf_counter() - started)
        if time.perf_counter() - began > CHECK_S:
            break
    ratios = [seconds / table.at(count, context) for count, seconds in best.items()]
    return all(1 / MAX_DISAGREEMENT < ratio < MAX_DISAGREEMENT for ratio in ratios)


@dataclass(slots=True)
class _Extra:
    """Seconds per request beyond the table, and how many rounds say so."""

    seconds: float
    num_rounds: int = 0


class RoundCosts:
    """Seconds of served rounds, drafting left out.

    Args:
        table: the pass alone.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._pace = 1.0
        self._extras: dict[int, dict[int, _Extra]] = {}  # by load, then by the table's rows

    def at(self, num_requests: int, num_rows: int, context: float) -> float:
        """What such a round should take."""
        return float(self.curve(num_requests, np.array([num_rows]), context)[0])

    def curve(self, num_requests: int, rows: NDArray[Any], context: float) -> NDArray[Any]:
        """The same for several numbers of rows."""
        known = self.table.curve(rows, context)
        extra = num_requests * self._extra(num_requests, rows)
        return self._pace * np.maximum(0.1 * known, known + extra)

    def observe(self, num_requests: int, num_rows: int, context: float, seconds: float) -> None:
        """Take in what a round took."""
        if num_rows > self.table.rows[-1]:
            return
        before = float(self._extra(num_requests, np.array([num_rows]))[0])
        place = self.table.rows[bisect_left(self.table.rows, num_rows)]
        cell = self._extras.setdefault(load_of(num_requests), {}).setdefault(place, _Extra(before))
        cell.num_rounds += 1
        price = self.at(num_requests, num_rows, context)
        is_new = cell.num_rounds <= NEW_ROUNDS
        most = MAX_NEW_SURPRISE if is_new else MAX_SURPRISE
        surprise = max(1 / most, min(most, seconds / price))
        if not is_new:
            self._pace *= surprise**PACING
        weight = max(LEARNING, 1 / cell.num_rounds)
        cell.seconds += weight * price * (surprise - 1) / self._pace / num_requests

    def _extra(self, num_requests: int, rows: NDArray[Any]) -> NDArray[Any]:
        """Seconds per request beyond the table."""
        if not self._extras:
            return np.zeros(len(rows))
        load = load_of(num_requests)
        cells = self._extras[min(self._extras, key=lambda other: (abs(other - load), other))]
        known = sorted(cells)
        return np.interp(rows, known, [cells[count].seconds for count in known])


def load_of(num_requests: int) -> int:
    """Numbers of requests in classes that behave alike: 1, 2-3, 4-7, 8-15, ..."""
    return num_requests.bit_length()
