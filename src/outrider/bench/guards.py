"""What makes a text unfit to measure by: so far, that it fell into a repetition loop.

Owns the definition of a loop, on token ids. A text that repeats itself is predicted by anything, so
it flatters every drafter: measurements leave it out, and training data is cut where it begins. Used
by :mod:`outrider.training` and the benchmarks; knows neither models nor texts as strings.

A loop is a tail in which every token equals the one ``period`` places before it::

    x y z a b c a b c a b c a b         period 3, from the first a on
          |------ tail ------|

It counts from ``MIN_REPEATS`` whole periods and ``MIN_TOKENS`` tokens on, at a period of at most
``MAX_PERIOD``. Lists and tables repeat their frame, but each line says something else, so no tail
of theirs is periodic; a shorter tail may be a refrain, a rule or a row of zeros. A repetition that
the text left again is none: what it ends in decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 64
MIN_REPEATS = 3
MIN_TOKENS = 24

_PERIODS = np.arange(1, MAX_PERIOD + 1)
_NEEDED = np.maximum(MIN_REPEATS * _PERIODS, MIN_TOKENS)
_NO_TOKEN = -1  # stands before the text's beginning; equals no id


class LoopWatch:
    """Finds a loop while a text grows; each token costs a few vector operations of 64 entries."""

    def __init__(self) -> None:
        self._recent = np.full(MAX_PERIOD, _NO_TOKEN, dtype=np.int64)  # the newest first
        self._num_equal = np.zeros(MAX_PERIOD, dtype=np.int64)  # at the end, by period
        self._num_tokens = 0

    def push(self, token: int) -> int | None:
        """Take one token; returns where the loop begins that the text is in now, if it is in one.

        That is the index of the first token of its first period.
        """
        self._num_equal = np.where(self._recent == token, self._num_equal + 1, 0)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        self._num_tokens += 1
        return _longest(self._num_equal, self._num_tokens)


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Where the loop begins in which a text ends; None for a text that ends in none.

    The index of the first token of the first period: what stands before it is sound, and the first
    period itself is said for the first time.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    num_equal = np.zeros(MAX_PERIOD, dtype=np.int64)
    for period in range(1, min(MAX_PERIOD, len(ids) - 1) + 1):
        differing = np.flatnonzero(ids[period:] != ids[:-period])
        num_equal[period - 1] = len(ids) - period - (differing[-1] + 1 if len(differing) else 0)
    return _longest(num_equal, len(ids))


def _longest(num_equal: np.ndarray, num_tokens: int) -> int | None:
    """Where the longest tail that counts begins; ``num_equal[period - 1]`` tokens repeat."""
    lengths = np.where(num_equal > 0, num_equal + _PERIODS, 0)
    longest = int(lengths[lengths >= _NEEDED].max(initial=0))
    return num_tokens - longest if longest else None
