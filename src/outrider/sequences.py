"""What two sequences of token ids have in common.

Owns no state. At the bottom of the flow, for the prefix cache and for grammars, which both ask how
far an earlier sequence goes with a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

_GLANCE = 16  # tokens that are looked at first


def shared_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens with which both begin.

    By halving, on slices that compare at the speed of C; most pairs differ at once, or one goes on
    where the other ends.
    """
    low, high = 0, min(len(first), len(second))
    first, second = tuple(first[:high]), tuple(second[:high])
    if first == second:
        return high
    if first[:_GLANCE] != second[:_GLANCE]:
        high = min(high, _GLANCE)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
