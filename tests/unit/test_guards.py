"""Repetition loops: what counts as one, where it begins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.guards import MAX_PERIOD, MIN_REPEATS, MIN_TOKENS, loop_start

tokens = st.integers(0, 5)


def reference(ids: Sequence[int]) -> int | None:
    """The definition, word for word: the earliest start of a tail that repeats often enough."""
    for start in range(len(ids)):
        length = len(ids) - start
        for period in range(1, MAX_PERIOD + 1):
            is_long = length >= max(MIN_REPEATS * period, MIN_TOKENS)
            if is_long and all(ids[i] == ids[i - period] for i in range(start + period, len(ids))):
                return start
    return None


def looping(prefix: Sequence[int], period: Sequence[int], length: int) -> list[int]:
    repeated = list(period) * (length // len(period) + 1)
    return [*prefix, *repeated[:length]]


@given(st.lists(tokens, max_size=30), st.lists(tokens, min_size=1, max_size=12), st.integers(0, 60))
def test_a_loop_begins_where_the_definition_says(
    prefix: list[int], period: list[int], length: int
) -> None:
    ids = looping(prefix, period, length)

    assert reference(ids) == loop_start(ids)


@given(st.lists(st.integers(0, 10**6), max_size=300, unique=True))
def test_a_text_without_a_repeated_token_has_no_loop(ids: list[int]) -> None:
    assert loop_start(ids) is None


@pytest.mark.parametrize("period", [1, 2, 7, 8, 9, 63, MAX_PERIOD])
def test_a_loop_counts_from_three_periods_and_24_tokens_on(period: int) -> None:
    needed = max(3 * period, 24)
    prefix, cycle = [900, 901, 902, 903], range(period)

    assert loop_start(looping(prefix, cycle, needed - 1)) is None
    assert loop_start(looping(prefix, cycle, needed)) == 4
    assert loop_start(looping(prefix, cycle, needed + 1)) == 4


def test_a_longer_period_is_no_loop() -> None:
    assert loop_start(looping([], range(MAX_PERIOD + 1), 400)) is None


def test_a_repetition_that_the_text_left_again_is_none() -> None:
    ids = looping([7, 8], [1, 2, 3], 60)

    assert loop_start(ids) == 2
    assert loop_start([*ids, 9]) is None


def test_a_numbered_list_is_no_loop() -> None:
    """The frame of each line is the same, its number and its words are not."""
    words = iter(range(1000, 2000))
    ids = [t for n in range(20) for t in (100 + n, 1, 2, next(words), next(words), 3, 4)]

    assert loop_start(ids) is None


def test_a_table_is_no_loop() -> None:
    bar, dash, newline = 1, 2, 3
    head = [bar, 50, bar, 51, bar, 52, bar, newline, *[bar, dash] * 3, bar, newline]
    body = [t for n in range(12) for t in (bar, 60 + n, bar, 80, bar, 200 + n, bar, newline)]

    assert loop_start(head) is None
    assert loop_start([*head, *body]) is None


def test_a_list_whose_lines_are_all_the_same_is_a_loop() -> None:
    ids = [5, 6, *[1, 40, 41, 42, 2] * 6]

    assert loop_start(ids) == 2


@pytest.mark.parametrize("ids", [[], [1], [1, 1]])
def test_a_text_too_short_for_any_loop_has_none(ids: list[int]) -> None:
    assert loop_start(ids) is None
