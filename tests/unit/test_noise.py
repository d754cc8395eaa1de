"""The shared noise: the bit stream against its definition, then its law.

Statistical tests use fixed seeds, so they cannot flake; the false-failure rates in their
docstrings say how surprising a failure would be for another choice of seeds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.noise import (
    GumbelNoise,
    Purpose,
    gumbel_from_words,
    gumbel_vector,
    philox_key,
    uniform,
)

MASK = 2**64 - 1
SEEDS = st.integers(0, MASK)
CHOICES = st.integers(0, 2**31 - 1)
POSITIONS = st.integers(0, 2**40)


def philox4x64(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as published (Salmon et al. 2011), in Python integers: the plain twin."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (
            product1 >> 64 ^ c1 ^ k0,
            product1 & MASK,
            product0 >> 64 ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & MASK, k1 + 0xBB67AE8584CAA73B & MASK
    return [c0, c1, c2, c3]


def reference_gumbel(seed: int, choice: int, position: int, token: int) -> float:
    """One token's noise from the documented layout, token by token, in float64."""
    word = philox4x64([1 + token // 4, 0, position, 0], (seed, choice))[token % 4]
    uniform = ((word >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def test_the_twin_gives_the_published_known_answers() -> None:
    """Vectors for philox4x64-10 from the authors' Random123 distribution."""
    zeros = philox4x64([0, 0, 0, 0], (0, 0))
    ones = philox4x64([MASK] * 4, (MASK, MASK))

    assert zeros == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    assert ones == [
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    ]


@given(SEEDS, CHOICES, POSITIONS, st.integers(1, 200))
def test_every_token_has_the_word_that_the_layout_says(
    seed: int, choice: int, position: int, vocab_size: int
) -> None:
    tokens = sorted({0, vocab_size // 2, vocab_size - 1})
    expected = [reference_gumbel(seed, choice, position, token) for token in tokens]
    noise = gumbel_vector(seed, choice, position, vocab_size)

    assert np.float32 == noise.dtype
    assert (vocab_size,) == noise.shape
    # The libraries' logarithms may differ in float64's last bit, hence once in 2**28 in float32's.
    np.testing.assert_array_max_ulp(np.array(expected, np.float32), noise[tokens], maxulp=1)


def test_the_stream_does_not_change_between_versions() -> None:
    """A changed stream would change every seeded text: these figures are part of the contract."""
    pinned = np.array([2.238614286, -0.068925634, 1.586157493, 0.722101126], dtype=np.float32)

    np.testing.assert_array_max_ulp(pinned, gumbel_vector(2024, 3, 17, 4), maxulp=1)


@given(SEEDS, CHOICES, POSITIONS, st.integers(1, 300), st.integers(0, 300))
def test_the_first_entries_do_not_depend_on_the_vocabulary(
    seed: int, choice: int, position: int, vocab_size: int, padding: int
) -> None:
    short = gumbel_vector(seed, choice, position, vocab_size)
    long = gumbel_vector(seed, choice, position, vocab_size + padding)

    assert np.array_equal(short, long[:vocab_size])


@pytest.mark.parametrize("vocab_size", [49_152, 151_936, 128_259])
def test_real_vocabularies_line_up_with_their_padding(vocab_size: int) -> None:
    short = gumbel_vector(7, 0, 99, vocab_size - 3)
    long = gumbel_vector(7, 0, 99, vocab_size)

    assert np.array_equal(short, long[: vocab_size - 3])


@given(st.tuples(SEEDS, CHOICES), st.tuples(SEEDS, CHOICES))
def test_different_requests_have_different_keys(a: tuple[int, int], b: tuple[int, int]) -> None:
    keys = {philox_key(*each, purpose) for each in (a, b) for purpose in Purpose}

    assert len({a, b}) * len(Purpose) == len(keys)


def test_the_purpose_is_apart_from_every_choice() -> None:
    """A purpose sits above the 32 bits of the choice, so a later one can collide with none."""
    _, word = philox_key(0, 2**32 - 1, Purpose.TARGET)

    assert Purpose.TARGET == word >> 32
    assert 2**32 - 1 == word & 0xFFFF_FFFF


def test_the_extreme_words_give_finite_noise_with_the_whole_tail() -> None:
    """The largest noise is 53 ln 2, beyond 30: no tail is cut at any vocabulary in use."""
    lowest, highest = gumbel_from_words(np.array([0, MASK], dtype=np.uint64))

    assert highest == np.float32(53 * math.log(2))
    assert lowest == np.float32(-math.log(53 * math.log(2)))
    assert highest > 30


def test_the_low_bits_next_to_one_are_not_lost() -> None:
    """Neighbouring uniforms near 1 give the noise that log1p gives for their distance to 1."""
    steps = np.arange(64, dtype=np.uint64)
    words = np.uint64(MASK) - (steps << np.uint64(12))
    distance = (np.arange(64) + 0.5) * 2.0**-52
    expected = (-np.log(-np.log1p(-distance))).astype(np.float32)

    np.testing.assert_array_max_ulp(expected, gumbel_from_words(words), maxulp=1)


def test_noise_follows_the_gumbel_law() -> None:
    """Kolmogorov-Smirnov over 10**6 variates; false-failure rate 1e-9."""
    sample = np.concatenate([gumbel_vector(1, 0, t, 50_000) for t in range(20)])

    assert stats.kstest(sample.astype(np.float64), stats.gumbel_r.cdf).pvalue > 1e-9


def test_the_tail_has_its_share() -> None:
    """Exceedances of 10 among 4 * 10**6 variates; false-failure rate below 1e-9."""
    sample = np.concatenate([gumbel_vector(2, 0, t, 100_000) for t in range(40)])
    tail = -math.expm1(-math.exp(-10))

    assert stats.binomtest(int((sample > 10).sum()), sample.size, tail).pvalue > 1e-9


LOGITS = np.array([2.0, 1.0, 0.0, -0.5, 0.3, -3.0, 1.5])


def argmax_counts(logits: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """How often each token wins over many positions of one request."""
    noise = np.stack([gumbel_vector(seed, 0, t, logits.size) for t in range(num_draws)])
    return np.bincount((logits + noise).argmax(axis=1), minlength=logits.size)


def test_the_argmax_follows_the_softmax() -> None:
    """Chi-square over 100,000 draws; false-failure rate 1e-9."""
    counts = argmax_counts(LOGITS, 100_000, seed=11)
    probs = np.exp(LOGITS) / np.exp(LOGITS).sum()

    assert stats.chisquare(counts, probs * counts.sum()).pvalue > 1e-9


def test_the_chi_square_test_sees_a_slightly_wrong_law() -> None:
    """Negative control: a temperature of 1.05 instead of 1 must be rejected."""
    counts = argmax_counts(LOGITS, 100_000, seed=11)
    wrong = np.exp(LOGITS / 1.05) / np.exp(LOGITS / 1.05).sum()

    assert stats.chisquare(counts, wrong * counts.sum()).pvalue < 1e-9


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((5, 0, 1001), id="next position"),
        pytest.param((6, 0, 1000), id="next seed"),
        pytest.param((5, 1, 1000), id="next choice"),
        pytest.param((5 + 2**63, 0, 1000), id="highest seed bit"),
        pytest.param((5, 2**30, 1000), id="high choice bit"),
    ],
)
def test_vectors_of_different_keys_are_independent(other: tuple[int, int, int]) -> None:
    """Rank correlation, shifted too, over 50,000 tokens; false-failure rate 1e-9 each."""
    ranks = stats.rankdata(gumbel_vector(5, 0, 1000, 50_000))
    beside = stats.rankdata(gumbel_vector(*other, 50_000))

    for shift in (0, 1, 4):
        correlation = np.corrcoef(ranks, np.roll(beside, shift))[0, 1]
        assert abs(correlation) * math.sqrt(ranks.size) < 6.11  # two-sided 1e-9 of a normal


def test_positions_do_not_share_words() -> None:
    """Overlapping streams would repeat whole vectors at a shift; 52-bit values hardly repeat."""
    vectors = np.concatenate([gumbel_vector(3, 0, t, 1000) for t in range(50)])

    # float32 noise has about 2**24 values in the bulk: a few hundred chance repeats among 50,000.
    assert len(np.unique(vectors)) > 49_000


def test_an_open_position_is_drawn_once() -> None:
    noise = GumbelNoise(1, 2, 10)

    assert noise.at(4).data_ptr() == noise.at(4).data_ptr()
    assert torch.float32 == noise.at(4).dtype
    assert np.array_equal(gumbel_vector(1, 2, 4, 10), noise.at(4).numpy())


def test_release_forgets_the_past_only_and_redraws_the_same() -> None:
    noise = GumbelNoise(1, 2, 10)
    before = {position: noise.at(position) for position in (3, 4, 5)}
    noise.release_before(5)

    assert before[5] is noise.at(5)
    assert before[4] is not noise.at(4)
    assert torch.equal(before[4], noise.at(4))


# --- single uniforms ----------------------------------------------------------------------------

SINGLE = [purpose for purpose in Purpose if purpose is not Purpose.TARGET]


@given(SEEDS, CHOICES, st.sampled_from(SINGLE), POSITIONS, st.integers(0, 2**20))
def test_a_uniform_is_the_word_that_its_key_and_counter_name(
    seed: int, choice: int, purpose: Purpose, ahead: int, origin: int
) -> None:
    key = (seed, purpose << 32 | choice)
    word = philox4x64([1, 0, origin + ahead, origin], key)[0]

    assert (word >> 11) / 2**53 == uniform(seed, choice, purpose, origin + ahead, origin)


def test_keys_and_counters_of_different_draws_are_disjoint() -> None:
    """No two draws, and no draw and a Gumbel vector, are made from one block of the generator."""
    places = [(5, 0), (5, 1), (2**32, 0), (2**31, 2**31 - 1)]  # seed, choice
    positions = [(p, origin) for origin in range(1, 5) for p in range(origin, 6)]
    blocks = [
        (philox_key(seed, choice, purpose), (1, 0, position, origin))
        for seed, choice in places
        for purpose in SINGLE
        for position, origin in positions
    ]
    vectors = [
        (philox_key(seed, choice), (1 + block, 0, position, 0))
        for seed, choice in places
        for block in range(3)
        for position in range(6)
    ]

    assert len(set(blocks + vectors)) == len(blocks) + len(vectors)
    assert len({uniform(*place, Purpose.COIN, *at) for place in places for at in positions}) == (
        len(places) * len(positions)
    )


@pytest.mark.parametrize("purpose", SINGLE)
def test_uniforms_are_uniform_over_positions_and_over_origins(purpose: Purpose) -> None:
    """Kolmogorov-Smirnov over 20,000 numbers each; false-failure rate 1e-9."""
    by_position = [uniform(7, 1, purpose, 100 + i, 100) for i in range(20_000)]
    by_origin = [uniform(7, 1, purpose, 20_000, i) for i in range(20_000)]

    for numbers in (by_position, by_origin):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-9
        assert 0.0 <= min(numbers) < max(numbers) < 1.0


@pytest.mark.parametrize("purpose", SINGLE)
def test_uniforms_of_different_keys_are_uncorrelated(purpose: Purpose) -> None:
    """False-failure rate 1e-9 each; the other purpose, the next position, origin and choice."""
    numbers = np.array([uniform(7, 1, purpose, 100 + i, 100) for i in range(5000)])
    others = {
        "purpose": [
            uniform(7, 1, SINGLE[SINGLE.index(purpose) - 1], 100 + i, 100) for i in range(5000)
        ],
        "origin": [uniform(7, 1, purpose, 100 + i, 99) for i in range(5000)],
        "choice": [uniform(7, 2, purpose, 100 + i, 100) for i in range(5000)],
        "position": [uniform(7, 1, purpose, 101 + i, 100) for i in range(5000)],
    }

    for name, beside in others.items():
        correlation = np.corrcoef(numbers, beside)[0, 1]
        assert abs(correlation) * math.sqrt(len(beside)) < 6.11, name


def test_a_uniform_of_the_gumbel_stream_or_of_a_past_position_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="Gumbel"):
        uniform(1, 0, Purpose.TARGET, 5, 5)
    with pytest.raises(AssertionError):
        uniform(1, 0, Purpose.COIN, 4, 5)
