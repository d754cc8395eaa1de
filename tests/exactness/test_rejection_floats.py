"""The ``rejection`` rule as it runs: float32 laws, Philox draws, the production sampler.

Law by chi-square against the enumeration's fractions, with fixed seeds; and what a seed promises
under this rule: the same text for the same drafter, whatever is decoded beside it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.config import Accept, SamplingParams
from outrider.types import FinishReason
from outrider.vocabulary import DraftVocabulary
from tests.exactness.rejection_toy import (
    DrawingDrafter,
    RejectionSetup,
    drawn_chain,
    drawn_leaves,
)
from tests.exactness.test_pathwise import (
    NATURAL,
    BrokenTarget,
    law_pvalue,
    random_target,
)
from tests.exactness.toy import TARGET, Answer, Setup
from tests.exactness.toy_drafters import ToyDrafter, favourite, widths


def params(**changes: Any) -> SamplingParams:
    base = {"temperature": 1.0, "max_tokens": 3, "accept": Accept.REJECTION}
    return SamplingParams(**{**base, **changes})


def counts(drafter: ToyDrafter, settings: SamplingParams, **more: Any) -> Counter[Answer]:
    """Answers of many seeds and choices."""
    found: Counter[Answer] = Counter()
    for seed in range(60):
        seeded = replace(settings, seed=seed)
        found.update(
            RejectionSetup(NATURAL, seeded, drafter, choices=tuple(range(64)), **more).run()
        )
    return found


CASES: dict[str, tuple[ToyDrafter, dict[str, Any], dict[str, Any]]] = {
    "chain as a block": (drawn_chain(2), {}, {}),
    "chain token by token": (drawn_chain(2), {}, {"uses_blocks": False}),
    "tree": (drawn_leaves(1, 1), {}, {}),
    "nodes of both kinds": (DrawingDrafter(fixed=(1, 0), grows_drawn=True), {}, {}),
    "point masses": (ToyDrafter(widths(2, 1), favourite), {}, {}),
    "reduced vocabulary": (
        drawn_chain(2, vocabulary=DraftVocabulary(np.array([2, 0]), 3)),
        {},
        {},
    ),
    "filters": (drawn_chain(2), {"temperature": 2.0, "top_p": 0.9, "min_tokens": 2}, {}),
    "penalty": (drawn_leaves(1, 1), {"repetition_penalty": 2.0, "top_k": 2}, {}),
}


@pytest.mark.parametrize(("drafter", "changes", "more"), CASES.values(), ids=CASES)
def test_drawn_answers_follow_the_enumerated_law(
    drafter: ToyDrafter, changes: dict[str, Any], more: dict[str, Any]
) -> None:
    """Chi-square over 3,840 answers with fixed seeds; false-failure rate 1e-9."""
    settings = params(**changes)
    drawn = counts(drafter, settings, **more)

    assert law_pvalue(Setup(TARGET, settings), drawn) > 1e-9
    assert drafter.tally.is_eventful


def test_a_slightly_wrong_temperature_is_seen_in_as_many_draws() -> None:
    """Negative control: 1.25 for 1."""
    drawn = counts(drawn_chain(2), params(temperature=1.25))

    assert law_pvalue(Setup(TARGET, params()), drawn) < 1e-9


class ClaimsToHaveDrawn(DrawingDrafter):
    def draw(self, request, probs_W, fixed_W, tree, node) -> tuple[int, NDArray[Any]]:
        return int(probs_W.argmax()), probs_W


def test_a_ratio_test_of_what_was_not_drawn_is_seen_in_as_many_draws() -> None:
    """Negative control: the likeliest token, judged as if it had been drawn."""
    drawn = counts(ClaimsToHaveDrawn(fixed=(0, 0), grows_drawn=True), params())

    assert law_pvalue(Setup(TARGET, params()), drawn) < 1e-9


@pytest.mark.parametrize("drafter", [drawn_chain(3), drawn_leaves(2, 1)], ids=["chain", "tree"])
def test_a_seed_repeats_the_text_and_another_does_not(drafter: DrawingDrafter) -> None:
    setup = RejectionSetup(random_target(8, 1), params(max_tokens=24, seed=3), drafter)
    first = setup.run()

    assert first == setup.run()
    assert first != replace(setup, params=params(max_tokens=24, seed=4)).run()
    assert drafter.tally.is_eventful


@pytest.mark.parametrize("drafter", [drawn_chain(3), drawn_leaves(2, 1)], ids=["chain", "tree"])
def test_answers_beside_an_answer_do_not_change_it(drafter: DrawingDrafter) -> None:
    settings = params(temperature=0.9, top_p=0.9, seed=8, max_tokens=12)
    setup = RejectionSetup(random_target(8, 2), settings, drafter, choices=tuple(range(16)))

    assert tuple(setup.run_one(choice) for choice in range(16)) == setup.run()
    assert drafter.tally.is_eventful


def test_a_drafter_with_the_target_s_law_is_always_accepted() -> None:
    """Draws from the very law that judges them: five tokens a step."""

    class Oracle(DrawingDrafter):
        def probs(self, request, path):
            view = request.sampler.draft_view(request.token_ids, None)
            return view.probs(np.array(request.target.logits([*request.token_ids, *path])), path)

    drafter = Oracle(fixed=(0,) * 4, grows_drawn=True)
    settings = params(seed=1, max_tokens=40, ignore_eos=True, presence_penalty=0.5, top_p=0.9)
    RejectionSetup(random_target(8, 5), settings, drafter).run()

    assert drafter.tally.drafted == drafter.tally.accepted == 32


@pytest.mark.parametrize("uses_blocks", [True, False])
def test_logits_that_are_not_finite_end_an_answer_and_leave_the_others(uses_blocks: bool) -> None:
    settings = params(seed=3, max_tokens=12, ignore_eos=True)
    setup = RejectionSetup(
        BrokenTarget(3, 4), settings, drawn_chain(3), choices=(0, 1, 2, 3), uses_blocks=uses_blocks
    )
    answers = setup.run()

    assert {FinishReason.ERROR, FinishReason.LENGTH} == {reason for _, _, reason in answers}
    assert all(ids[-2:] == (1, 1) for ids, _, reason in answers if reason is FinishReason.ERROR)


def test_greedily_both_rules_are_the_same_walk() -> None:
    greedy = SamplingParams(max_tokens=12, presence_penalty=0.5)
    drafter = ToyDrafter(widths(2, 1), favourite)
    expected = Setup(random_target(8, 3), greedy, drafter).run()

    assert (
        expected
        == Setup(random_target(8, 3), replace(greedy, accept=Accept.REJECTION), drafter).run()
    )
