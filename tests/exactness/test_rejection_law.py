"""L0 of the ``rejection`` rule: the emitted law *is* the target's, as fractions, no tolerance.

As in ``test_law``, the production step runs over everything that can be drawn; here drafts, coins
and residual draws, each with its own key. The same check must see every mistake of
:mod:`rejection_wrong`.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from outrider.config import Accept, SamplingParams
from outrider.costs import CostTable
from outrider.vocabulary import DraftVocabulary
from tests.exactness import rejection_wrong as wrong
from tests.exactness.rejection_toy import (
    DrawingDrafter,
    RejectionSetup,
    drawn_chain,
    drawn_leaves,
)
from tests.exactness.toy import TARGET, LawDiffersError, ToyTarget, check_law
from tests.exactness.toy_drafters import ToyDrafter, blind, favourite, lopsided, widths
from tests.exactness.wrong import RowOffByOne


def params(**changes: Any) -> SamplingParams:
    """Three tokens at temperature 1 under the rejection rule, or what is changed."""
    base = {"temperature": 1.0, "max_tokens": 3, "seed": 5, "accept": Accept.REJECTION}
    return SamplingParams(**{**base, **changes})


# --- every shape --------------------------------------------------------------------------------


@pytest.mark.parametrize("uses_blocks", [True, False], ids=["block", "token by token"])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_drawn_chain_keeps_the_law(length: int, uses_blocks: bool) -> None:
    target = TARGET if length < 3 else ToyTarget(2, seed=2)
    right = RejectionSetup(
        target, params(max_tokens=length + 1), drawn_chain(length), uses_blocks=uses_blocks
    )

    assert check_law(right).is_eventful


SHAPES = {
    "one fixed and a drawn leaf": drawn_leaves(1),
    "two fixed and a drawn leaf": drawn_leaves(2),
    "all fixed but the last": drawn_leaves(2, 2),
    "nested": drawn_leaves(1, 1),
    "drawn below fixed": drawn_leaves(2, 0),
    "fixed and drawn nodes grow": DrawingDrafter(fixed=(1, 1), grows_drawn=True),
    "drawn, then fixed": DrawingDrafter(fixed=(0, 2), grows_drawn=True),
    "fixed alone": drawn_leaves(2, 1, draws=False),
    "pruned by scores": DrawingDrafter(fixed=(1, 1), grows_drawn=True, max_nodes=2),
    "stops after unlikely drafts": drawn_chain(2, stops_below=Fraction(1, 3)),
    "all children at once": drawn_leaves(3),
}


@pytest.mark.parametrize("drafter", SHAPES.values(), ids=SHAPES)
def test_a_tree_of_fixed_and_drawn_nodes_keeps_the_law(drafter: DrawingDrafter) -> None:
    tally = check_law(RejectionSetup(TARGET, params(), drafter))

    assert tally.drafted
    assert tally.accepted
    if max(drafter.fixed) < 2 or not drafter.draws:  # else every token is a child
        assert tally.rejected


@pytest.mark.parametrize("shape", [widths(1, 1), widths(2, 1), lopsided(2)])
@pytest.mark.parametrize("guess", [blind, favourite])
def test_guesses_of_any_drafter_keep_the_law(shape, guess) -> None:
    """The point-mass rule: what n-gram matches and MEDUSA's trees come to."""
    assert check_law(RejectionSetup(TARGET, params(), ToyDrafter(shape, guess))).is_eventful


def test_plain_decoding_has_the_target_s_law() -> None:
    check_law(RejectionSetup(TARGET, params(max_tokens=4)))


@pytest.mark.parametrize(
    ("vocab_size", "drafter", "max_tokens"),
    [(4, drawn_chain(2), 3), (4, drawn_leaves(1), 2), (5, drawn_chain(1), 2)],
    ids=["4, chain", "4, tree", "5, chain"],
)
def test_larger_vocabularies(vocab_size: int, drafter: DrawingDrafter, max_tokens: int) -> None:
    target = ToyTarget(vocab_size, values=(-1, 0, 1))
    setup = RejectionSetup(target, params(max_tokens=max_tokens), drafter)

    assert check_law(setup).is_eventful


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("uses_blocks", [True, False], ids=["block", "token by token"])
def test_other_targets(seed: int, uses_blocks: bool) -> None:
    target = ToyTarget(3, seed, values=(-3, -1, 0, 1, 2))
    setup = RejectionSetup(target, params(), drawn_chain(2), uses_blocks=uses_blocks)

    assert check_law(setup).is_eventful


REDUCED = {
    "chain": drawn_chain(2, vocabulary=DraftVocabulary(np.array([2, 0]), 3)),
    "tree": drawn_leaves(1, 0, vocabulary=DraftVocabulary(np.array([1, 0]), 3)),
    "one token": drawn_chain(2, vocabulary=DraftVocabulary(np.array([1]), 3)),
}


@pytest.mark.parametrize("drafter", REDUCED.values(), ids=REDUCED)
def test_a_draft_vocabulary_that_lacks_tokens_keeps_the_law(drafter: DrawingDrafter) -> None:
    assert check_law(RejectionSetup(TARGET, params(), drafter)).is_eventful


def test_two_answers_in_one_batch_are_independent() -> None:
    setup = RejectionSetup(TARGET, params(max_tokens=2), drawn_chain(1), choices=(0, 1))

    assert check_law(setup).is_eventful


# --- every parameter ----------------------------------------------------------------------------

PARAMETERS = {
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all penalties": {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": -2.0,
    },
    "logit_bias": {"logit_bias": {0: 2.0, 2: -3.0}},
    "min_tokens": {"min_tokens": 2},
    "stop string": {"stop": ("ab",), "ignore_eos": True},
    "everything": {
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "logit_bias": {1: 1.0},
        "min_tokens": 2,
        "stop": ("aa",),
    },
}
SOME_DRAFTERS = {"chain": drawn_chain(2), "tree": drawn_leaves(1, 1)}


@pytest.mark.parametrize("drafter", SOME_DRAFTERS.values(), ids=SOME_DRAFTERS)
@pytest.mark.parametrize("changes", PARAMETERS.values(), ids=PARAMETERS)
def test_every_parameter_keeps_its_law(changes: dict[str, Any], drafter: DrawingDrafter) -> None:
    tally = check_law(RejectionSetup(TARGET, params(**changes), drafter))

    assert tally.drafted
    assert tally.accepted
    if "min_tokens" not in changes:  # which may leave two tokens, both of them children
        assert tally.rejected


def test_a_draft_that_ignores_the_filters_is_rejected_where_the_target_says_nothing() -> None:
    drafter = wrong.UnfilteredDraft(fixed=(0, 0), grows_drawn=True)

    assert check_law(RejectionSetup(TARGET, params(top_k=1), drafter)).is_eventful


# --- the budget ---------------------------------------------------------------------------------

# A third row costs more than half a step, a fourth nothing. (The first step has one row for the
# prompt.) Whether the first draft is worth verifying thus depends on the score of the second.
STEEP = CostTable(rows=(1, 2, 3, 4), contexts=(1,), seconds=((1.0, 1.0, 1.7, 1.7),))
# A fourth row costs more than anything yields.
SHORT = CostTable(rows=(1, 2, 3, 4), contexts=(1,), seconds=((1.0, 1.0, 1.0, 9.0),))


@pytest.mark.parametrize("uses_blocks", [True, False], ids=["block", "token by token"])
@pytest.mark.parametrize(("costs", "first_size"), [(STEEP, 2), (SHORT, 1)], ids=["steep", "short"])
def test_the_load_policy_keeps_the_law_where_scores_know_depths_only(
    costs: CostTable, first_size: int, uses_blocks: bool
) -> None:
    drafter = drawn_chain(2)
    setup = RejectionSetup(TARGET, params(), drafter, uses_blocks=uses_blocks, costs=costs)

    assert check_law(setup).is_eventful
    assert first_size == max(drafter.sizes)


# --- what must be caught ------------------------------------------------------------------------


def setup(drafter: ToyDrafter, target: ToyTarget = TARGET, **changes: Any) -> RejectionSetup:
    return RejectionSetup(target, params(**changes), drafter)


def lively(seed: int) -> ToyTarget:
    """Logits of many sizes: what is carried along a block matters."""
    return ToyTarget(3, seed, values=(-3, -1, 0, 1, 2))


CHAIN = setup(drawn_chain(2))
BLOCK = setup(drawn_chain(2), lively(5))
CHAIN_SHAPE: dict[str, Any] = {"fixed": (0, 0), "grows_drawn": True}
SWAPPED = DraftVocabulary(np.array([1, 0]), 3)
UNFILTERED = setup(
    wrong.UnfilteredDraft(fixed=(0,)), ToyTarget(3, 1, values=(-3, -2, -1, 0, 1, 2)), top_k=1
)
WRONG: dict[str, tuple[RejectionSetup, dict[str, Any]]] = {
    "odds of a draft that was not drawn": (
        CHAIN,
        {"drafter": wrong.ClaimsToHaveDrawn(**CHAIN_SHAPE)},
    ),
    "draft noise for the residual": (CHAIN, {"draws": wrong.DraftNoiseForResidual}),
    "residual not renormalised": (CHAIN, {"draws": wrong.NotRenormalised}),
    "residual from the whole target": (CHAIN, {"patches": {"leftover": wrong.whole_target}}),
    "fixed siblings keep their mass in the draft": (
        setup(drawn_leaves(1)),
        {"drafter": wrong.KeepsFixedMass(fixed=(1,))},
    ),
    "rejected siblings keep their mass": (
        setup(drawn_leaves(2, draws=False)),
        {"patches": {"verify": wrong.siblings_keep_their_mass}},
    ),
    "unlikely draft dropped": (CHAIN, {"drafter": wrong.DropsUnlikelyDrafts(**CHAIN_SHAPE)}),
    "row off by one": (CHAIN, {"target": RowOffByOne(3, TARGET.seed)}),
    "stale draft temperature": (
        setup(drawn_chain(2), temperature=0.5),
        {"drafter": wrong.StaleTemperature(**CHAIN_SHAPE)},
    ),
    "coin of zero": (
        replace(UNFILTERED, draws=wrong.EightSidedCoin),
        {"patches": {"settle": wrong.settle_at_or_below}},
    ),
    "draft ids for target ids": (
        setup(drawn_chain(2, vocabulary=SWAPPED)),
        {"drafter": wrong.DraftIdsForTargetIds(vocabulary=SWAPPED, **CHAIN_SHAPE)},
    ),
    "scores that tell what was drawn": (
        replace(CHAIN, costs=STEEP),
        {"drafter": wrong.TellingScores(**CHAIN_SHAPE)},
    ),
    "block: odds not cut off at 1": (
        replace(BLOCK, patches={"_own_chance": wrong.own_chance_cut_off}),
        {"patches": {"_own_chance": wrong.own_chance_cut_off, "min": wrong.not_cut_off}},
    ),
    "block: the last node's chance for all": (
        BLOCK,
        {"patches": {"_own_chance": wrong.carried_as_own_chance}},
    ),
    "block: residual not scaled": (
        setup(drawn_chain(2), lively(4)),
        {"patches": {"leftover": wrong.leftover_not_carried}},
    ),
    "block: draws used again in the next step": (BLOCK, {"draws": wrong.OriginLeftOut}),
}


@pytest.mark.parametrize(("right", "mistake"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_caught(right: RejectionSetup, mistake: dict[str, Any]) -> None:
    """And only for its mistake: the same setup without it passes."""
    with pytest.raises(LawDiffersError) as caught:
        check_law(replace(right, **mistake))

    assert caught.value.distance > Fraction(5, 1000)
    assert check_law(right).is_eventful


def test_only_blocks_need_draws_of_each_step_s_own() -> None:
    """Token by token nothing is looked at behind a rejection, so nothing is used up there."""
    right = replace(BLOCK, uses_blocks=False)

    assert check_law(replace(right, draws=wrong.OriginLeftOut)).is_eventful
