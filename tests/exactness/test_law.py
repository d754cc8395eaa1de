"""L0: the law of the emitted answers *is* the target's, enumerated in exact arithmetic.

For every drafter below, the production step runs over all noise there is (:mod:`race`), and the
probabilities of all answers (token ids, text, finish reason) must equal those of ancestral sampling
from the same target: as fractions, without tolerance. The same check must see every engine of
:mod:`wrong`.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from outrider.config import SamplingParams
from outrider.sampling import RequestSampler
from tests.exactness import wrong
from tests.exactness.race import World, enumerate_law
from tests.exactness.toy import (
    EOS,
    PROMPT,
    TARGET,
    LawDiffersError,
    Setup,
    ToyTarget,
    check_law,
    exact_weights,
)
from tests.exactness.toy_drafters import (
    Guess,
    Shape,
    ToyDrafter,
    adaptive,
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


def params(**changes: Any) -> SamplingParams:
    """Three tokens at temperature 1, or what is changed."""
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 3, "seed": 5, **changes})


# --- every shape, every way of guessing ---------------------------------------------------------

SHAPES = {
    "chain": chain(3),
    "bushy": widths(2, 2),
    "all children": widths(3, 1),
    "merged chains": merged(0, 1, 1, length=2),
    "lopsided": lopsided(2),
    "adaptive": adaptive(3),
    "scattered": scattered(seed=1, size=4),
}
SMALL_SHAPES = {"chain": chain(2), "tree": widths(2, 1), "adaptive": adaptive(2)}
HONEST = {"blind": blind, "favourite": favourite, "coupled": coupled}


@pytest.mark.parametrize("guess", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_drafter_changes_the_law(shape: Shape, guess: Guess) -> None:
    tally = check_law(Setup(TARGET, params(), ToyDrafter(shape, guess)))

    assert tally.is_eventful


@pytest.mark.parametrize("shape", SMALL_SHAPES.values(), ids=SMALL_SHAPES)
def test_a_drafter_that_is_right_or_wrong_as_the_noise_tells_it_changes_nothing(
    shape: Shape,
) -> None:
    tally = check_law(Setup(TARGET, params(), ToyDrafter(shape, wavering)))

    assert tally.is_eventful


@pytest.mark.parametrize("shape", SMALL_SHAPES.values(), ids=SMALL_SHAPES)
def test_a_drafter_that_avoids_the_target_s_pick_is_always_rejected_and_changes_nothing(
    shape: Shape,
) -> None:
    tally = check_law(Setup(TARGET, params(), ToyDrafter(shape, contrary)))

    assert tally.drafted > 0
    assert tally.accepted == 0
    assert tally.rejected > 0


@pytest.mark.parametrize(
    "name", sorted(SHAPES.keys() - {"scattered"})
)  # which throws best guesses away
def test_the_target_s_own_logits_and_noise_are_always_accepted(name: str) -> None:
    """An off-by-one position would leave the law as it is and only cost acceptance: not here."""
    tally = check_law(Setup(TARGET, params(), ToyDrafter(SHAPES[name], oracle)))

    assert tally.accepted > 0
    assert tally.rejected == 0


@pytest.mark.parametrize("guess", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("max_nodes", [1, 2, 3])
def test_pruning_by_scores_changes_nothing(guess: Guess, max_nodes: int) -> None:
    drafter = ToyDrafter(widths(2, 2), guess, max_nodes)
    tally = check_law(Setup(TARGET, params(), drafter))

    assert tally.is_eventful


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_chains_of_one_to_four_leave_the_law_of_five_tokens(length: int) -> None:
    setup = Setup(TARGET, params(max_tokens=5), ToyDrafter(chain(length), blind))

    assert check_law(setup).is_eventful


def test_plain_decoding_has_the_target_s_law() -> None:
    """k = 0: no drafter, and a drafter that proposes nothing."""
    nothing = ToyDrafter(chain(0), blind)
    plain = Setup(TARGET, params(max_tokens=5))

    check_law(plain)
    assert check_law(replace(plain, drafter=nothing)).drafted == 0


@pytest.mark.parametrize(
    ("vocab_size", "shape", "max_tokens"),
    [(4, chain(2), 3), (4, widths(2, 1), 2), (5, chain(1), 2), (5, widths(3), 2)],
    ids=["4, chain", "4, tree", "5, chain", "5, three children"],
)
def test_larger_vocabularies(vocab_size: int, shape: Shape, max_tokens: int) -> None:
    target = ToyTarget(vocab_size, values=(-1, 0, 1))
    setup = Setup(target, params(max_tokens=max_tokens), ToyDrafter(shape, coupled))

    assert check_law(setup).is_eventful


@pytest.mark.parametrize("seed", range(4))
def test_other_targets(seed: int) -> None:
    target = ToyTarget(3, seed, values=(-3, -1, 0, 1, 2))
    tally = check_law(Setup(target, params(), ToyDrafter(lopsided(2), coupled)))

    assert tally.is_eventful


# --- every parameter ----------------------------------------------------------------------------

PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 0.5, "top_k": 2, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 2.0},
    "repetition rewarded": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0},
    "all penalties": {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": -2.0,
    },
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 2.0},
    "logit_bias": {"logit_bias": {0: 2.0, 2: -3.0}},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 2},
    "min_tokens to the end": {"min_tokens": 3},
    "stop id": {"stop_token_ids": (1,)},
    "stop id with min_tokens": {"stop_token_ids": (1,), "min_tokens": 2, "ignore_eos": True},
    "stop string": {"stop": ("ab",), "ignore_eos": True},
    "stop strings": {"stop": ("ba", "bab", "c"), "min_tokens": 2, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "four tokens": {"max_tokens": 4},
    "everything": {
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": {1: 1.0},
        "min_tokens": 2,
        "stop": ("aa",),
    },
}
SOME_DRAFTERS = {"chain": (chain(2), blind), "coupled tree": (lopsided(2), coupled)}


@pytest.mark.parametrize(("shape", "guess"), SOME_DRAFTERS.values(), ids=SOME_DRAFTERS)
@pytest.mark.parametrize("changes", PARAMETERS.values(), ids=PARAMETERS)
def test_every_parameter_keeps_its_law_under_speculation(
    changes: dict[str, Any], shape: Shape, guess: Guess
) -> None:
    setup = Setup(TARGET, params(**changes), ToyDrafter(shape, guess))
    tally = check_law(setup)

    if setup.params.max_tokens == 1:
        assert tally.drafted == 0, "the only token needs no draft"
    else:
        assert tally.is_eventful


@pytest.mark.parametrize("changes", PARAMETERS.values(), ids=PARAMETERS)
def test_the_production_sampler_warps_to_the_law_that_is_enumerated(
    changes: dict[str, Any],
) -> None:
    """The bridge from the enumeration's integers to the floats in use, at every prefix.

    The toy's base 2 becomes e by scaling logits, penalties and biases with a 12-bit ln 2: sums
    stay exact in float32, so ties stay ties.
    """
    ln2 = round(np.log(2) * 2**12) / 2**12
    toy = params(**changes)
    scaled = replace(
        toy,
        presence_penalty=toy.presence_penalty * ln2,
        frequency_penalty=toy.frequency_penalty * ln2,
        logit_bias={token: bias * ln2 for token, bias in toy.logit_bias.items()},
    )
    target = ToyTarget(5, seed=3)
    sampler = RequestSampler(scaled, vocab_size=5, prompt_ids=PROMPT, eos_ids=EOS)
    prefixes = [[*PROMPT, *output] for output in [(), (0,), (3,), (1, 1), (4, 0), (3, 3, 1)]]
    for prefix in prefixes:
        logits = target.logits(prefix)
        weights = exact_weights(logits, prefix, toy)
        expected = np.array([weight / sum(weights) for weight in weights])
        warped_V = sampler.warp(torch.tensor(logits) * ln2, prefix)

        if toy.is_greedy:
            assert int(expected.argmax()) == int(warped_V.argmax())
        else:
            np.testing.assert_allclose(warped_V.softmax(0).numpy(), expected, atol=1e-3)
            assert np.array_equal(expected > 0, warped_V.isfinite().numpy())


# --- several answers in one batch ---------------------------------------------------------------


def test_choices_decoded_in_one_batch_are_independent() -> None:
    """The joint law of two answers is the product, though each drafter looks at its noise."""
    setup = Setup(TARGET, params(max_tokens=2), ToyDrafter(chain(1), coupled), choices=(0, 1))

    assert check_law(setup).is_eventful


def test_the_same_choice_twice_gives_the_same_answer_twice() -> None:
    """The copies share all noise, so their joint law is that of one, on the diagonal."""
    drafter = ToyDrafter(lopsided(2), coupled)
    setup = Setup(TARGET, params(), drafter, choices=(4, 4))
    law = enumerate_law(setup.run)
    alone = replace(setup, choices=(4,)).plain_law()

    assert {(answer, answer): share for (answer,), share in alone.items()} == law
    assert drafter.tally.is_eventful


@pytest.mark.parametrize("guess", [blind, coupled])
def test_answers_do_not_depend_on_the_drafter_world_by_world(guess: Guess) -> None:
    """Not only the law: under the same noise the answer is the same, with or without drafts."""
    plain = Setup(TARGET, params())
    drafter = ToyDrafter(lopsided(2), guess)
    drafting = replace(plain, drafter=drafter)

    def both(world: World) -> bool:
        return plain.run(world) == drafting.run(world)

    assert {True: Fraction(1)} == enumerate_law(both)
    assert drafter.tally.is_eventful


# --- what must be caught ------------------------------------------------------------------------

CHAIN = ToyDrafter(chain(2), favourite)
TREE = ToyDrafter(widths(2, 1), favourite)
SAMPLED_CHAIN = ToyDrafter(chain(2), coupled)
WRONG = {
    "noise keyed by step": (CHAIN, {}, {"sampler": wrong.NoiseKeyedByStep}),
    "depth counted twice": (CHAIN, {}, {"sampler": wrong.DepthCountedTwice}),
    "correction redrawn": (CHAIN, {}, {"sampler": wrong.RedrawAfterRejection}),
    "shared residual noise": (SAMPLED_CHAIN, {}, {"sampler": wrong.SharedResidualNoise}),
    "row off by one": (CHAIN, {}, {"target": wrong.RowOffByOne(3, TARGET.seed)}),
    "siblings see each other": (TREE, {}, {"target": wrong.SiblingsSeeEachOther(3, TARGET.seed)}),
    "position by index": (TREE, {}, {"target": wrong.PositionByIndex(3, TARGET.seed)}),
    "wrong nodes committed": (TREE, {}, {"cache": wrong.CommitsTheFirstNodes}),
    "stale temperature": (
        CHAIN,
        {"temperature": 0.5},
        {"sampler": wrong.StaleTemperature},
    ),
    "penalties ignore the path": (
        CHAIN,
        {"presence_penalty": 2.0},
        {"sampler": wrong.PathLeftOut},
    ),
    "penalties see the whole tree": (
        TREE,
        {"presence_penalty": 2.0},
        {"sampler": wrong.PenaltiesSeeTheWholeTree},
    ),
    "min_tokens of the step's start": (
        CHAIN,
        {"min_tokens": 1},
        {"sampler": wrong.PathLeftOut},
    ),
    "any child accepted": (CHAIN, {}, {"walk": wrong.any_child}),
    "bonus from the draft": (
        ToyDrafter(chain(1), favourite),
        {},
        {"walk": wrong.bonus_from_the_draft},
    ),
    "end seen at step ends only": (CHAIN, {}, {"request": wrong.StopsAtStepEndsOnly}),
}


@pytest.mark.parametrize(("drafter", "changes", "mistake"), WRONG.values(), ids=WRONG)
def test_a_wrong_engine_is_caught(
    drafter: ToyDrafter, changes: dict[str, Any], mistake: dict[str, Any]
) -> None:
    """And only for its mistake: the same setup without it passes."""
    right = Setup(TARGET, params(**changes), drafter)
    with pytest.raises(LawDiffersError) as caught:
        check_law(replace(right, **mistake))

    assert caught.value.distance > Fraction(1, 100)
    assert check_law(right).is_eventful


def test_choices_that_share_their_noise_are_caught() -> None:
    right = Setup(TARGET, params(max_tokens=2), ToyDrafter(chain(1), coupled), choices=(0, 1))
    with pytest.raises(LawDiffersError) as caught:
        check_law(replace(right, sampler=wrong.ChoiceLeftOut))

    assert caught.value.distance > Fraction(1, 100)


def test_the_check_is_about_the_law_and_not_about_our_rule() -> None:
    """Positive control: classic rejection sampling with residual noise of its own passes."""
    setup = Setup(TARGET, params(), SAMPLED_CHAIN, sampler=wrong.RatioTest)

    assert check_law(setup).is_eventful
