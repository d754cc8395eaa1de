"""The enumeration of shared noise itself: against known laws, and against drawn Gumbel noise."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.noise import gumbel_vector
from tests.exactness.race import Weights, World, distance, enumerate_law, volume, whole, winners

WEIGHTS = st.lists(st.integers(0, 6), min_size=3, max_size=4).filter(any).map(tuple)


def pairs(num_tokens: int) -> st.SearchStrategy[tuple[Weights, Weights]]:
    weights = st.lists(st.integers(1, 6), min_size=num_tokens, max_size=num_tokens).map(tuple)
    return st.tuples(weights, weights)


@given(WEIGHTS)
def test_one_race_is_won_in_proportion_to_the_weights(weights: Weights) -> None:
    expected = {t: Fraction(w, sum(weights)) for t, w in enumerate(weights) if w}

    assert expected == enumerate_law(lambda world: world.winner("key", weights))


@given(WEIGHTS)
def test_a_ranking_draws_without_replacement(weights: Weights) -> None:
    """Gumbel top-k is sampling without replacement (Plackett and Luce)."""
    law = enumerate_law(lambda world: tuple(world.ranking("key", weights)))
    for order, probability in law.items():
        expected, left = Fraction(1), sum(weights)
        for token in order:
            expected *= Fraction(weights[token], left)
            left -= weights[token]

        assert expected == probability


@given(st.integers(3, 4).flatmap(pairs))
def test_two_races_over_one_noise_agree_as_often_as_known(pair: tuple[Weights, Weights]) -> None:
    """P(both won by i) = 1 / sum_v max(p_v / p_i, q_v / q_i) (Daliri et al. 2024)."""
    p, q = pair
    law = enumerate_law(lambda world: (world.winner("key", p), world.winner("key", q)))
    for token in range(len(p)):
        ratios = [
            max(Fraction(a, p[token]), Fraction(b, q[token])) for a, b in zip(p, q, strict=True)
        ]

        assert 1 / sum(ratios) == law[token, token]


@given(pairs(3))
def test_races_over_different_noise_are_independent(pair: tuple[Weights, Weights]) -> None:
    p, q = pair
    law = enumerate_law(lambda world: (world.winner("here", p), world.winner("there", q)))

    assert {
        (i, j): Fraction(p[i] * q[j], sum(p) * sum(q)) for i in range(3) for j in range(3)
    } == law


@given(pairs(3))
def test_the_order_of_questions_does_not_matter(pair: tuple[Weights, Weights]) -> None:
    p, q = pair
    forth = enumerate_law(lambda world: (world.winner(0, p), world.winner(0, q)))
    back = enumerate_law(lambda world: (world.winner(0, q), world.winner(0, p))[::-1])

    assert forth == back


@given(pairs(4))
def test_cutting_a_region_loses_nothing(pair: tuple[Weights, Weights]) -> None:
    for _, part in winners(whole(4), pair[0]):
        assert volume(part) == sum(volume(piece) for _, piece in winners(part, pair[1]))


def test_the_enumerated_joint_law_is_that_of_the_noise_in_use() -> None:
    """Chi-square of production Gumbel vectors over 20,000 positions; false-failure rate 1e-9."""
    p, q = (1, 2, 5), (4, 3, 1)
    law = enumerate_law(lambda world: (world.winner("key", p), *world.ranking("key", q)))
    noise = np.stack([gumbel_vector(3, 0, position, 3) for position in range(20_000)])
    first = (np.log(p) + noise).argmax(axis=1)
    order = np.argsort(-(np.log(q) + noise), axis=1)
    counts = Counter(zip(first.tolist(), *order.T.tolist(), strict=True))
    observed = [counts[outcome] for outcome in law]
    expected = [float(probability) * len(noise) for probability in law.values()]

    assert counts.keys() <= law.keys()
    assert stats.chisquare(observed, expected).pvalue > 1e-9


def test_a_program_that_does_not_repeat_its_questions_is_refused() -> None:
    """Else a forgotten source of chance would go unnoticed."""
    runs: list[int] = []

    def fickle(world: World) -> int:
        runs.append(1)
        return world.winner(len(runs) % 2, (1, 1, 1))

    with pytest.raises(AssertionError, match="same questions"):
        enumerate_law(fickle)


def test_distance_is_the_largest_difference_over_events() -> None:
    fair = {"heads": Fraction(1, 2), "tails": Fraction(1, 2)}
    bent = {"heads": Fraction(3, 4), "edge": Fraction(1, 4)}

    assert Fraction(1, 2) == distance(fair, bent)
    assert 0 == distance(fair, fair)
