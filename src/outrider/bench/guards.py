"""What makes a text unfit to measure by: that it fell into a repetition loop.

Owns the definition of a loop, on token ids, and for texts of servers that give no ids on pieces
about as long as tokens. A text that repeats itself is predicted by anything, so it flatters every
drafter: measurements leave it out, and training data is cut where it begins. Used by
:mod:`outrider.training`, :mod:`outrider.bench.output_guards` and the benchmarks; knows no model.

A loop is a tail in which every token equals the one ``period`` places before it::

    x y z a b c a b c a b c a b         period 3, from the first a on
          |------ tail ------|

It counts from ``MIN_REPEATS`` whole periods and ``MIN_TOKENS`` tokens on, at a period of at most
``MAX_PERIOD``. Lists and tables repeat their frame, but each line says something else, so no tail
of theirs is periodic; a shorter tail may be a refrain, a rule or a row of zeros. A repetition that
the text left again is none: what it ends in decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

MAX_PERIOD = 64
MIN_REPEATS = 3
MIN_TOKENS = 24

# Words in pieces of up to eight letters; any other character, scripts without spaces included, by
# itself; line breaks too, since a list whose lines are all the same is a loop.
_PIECE = re.compile(r"[A-Za-z0-9_]{1,8}|[^\S\n]*(\S|\n)")

_PERIODS = np.arange(1, MAX_PERIOD + 1)
_NEEDED = np.maximum(MIN_REPEATS * _PERIODS, MIN_TOKENS)


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
    lengths = np.where(num_equal > 0, num_equal + _PERIODS, 0)
    longest = int(lengths[lengths >= _NEEDED].max(initial=0))
    return len(ids) - longest if longest else None


@lru_cache(maxsize=8192)  # lossless arms write the same texts in every block
def ends_in_loop(text: str) -> bool:
    """Whether a text ends in a loop, judged by pieces about as long as tokens.

    The last piece may be a word that was cut off, so the text without it counts as well.
    """
    numbers: dict[str, int] = {}
    pieces = (match.group().strip(" \t\r") for match in _PIECE.finditer(text))
    ids = [numbers.setdefault(piece, len(numbers)) for piece in pieces]
    return loop_start(ids) is not None or loop_start(ids[:-1]) is not None
