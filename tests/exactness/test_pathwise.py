"""L2 in the small: with the production sampler the text itself is the same, speculating or not.

The production step, walk and sampler over toy targets of random logits. With a seed, answers must
be equal (token ids, text, finish reason) whatever the drafter, its shape, or what it knows. And
their law, drawn many times, must be the one that the enumeration is about.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.config import SamplingParams
from outrider.errors import ParameterError
from outrider.noise import GumbelNoise
from outrider.types import FinishReason
from tests.exactness.toy import TARGET, Answer, Setup, ToyRequest, ToyTarget
from tests.exactness.toy_drafters import (
    Tally,
    ToyDrafter,
    blind,
    chain,
    contrary,
    coupled,
    favourite,
    lopsided,
    merged,
    oracle,
    scattered,
    wavering,
    widths,
)
from tests.strategies import sampling_params

GUESSES = [blind, favourite, coupled, oracle, contrary, wavering]
SHAPES = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).map(lambda n: widths(*n)),
    st.builds(scattered, seed=st.integers(0, 99), size=st.integers(1, 12)),
    st.builds(lopsided, st.integers(1, 5)),
    st.builds(merged, st.just(0), st.just(1), st.just(0), length=st.integers(1, 4)),
)
DRAFTERS = st.builds(
    ToyDrafter, SHAPES, st.sampled_from(GUESSES), st.one_of(st.none(), st.integers(0, 6))
)


def random_target(vocab_size: int, seed: int) -> ToyTarget:
    """Logits of several sizes, some of them equal."""
    return ToyTarget(vocab_size, seed, values=(-3.1, -1.7, -0.4, 0.0, 0.0, 0.9, 1.6, 2.8))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    vocab_size = draw(st.integers(3, 8))
    params = draw(sampling_params(vocab_size=vocab_size, max_tokens=8))
    stop = draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=2))
    return Setup(
        random_target(vocab_size, draw(st.integers(0, 999))),
        replace(params, stop=tuple(stop)),
        draw(DRAFTERS),
        choices=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))),
        eos_ids=draw(st.sampled_from([frozenset[int](), frozenset({2}), frozenset({0, 2})])),
    )


@settings(max_examples=300)
@given(setups())
def test_the_answer_does_not_depend_on_the_drafter_or_the_batch(setup: Setup) -> None:
    plain = replace(setup, drafter=None)
    try:
        expected = tuple(plain.run_one(choice) for choice in setup.choices)
    except ParameterError:  # min_tokens would forbid the whole vocabulary
        assume(False)
        raise

    assert expected == setup.run()


ONE_EACH: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {1: 1.5, 4: -100.0}},
    "min_tokens": {"min_tokens": 6},
    "stop_token_ids": {"stop_token_ids": (3,)},
    "stop": {"stop": ("aba", "cb")},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(ONE_EACH, 2)))
def test_every_pair_of_parameters_keeps_the_text(one: str, other: str) -> None:
    tally = Tally()
    for seed in range(3):
        changes = {"temperature": 1.0, **ONE_EACH[one], **ONE_EACH[other]}
        params = SamplingParams(**{"max_tokens": 16, "seed": seed, **changes})
        plain = Setup(random_target(6, seed), params, choices=(0, 1))
        expected = plain.run()
        for drafter in (
            ToyDrafter(chain(4), favourite, tally=tally),
            ToyDrafter(widths(2, 2, 1), coupled, tally=tally),
        ):
            assert expected == replace(plain, drafter=drafter).run()

    assert tally.is_eventful


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_with_the_target_s_logits_and_noise_is_always_right(temperature: float) -> None:
    """Noise is keyed by the position a token will occupy: an off-by-one would show here."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    guess = oracle if temperature else favourite
    drafter = ToyDrafter(chain(4), guess)
    Setup(random_target(8, 5), params, drafter).run()

    assert drafter.tally.drafted == drafter.tally.accepted == 32


class BrokenTarget(ToyTarget):
    """Not finite after any prefix that ends with this token twice."""

    def logits(self, prefix: Any, position: int | None = None) -> list[float]:
        values = super().logits(prefix, position)
        return [math.nan, *values[1:]] if [*prefix[-2:]] == [1, 1] else values


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_that_answer_alone_and_alike(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, ignore_eos=True)
    plain = Setup(BrokenTarget(3, 4), params, choices=tuple(range(6)))
    expected = plain.run()
    reasons = {reason for _, _, reason in expected}

    if temperature:
        assert {FinishReason.ERROR, FinishReason.LENGTH} == reasons
    tally = Tally()
    for guess in (favourite, coupled, contrary):
        drafter = ToyDrafter(widths(2, 2, 2), guess, tally=tally)
        assert expected == replace(plain, drafter=drafter).run()
    assert tally.is_eventful


# --- the law, drawn -----------------------------------------------------------------------------

BATCH = 64
NUM_BATCHES = 150
LN2 = math.log(2)


def counts_of(setup: Setup) -> Counter[Answer]:
    """Answers of many choices and seeds, decoded with the production sampler."""
    counts: Counter[Answer] = Counter()
    for seed in range(NUM_BATCHES):
        params = replace(setup.params, seed=seed)
        counts.update(replace(setup, params=params, choices=tuple(range(BATCH))).run())
    return counts


def law_pvalue(setup: Setup, counts: Counter[Answer]) -> float:
    """Chi-square of counts against the law of base-2 logits; rare answers are put together."""
    num_draws = sum(counts.values())
    law = {answer: float(share) for (answer,), share in setup.plain_law().items()}
    assert counts.keys() <= law.keys()
    frequent = [answer for answer, share in law.items() if share * num_draws >= 10]
    observed = [counts[answer] for answer in frequent]
    expected = [law[answer] * num_draws for answer in frequent]
    rest = [num_draws - sum(observed)], [num_draws - sum(expected)]
    if rest[1][0] > 1e-6 * num_draws:
        observed, expected = observed + rest[0], expected + rest[1]
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


# To the base e in production, to the base 2 in the enumeration.
NATURAL = replace(TARGET, values=tuple(value * LN2 for value in TARGET.values))
LAW_PARAMS = {
    "plain": SamplingParams(temperature=1.0, max_tokens=3),
    "filtered": SamplingParams(temperature=2.0, max_tokens=3, top_p=0.9, min_tokens=2),
    "repetition": SamplingParams(temperature=1.0, max_tokens=3, repetition_penalty=2.0, top_k=2),
}


@pytest.mark.parametrize("params", LAW_PARAMS.values(), ids=LAW_PARAMS)
def test_drawn_answers_follow_the_enumerated_law(params: SamplingParams) -> None:
    """Chi-square over 9,600 answers with fixed seeds; false-failure rate 1e-9."""
    drafter = ToyDrafter(lopsided(2), coupled)
    counts = counts_of(Setup(NATURAL, params, drafter))

    assert law_pvalue(Setup(TARGET, params), counts) > 1e-9
    assert drafter.tally.is_eventful


def test_a_slightly_wrong_temperature_is_seen_in_as_many_draws() -> None:
    """Negative control: 1.15 for 1."""
    params = LAW_PARAMS["plain"]
    drafter = ToyDrafter(lopsided(2), coupled)
    counts = counts_of(Setup(NATURAL, replace(params, temperature=1.15), drafter))

    assert law_pvalue(Setup(TARGET, params), counts) < 1e-9


class PairedNoise(GumbelNoise):
    """Two neighbouring positions share one vector."""

    def at(self, position: int) -> Tensor:
        return super().at(position // 2)


class PairedRequest(ToyRequest):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampler.noise = PairedNoise(self.sampler.seed, self.params.choice, 3)


def test_noise_shared_by_neighbours_is_seen_in_as_many_draws() -> None:
    """Negative control: each position has the right law, but not all together."""
    params = LAW_PARAMS["plain"]
    counts = counts_of(Setup(NATURAL, params, request=PairedRequest))

    assert law_pvalue(Setup(TARGET, params), counts) < 1e-9


def test_rows_beside_a_request_do_not_change_it() -> None:
    """One request among 64 of other choices answers as it does alone."""
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=12)
    setup = Setup(random_target(8, 2), params, ToyDrafter(widths(2, 2), coupled))
    together = replace(setup, choices=tuple(range(64))).run()

    assert tuple(setup.run_one(choice) for choice in range(64)) == together
