"""What an amount of data is worth: between measurements, at their ends, and in words."""

from __future__ import annotations

import math

import pytest

from outrider.training import expectation
from outrider.training.expectation import (
    FEW_TOKENS,
    MEASURED,
    MIN_TOKENS,
    describe_expectation,
    describe_goal,
    expected_length,
    warn_of_few,
)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(expectation, "MEASURED", ((0, 1.0), (20_000, 1.2), (2_000_000, 1.8)))


def test_the_table_rises_from_nothing_to_beyond_what_is_few():
    sizes, lengths = zip(*MEASURED, strict=True)

    assert (0, 1.0) == MEASURED[0]
    assert sorted(set(sizes)) == list(sizes)
    assert sorted(lengths) == list(lengths)
    assert MIN_TOKENS < sizes[1]
    assert FEW_TOKENS < sizes[-1]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 1.0),
        (MIN_TOKENS, 1.0),
        (round(math.sqrt(MIN_TOKENS * 20_000)), 1.1),
        (20_000, 1.2),
        (200_000, 1.5),
        (2_000_000, 1.8),
        (10**9, 1.8),
    ],
)
def test_a_length_is_linear_in_the_logarithm_and_ends_with_the_last_one(
    table, num_tokens, expected
):
    assert expected == pytest.approx(expected_length(num_tokens), abs=1e-4)


def test_the_measurements_themselves_are_told():
    for num_tokens, length in MEASURED:
        assert length == expected_length(num_tokens)
        assert f"about {length:.2f} (measured with" in describe_expectation(num_tokens)


def test_beyond_the_last_measurement_no_number_is_made_up(table):
    assert "about 1.80 or more (measured" in describe_expectation(2_000_001)


def test_few_tokens_are_told_with_the_next_size_and_how_many_answers_that_is(table):
    told = warn_of_few(10_000, 100)

    assert told is not None
    assert told.startswith("warning: 10,000 response tokens are few")
    assert "with 20,000 tokens, here about 200 answers, expect about 1.20" in told
    assert "with 2,000,000 tokens" in (warn_of_few(20_000, 100) or "")
    assert warn_of_few(FEW_TOKENS - 1, 100) is not None
    assert warn_of_few(FEW_TOKENS, 100) is None


def test_the_goal_is_the_next_measurement(table):
    assert "with 20,000 expect an acceptance length of about 1.20" in describe_goal(0)
    assert "with 2,000,000 expect" in describe_goal(20_000)
