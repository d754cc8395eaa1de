"""What drafters learn from verdicts: chances, the weight of the noise, and the largest entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.calibration import (
    NOISE_WEIGHTS,
    ChanceTable,
    NoiseWeight,
    largest,
    odds_class,
)
from outrider.noise import gumbel_vector

VALUES = st.one_of(
    st.sampled_from([-1.0, -0.0, 0.0, 1.0, 1.0, -np.inf, -np.inf]), st.floats(-9, 9, width=32)
)


# --- the largest entries of a row ---------------------------------------------------------------


@given(st.lists(VALUES, min_size=1, max_size=12), st.integers(1, 14))
def test_the_largest_entries_are_those_of_a_plain_sort(values: list[float], count: int) -> None:
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    expected = [index for index in order[:count] if values[index] > -np.inf]

    assert expected == largest(np.array(values, dtype=np.float32), count)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(60, 3000),
    num_values=st.sampled_from([2, 20, 10**6]),
    kept=st.sampled_from([1.0, 0.5, 0.01, 0.0]),
    count=st.sampled_from([2, 4, 10]),
)
def test_the_largest_of_a_wide_row_are_those_of_a_plain_sort(
    seed: int, size: int, num_values: int, kept: float, count: int
) -> None:
    random = np.random.default_rng(seed)
    row = random.integers(-num_values, num_values, size).astype(np.float32)  # with many ties
    row[random.random(size) >= kept] = -np.inf  # as a filter or a grammar leaves it
    order = sorted(range(size), key=lambda index: (-row[index], index))
    expected = [index for index in order[:count] if row[index] > -np.inf]

    assert expected == largest(row, count)


# --- chances ------------------------------------------------------------------------------------


def test_a_kind_never_seen_has_its_prior() -> None:
    table = ChanceTable()
    table.record("other", True)

    assert 0.3 == pytest.approx(table.chance("kind", 0.3))


def test_experience_outweighs_the_prior() -> None:
    table = ChanceTable(prior_weight=8)
    for _ in range(3):
        table.record("kind", True)
    table.record("kind", False)

    assert (3 + 8 * 0.1) / (4 + 8) == pytest.approx(table.chance("kind", 0.1))


@given(
    st.lists(st.booleans(), max_size=60), st.integers(1, 20), st.sampled_from([0.0, 0.2, 0.9, 1.0])
)
def test_a_chance_stays_between_0_and_1(
    verdicts: list[bool], max_trials: int, prior: float
) -> None:
    table = ChanceTable(max_trials=max_trials)
    for is_right in verdicts:
        table.record("kind", is_right)

    assert 0 <= table.chance("kind", prior) <= 1


def test_a_change_of_workload_shows_within_a_table_full_of_trials() -> None:
    """After any number of hits, as many misses as the table holds bring the chance below 1/2."""
    fading, lasting = ChanceTable(max_trials=64), ChanceTable(max_trials=10**9)
    for table in (fading, lasting):
        for _ in range(5000):
            table.record("kind", True)
        for _ in range(64):
            table.record("kind", False)

    assert fading.chance("kind", 0.5) < 0.5
    assert lasting.chance("kind", 0.5) > 0.9


def test_odds_classes_are_steps_of_half_a_unit_within_bounds() -> None:
    def probability(log_odds: float) -> float:
        return 1 / (1 + math.exp(-log_odds))

    assert list(range(-12, 13)) == [odds_class(probability(step / 2)) for step in range(-12, 13)]
    assert (-12, 12) == (odds_class(0.0), odds_class(1.0))
    assert odds_class(probability(1.2)) == odds_class(probability(1.0))


# --- the weight of the noise --------------------------------------------------------------------


def learnt_weight(shares: Sequence[float], *, error: float = 0.0, num_children: int = 1) -> float:
    """The weight after a target's picks, where the draft logits are this share of the target's.

    ``shares`` has one entry per pick. Logits that are too flat by a factor rank best with as
    little of the noise: the sum is then the target's own times that factor.
    """
    generator = np.random.default_rng(5)
    weight = NoiseWeight()
    for step, share in enumerate(shares):
        target_V = 2 * generator.standard_normal(64)
        noise_V = gumbel_vector(3, 0, step, 64)
        draft_V = share * target_V + error * generator.standard_normal(64)
        pick = int((target_V + noise_V).argmax())
        weight.record(0.8, draft_V.astype(np.float32), noise_V, pick, num_children)
    return weight.at(0.8)


def test_half_of_the_noise_is_believed_at_the_start() -> None:
    assert 0.5 == NoiseWeight().at(0.8)


def test_a_perfect_drafter_comes_to_believe_all_of_the_noise() -> None:
    assert 1.0 == learnt_weight([1.0] * 400)


@pytest.mark.parametrize("share", NOISE_WEIGHTS[1:])
def test_the_weight_finds_the_share_by_which_a_drafter_is_too_flat(share: float) -> None:
    assert share == learnt_weight([share] * 400)


def test_a_drafter_that_hardly_knows_the_target_believes_little_of_the_noise() -> None:
    """Its logits are mostly error, flattened as training flattens what cannot be known."""
    assert learnt_weight([0.1] * 800, error=0.05) <= 0.25


def test_a_drafter_that_is_right_without_the_noise_believes_none_of_it() -> None:
    """A drafter that knows the pick already would only be led astray."""
    weight = NoiseWeight()
    for step in range(300):
        noise_V = gumbel_vector(3, 0, step, 64)
        pick = step % 64
        warped_V = np.full(64, -0.2, dtype=np.float32)
        warped_V[pick] = 0
        weight.record(0.8, warped_V, noise_V, pick, 1)

    assert 0.0 == weight.at(0.8)


def test_what_was_learnt_fades() -> None:
    assert 0.25 == learnt_weight([0.25] * 600)
    assert 1.0 == learnt_weight([0.25] * 600 + [1.0] * 600)


def test_temperatures_are_learnt_apart() -> None:
    weight = NoiseWeight()
    noise_V = gumbel_vector(3, 0, 0, 8)
    for _ in range(50):
        weight.record(0.8, np.zeros(8, dtype=np.float32), noise_V, int(noise_V.argmax()), 1)

    assert 0.5 == weight.at(1.0)
    assert weight.at(0.8) == weight.at(0.81)


def test_ties_are_broken_as_when_drafting() -> None:
    """Without noise the pick ties with tokens of lower ids, which are drafted before it."""
    weight = NoiseWeight()
    noise_V = np.array([0, 1, -1, 0], dtype=np.float32)
    for _ in range(50):
        weight.record(0.8, np.zeros(4, dtype=np.float32), noise_V, 2, 1)

    assert 0.5 == weight.at(0.8)


def test_a_pick_that_the_drafter_cannot_make_counts_for_no_weight() -> None:
    weight = NoiseWeight()
    warped_V = np.array([0, -np.inf], dtype=np.float32)
    for _ in range(50):
        weight.record(0.8, warped_V, np.zeros(2, dtype=np.float32), 1, 2)

    assert 0.5 == weight.at(0.8)
