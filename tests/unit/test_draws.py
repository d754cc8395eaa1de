"""The draws: inverse transform at its edges, keys, and the draw of a child."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.draws import Draws, draw_child, index_at, widened
from outrider.noise import Purpose, uniform
from outrider.vocabulary import DraftVocabulary

JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
VIEW: Any = SimpleNamespace(num_tokens=10)


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


# --- inverse transform --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1), (0.24, 1), (0.25, 3), (0.74, 3), (0.75, 4), (JUST_BELOW_ONE, 4)],
)
def test_a_share_falls_to_the_entry_whose_part_it_lies_in(share: float, expected: int) -> None:
    assert expected == index_at(share, row(0, 1, 0, 2, 1, 0))


@given(
    st.lists(st.sampled_from([0.0, 1e-45, 1e-7, 0.1, 0.3, 1.0, 7.0]), min_size=1, max_size=9),
    st.one_of(st.just(0.0), st.just(JUST_BELOW_ONE), st.floats(0.0, 1.0, exclude_max=True)),
)
def test_an_entry_of_weight_zero_is_never_drawn(weights: list[float], share: float) -> None:
    """Neither at a share of 0 nor where the product rounds up to the whole."""
    weights_V = row(*weights)
    if weights_V.any():
        assert weights_V[index_at(share, weights_V)] > 0


def test_nothing_to_draw_from_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        index_at(0.5, row(0, 0))


def test_draws_follow_their_weights() -> None:
    """Chi-square over 20,000 positions; false-failure rate 1e-9 each."""
    weights_V = np.array([4, 0, 1, 2, 0.5])
    draws = Draws(3, 0, 100)
    expected = weights_V[weights_V > 0] / weights_V.sum()

    for draw in (draws.draft, draws.residual):
        found = np.bincount([draw(100 + i, weights_V) for i in range(20_000)], minlength=5)
        assert 0 == found[1]
        assert stats.chisquare(found[weights_V > 0], expected * 20_000).pvalue > 1e-9


# --- keys ---------------------------------------------------------------------------------------


def test_each_kind_of_draw_has_its_own_uniform() -> None:
    draws = Draws(3, 1, 20)
    many = np.ones(1 << 20, dtype=np.float32)

    assert uniform(3, 1, Purpose.COIN, 25, 20) == draws.coin(25)
    assert int(uniform(3, 1, Purpose.DRAFT, 25, 20) * many.size) == draws.draft(25, many)
    assert int(uniform(3, 1, Purpose.RESIDUAL, 25, 20) * many.size) == draws.residual(25, many)


def test_asking_again_gives_the_same_and_a_later_step_another() -> None:
    assert Draws(3, 1, 20).coin(25) == Draws(3, 1, 20).coin(25)
    assert 4 == len({Draws(3, 1, 20).coin(25), Draws(3, 1, 21).coin(25), Draws(4, 1, 20).coin(25),
                     Draws(3, 2, 20).coin(25)})  # fmt: skip


# --- a child ------------------------------------------------------------------------------------


def test_a_child_is_drawn_beside_the_fixed_ones_from_what_is_left() -> None:
    probs_W = row(0.5, 0.125, 0.25, 0.125)
    for seed in range(50):
        drawn = draw_child(VIEW, probs_W, [0, 3], 2, Draws(seed, 0, 10), None)
        assert drawn is not None
        token, law_V = drawn

        assert [0, np.float32(1 / 3), np.float32(2 / 3), 0] == law_V.tolist()
        assert np.float32 == law_V.dtype
        assert Draws(seed, 0, 10).draft(12, law_V) == token
    assert [0.5, 0.125, 0.25, 0.125] == probs_W.tolist(), "the caller's row is only read"


def test_a_child_of_a_reduced_vocabulary_comes_in_the_target_s_ids() -> None:
    vocabulary = DraftVocabulary(np.array([5, 1, 3]), 6)
    tokens = set()
    for seed in range(50):
        drawn = draw_child(VIEW, row(0.5, 0.25, 0.25), [0], 0, Draws(seed, 0, 10), vocabulary)
        assert drawn is not None
        token, law_V = drawn
        tokens.add(token)

        assert isinstance(token, int)
        assert [0, 0.5, 0, 0.5, 0, 0] == law_V.tolist()
    assert {1, 3} == tokens


@pytest.mark.parametrize(
    ("probs", "fixed"), [((0.5, 0.5, 0), [0, 1]), ((0, 0, 0), []), ((np.nan, 0.5, 0.5), [])]
)
def test_nothing_is_drawn_where_nothing_is_left(probs: tuple[float, ...], fixed: list[int]) -> None:
    assert draw_child(VIEW, row(*probs), fixed, 0, Draws(1, 0, 10), None) is None


def test_widening_keeps_what_is_exact_already() -> None:
    assert np.float64 == widened(row(1)).dtype
    assert object == widened(np.array([1, 2], dtype=object)).dtype
