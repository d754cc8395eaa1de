from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider.types
from outrider.types import (
    DIMENSIONS,
    Completion,
    FinishReason,
    SpeculationStats,
    Timing,
    Usage,
    Verdict,
)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """A path of any depth through a tree of at least that many nodes."""
    depth = draw(st.integers(0, 6))
    return Verdict(
        path=tuple(range(1, depth + 1)),
        tokens=tuple(range(depth + 1)),
        num_drafted=depth + draw(st.integers(0, 8)),
    )


def stats_of(steps: list[Verdict]) -> SpeculationStats:
    """The counts of these steps."""
    stats = SpeculationStats()
    for verdict in steps:
        stats.record(verdict.num_drafted, len(verdict.path))
    return stats


def test_statistics_of_a_small_example():
    """Three steps: all of three accepted, one of two, none of one."""
    stats = stats_of(
        [
            Verdict((1, 2, 3), (5, 6, 7, 8), 3),
            Verdict((2,), (5, 6), 2),
            Verdict((), (5,), 1),
        ]
    )

    assert SpeculationStats(verify_steps=3, drafted=6, accepted=4, accepted_at=[2, 1, 1]) == stats
    assert pytest.approx(7 / 3) == stats.acceptance_length
    assert pytest.approx(4 / 6) == stats.acceptance_rate
    assert pytest.approx([2 / 3, 1 / 3, 1 / 3]) == stats.per_position


@given(st.lists(verdicts(), min_size=1, max_size=30))
def test_acceptance_length_is_one_plus_the_sum_of_the_rates_per_position(steps: list[Verdict]):
    stats = stats_of(steps)
    num_emitted = sum(len(verdict.tokens) for verdict in steps)

    assert pytest.approx(1 + sum(stats.per_position)) == stats.acceptance_length
    assert pytest.approx(num_emitted / len(steps)) == stats.acceptance_length
    assert sorted(stats.per_position, reverse=True) == stats.per_position
    assert 0.0 <= stats.acceptance_rate <= 1.0


@given(st.lists(verdicts(), max_size=20), st.lists(verdicts(), max_size=20))
def test_adding_requests_equals_recording_all_their_steps(
    left: list[Verdict], right: list[Verdict]
):
    total, other = stats_of(left), stats_of(right)
    total.add(other)

    assert stats_of([*left, *right]) == total
    assert stats_of(right) == other


def test_each_request_counts_on_its_own():
    first, second = SpeculationStats(), SpeculationStats()
    first.record(1, 1)

    assert SpeculationStats() == second


def test_nothing_verified_has_length_one_and_no_rates():
    stats = SpeculationStats()

    assert (1.0, 0.0, []) == (stats.acceptance_length, stats.acceptance_rate, stats.per_position)


def test_plain_steps_have_length_one():
    stats = stats_of([Verdict((), (5,), 0)] * 4)

    assert (1.0, 0.0, []) == (stats.acceptance_length, stats.acceptance_rate, stats.per_position)


def test_usage_adds_prompt_and_completion():
    assert 12 == Usage(prompt_tokens=5, completion_tokens=7).total_tokens


def test_finish_reasons_are_the_words_of_the_interface():
    assert ["stop", "length", "abort", "error"] == [str(reason) for reason in FinishReason]


def test_a_verdict_cannot_be_changed():
    verdict = Verdict((), (5,), 0)

    assert verdict.is_finite
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.tokens = ()  # type: ignore[misc]


def test_the_dimension_key_is_the_one_in_the_module_docstring():
    assert outrider.types.__doc__ is not None
    for letter, meaning in DIMENSIONS.items():
        assert f"{letter}    {meaning}" in outrider.types.__doc__


def completion_of(stats: SpeculationStats, timing: Timing) -> Completion:
    return Completion(
        text="",
        token_ids=(),
        finish_reason=FinishReason.LENGTH,
        usage=Usage(1, 1),
        method="eagle3",
        speculation=stats,
        timing=timing,
        fingerprint="",
    )


def test_the_cost_of_a_draft_pass_is_told_in_target_passes():
    """Four steps of 0.5 s with ten draft passes of 0.02 s."""
    timing = Timing(0, 0, 0, 0, draft_s=0.2, verify_s=2.0, draft_passes=10)
    stats = SpeculationStats(verify_steps=4)

    assert pytest.approx(0.04) == completion_of(stats, timing).draft_cost


def test_without_draft_passes_or_steps_there_is_no_cost():
    quiet = Timing(0, 0, 0, 0, draft_s=0.2, verify_s=2.0)
    waiting = Timing(0, 0, 0, 0, draft_s=0.0, verify_s=0.0, draft_passes=1)

    assert completion_of(SpeculationStats(verify_steps=4), quiet).draft_cost is None
    assert completion_of(SpeculationStats(), waiting).draft_cost is None
