"""L0 for what a request may ask of its own: grammar, log-probabilities, prediction, draft limit.

As in :mod:`test_law`, by enumeration in exact arithmetic. What a grammar allows is found by trying
all texts; the program's own matcher prunes the drafts and ends the answers, and in the last part
masks the rows too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from outrider import step
from outrider.config import GrammarKind, GrammarSpec, SamplingParams
from outrider.errors import ParameterError
from outrider.grammar import GrammarConstraint
from outrider.sampling import token_logprobs
from outrider.tree import DraftTree
from outrider.types import FinishReason, PredictionStats, Verdict
from outrider.warping import Constraint
from tests.exactness import wrong
from tests.exactness.race import Weights, enumerate_law
from tests.exactness.rejection_toy import RejectionSetup, drawn_chain, drawn_leaves
from tests.exactness.test_pathwise import ONE_EACH, random_target
from tests.exactness.toy import (
    EOS,
    TARGET,
    ExactSampler,
    LawDiffersError,
    Setup,
    ToyRequest,
    ToyTarget,
    check_law,
    exact_weights,
    production_constraint,
)
from tests.exactness.toy_drafters import (
    Guess,
    Shape,
    Tally,
    ToyDrafter,
    blind,
    chain,
    coupled,
    favourite,
    lopsided,
    scattered,
    widths,
)

FOUR = ToyTarget(4, seed=2, values=(-1, 0, 1))  # a, b, an end, d


def regex(expression: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, expression)


def params(**changes: Any) -> SamplingParams:
    """Three tokens at temperature 1, or what is changed."""
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 3, "seed": 5, **changes})


# --- grammars -----------------------------------------------------------------------------------

GRAMMARS = {
    "alternating": "(ab)*a?",
    "ends by itself": "a{1,2}|ba?",
    "ends anywhere": "[ab]*",
    "forced": "abab",
    "never ends": "(a|b)*bbbbbbb",
}
DRAFTERS = {
    "chain": (chain(2), blind),
    "coupled tree": (lopsided(2), coupled),
    "bushy": (widths(2, 1), favourite),
    "scattered": (scattered(seed=1, size=4), blind),
}


def summed(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.drafted += tally.drafted
        total.accepted += tally.accepted
        total.rejected += tally.rejected
    return total


@pytest.mark.parametrize("expression", GRAMMARS.values(), ids=GRAMMARS)
def test_no_drafter_changes_the_law_under_a_grammar(expression: str) -> None:
    setup = Setup(TARGET, params(grammar=regex(expression)))
    tally = summed(check_law(replace(setup, drafter=ToyDrafter(*d))) for d in DRAFTERS.values())

    assert tally.drafted
    assert tally.accepted
    if expression == GRAMMARS["forced"]:
        assert 0 == tally.rejected, "what the grammar forbids is not even verified"
    else:
        assert tally.rejected


WITH_GRAMMAR: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 1},
    "top_p": {"temperature": 0.5, "top_p": 0.7},
    "min_p": {"min_p": 0.5},
    "penalties": {"presence_penalty": 2.0, "repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {0: 2.0, 2: -3.0}},
    "min_tokens": {"min_tokens": 2},
    "min_tokens to the end": {"min_tokens": 3},
    "stop id": {"stop_token_ids": (1,)},
    "stop string": {"stop": ("ba",)},
    "ignore_eos": {"ignore_eos": True},
    "two answers": {"max_tokens": 2},
    "draft limit": {"max_draft_tokens": 1},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("changes", WITH_GRAMMAR.values(), ids=WITH_GRAMMAR)
def test_every_parameter_keeps_its_law_together_with_a_grammar(changes: dict[str, Any]) -> None:
    """The grammar comes before ``min_tokens``: where only the end is left, it may come early."""
    with_grammar = params(grammar=regex("(ab)*a|ba?"), **changes)
    choices = (0, 1) if with_grammar.max_tokens == 2 else (0,)
    tally = check_law(
        Setup(TARGET, with_grammar, ToyDrafter(widths(2, 1), favourite), choices=choices)
    )

    assert tally.drafted
    assert tally.accepted


def test_a_larger_vocabulary_under_a_grammar() -> None:
    setup = Setup(FOUR, params(grammar=regex("(ad|b)*d?")), ToyDrafter(lopsided(2), coupled))

    assert check_law(setup).is_eventful


REJECTION = {
    "block": (drawn_chain(2), True),
    "token by token": (drawn_chain(2), False),
    "tree": (drawn_leaves(1, 0), False),
    "point masses": (ToyDrafter(widths(2, 1), favourite), False),
}


@pytest.mark.parametrize("expression", ["(ab)*a?", "a{1,2}|ba?", "[ab]*"])
@pytest.mark.parametrize(("drafter", "uses_blocks"), REJECTION.values(), ids=REJECTION)
def test_the_rejection_rule_keeps_the_law_under_a_grammar(
    drafter: ToyDrafter, uses_blocks: bool, expression: str
) -> None:
    setup = RejectionSetup(
        TARGET,
        params(grammar=regex(expression), accept="rejection"),
        drafter,
        uses_blocks=uses_blocks,
    )
    tally = check_law(setup)

    assert tally.drafted
    assert tally.accepted


class EndAllowedAnywhere(ExactSampler):
    """A drafted or picked end of text is taken wherever it comes."""

    def weights(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> Weights:
        prefix = [*token_ids, *tree.path_tokens(node)]
        free = replace(self.params, grammar=None)
        law = exact_weights(logits, prefix, free, eos_ids=self.eos_ids)
        bound = exact_weights(logits, prefix, self.params, eos_ids=self.eos_ids)
        return tuple(
            w if b or t in EOS else 0 for t, (w, b) in enumerate(zip(law, bound, strict=True))
        )


class EndsTooEarly:
    """An answer ends where it may, not where it must."""

    def __init__(self, right: GrammarConstraint) -> None:
        self._right = right

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        return self._right.state(output_ids).may_end


def ends_too_early(*args: Any) -> Constraint:
    right = production_constraint(*args)

    assert isinstance(right, GrammarConstraint)
    return EndsTooEarly(right)  # type: ignore[return-value]  # the rest is the right one's


WRONG = {
    "mask of the step's start": ("(ab)*a?b?", {"sampler": wrong.PathLeftOut}),
    "end allowed anywhere": ("(ab|b)+", {"sampler": EndAllowedAnywhere}),
    "ends too early": ("(ab)*a?b?", {"constraint": ends_too_early}),
}


@pytest.mark.parametrize(("expression", "mistake"), WRONG.values(), ids=WRONG)
def test_a_wrong_grammar_engine_is_caught(expression: str, mistake: dict[str, Any]) -> None:
    drafter = ToyDrafter(widths(2, 1), favourite)
    right = Setup(TARGET, params(grammar=regex(expression)), drafter)
    with pytest.raises(LawDiffersError) as caught:
        check_law(replace(right, **mistake))

    assert caught.value.distance > Fraction(1, 100)
    assert check_law(right).is_eventful


# --- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"temperature": 0.0}, {"min_tokens": 2}])
def test_logprobs_are_the_raw_ones_of_each_token_s_own_prefix(changes: dict[str, Any]) -> None:
    """``Setup.run`` compares them in every world with the toy's own table."""
    setup = Setup(TARGET, params(logprobs=3, **changes))
    tally = summed(check_law(replace(setup, drafter=ToyDrafter(*d))) for d in DRAFTERS.values())

    assert tally.is_eventful


def test_logprobs_of_another_row_are_caught() -> None:
    setup = Setup(TARGET, params(logprobs=1), ToyDrafter(chain(2), favourite))

    def of_the_root(verdict: Verdict, logits_NV: Tensor, num_top: int) -> Verdict:
        found = [token_logprobs(logits_NV[0], token, num_top) for token in verdict.tokens]
        return replace(verdict, logprobs=tuple(found))

    with mock.patch.object(step, "_with_logprobs", of_the_root), pytest.raises(AssertionError):
        check_law(setup)


# --- predictions and limits ---------------------------------------------------------------------

PREDICTIONS = {
    "right at times": (0, 1, 0),
    "repeats": (1, 1, 1, 1),
    "departs": (0, 0, 1, 2),
    "shorter": (1,),
}


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS)
def test_a_prediction_keeps_the_law_without_any_drafter(prediction: tuple[int, ...]) -> None:
    tally = check_law(Setup(TARGET, params(max_tokens=4), prediction=prediction))

    assert tally.is_eventful


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS)
@pytest.mark.parametrize(("shape", "guess"), DRAFTERS.values(), ids=DRAFTERS)
def test_a_prediction_keeps_the_law_beside_any_drafter(
    prediction: tuple[int, ...], shape, guess
) -> None:
    setup = Setup(TARGET, params(), ToyDrafter(shape, guess), prediction=prediction)

    assert check_law(setup).is_eventful
    assert 0 < sum(stats.accepted for stats in setup.predicted)
    assert 0 < sum(stats.rejected for stats in setup.predicted)


@pytest.mark.parametrize(("drafter", "uses_blocks"), REJECTION.values(), ids=REJECTION)
def test_a_prediction_keeps_the_law_under_the_rejection_rule(
    drafter: ToyDrafter, uses_blocks: bool
) -> None:
    setup = RejectionSetup(
        TARGET, params(accept="rejection"), drafter, uses_blocks=uses_blocks, prediction=(0, 1, 0)
    )

    assert check_law(setup).is_eventful


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_draft_limit_keeps_the_law_and_is_kept(limit: int) -> None:
    drafter = ToyDrafter(widths(2, 2), favourite)
    setup = Setup(
        TARGET, params(max_draft_tokens=limit), drafter, prediction=(0, 1, 0), choices=(0,)
    )
    emitted = enumerate_law(setup.run)

    assert setup.plain_law() == emitted
    if limit == 0:
        assert 0 == drafter.tally.drafted
        assert [] == setup.predicted
    else:
        assert drafter.tally.is_eventful


# --- with the production sampler ----------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": regex("((ab|ba)[abde]{0,2}(d|e))*f?")},
    "logprobs": {"logprobs": 2},
    "prediction": {"prediction": (0, 1, 3, 1, 0, 4, 0, 1)},
    "max_draft_tokens": {"max_draft_tokens": 2},
}
PAIRS = [
    *itertools.combinations(OPTIONS, 2),
    *((one, other) for one in OPTIONS for other in ONE_EACH),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_pair_with_a_request_option_keeps_the_text(one: str, other: str) -> None:
    """Token ids, text, reason; and the log-probabilities are the raw ones in every run."""
    tally = Tally()
    for seed in range(3):
        changes = {"temperature": 1.0, **OPTIONS[one], **(OPTIONS | ONE_EACH)[other]}
        prediction = changes.pop("prediction", ())
        with_options = SamplingParams(**{"max_tokens": 16, "seed": seed, **changes})
        plain = Setup(random_target(6, seed), with_options, choices=(0, 1))
        expected = plain.run()
        assert expected == replace(plain, prediction=prediction).run()
        for drafter in (
            ToyDrafter(chain(4), favourite, tally=tally),
            ToyDrafter(widths(2, 2, 1), coupled, tally=tally),
        ):
            assert expected == replace(plain, drafter=drafter, prediction=prediction).run()

    assert tally.is_eventful


def test_the_production_mask_is_that_of_trying_all_texts() -> None:
    """The bridge: what is enumerated above and what runs say the same answers are possible."""
    grammar = regex("(ab)*a?b?")
    law = Setup(TARGET, params(grammar=grammar)).plain_law()
    drawn = {
        Setup(TARGET, params(grammar=grammar, seed=seed), ToyDrafter(chain(2), coupled)).run()
        for seed in range(200)
    }

    assert drawn <= law.keys()
    assert len(drawn) > len(law) / 2


def test_a_dead_end_is_an_error_with_its_reason() -> None:
    """Only a target without the tokens that the grammar needs gets there."""
    with pytest.raises(ParameterError, match="no text but at most the empty one"):
        Setup(TARGET, params(grammar=regex("d"))).run()
    setup = Setup(TARGET, params(grammar=regex("aad|bd"), max_tokens=9))
    ((_, text, reason),) = setup.run()

    assert FinishReason.ERROR is reason
    assert text in ("aa", "b")


def test_prediction_stats_count_what_was_verified() -> None:
    greedy = params(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = Setup(TARGET, greedy)
    ((ids, _, _),) = plain.run()
    right = replace(plain, prediction=ids, predicted=[])
    wrong_from_the_start = replace(plain, prediction=((ids[0] + 1) % 3,), predicted=[])

    assert plain.run() == right.run()
    assert [PredictionStats(accepted=7, rejected=0)] == right.predicted
    assert plain.run() == wrong_from_the_start.run()
    assert [PredictionStats(accepted=0, rejected=1)] == wrong_from_the_start.predicted


# --- every way to cut an answer into steps ------------------------------------------------------


@dataclass
class CutDrafter(ToyDrafter):
    """Drafts the true future, so that each step emits as many tokens as ``cuts`` says."""

    shape: Shape = field(default=chain(0))
    guess: Guess = field(default=blind)
    future: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()

    def _tree(self, request: ToyRequest, max_depth: int) -> DraftTree:
        tree = DraftTree.root(request.token_ids[-1])
        ends = [0, *itertools.accumulate(self.cuts)]
        num_drafts = self.cuts[ends.index(request.num_output)] - 1
        drafts = self.future[request.num_output :][: min(num_drafts, max_depth)]
        for node, token in enumerate(drafts):
            tree.add(node, token, 0.5 ** (node + 1))
        return tree


CUT: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop strings": {"stop": ("ba", "dd", "bd")},
    "stop id": {"stop_token_ids": (3,)},
    "end": {"ignore_eos": False},
    "grammar": {"grammar": regex("([abd]{2}|[abd]{4})*"), "ignore_eos": False},
    "grammar that ends": {"grammar": regex("[abd]{5}")},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("changes", CUT.values(), ids=CUT)
def test_every_partition_into_steps_gives_the_same_answer_and_logprobs(
    changes: dict[str, Any], temperature: float
) -> None:
    """All 64 ways to cut seven tokens, with drafts that run past the answer's end.

    ``Setup.run`` holds the log-probabilities against the toy's table each time.
    """
    options = {"logprobs": 2, "max_tokens": 7, "ignore_eos": True, "temperature": temperature}
    wanted = params(**{**options, **changes})
    setup = Setup(FOUR, wanted)
    expected = setup.run()
    ((ids, _, _),) = expected
    endless = replace(wanted, stop=(), stop_token_ids=(), ignore_eos=True)
    ((future, _, _),) = replace(setup, params=endless).run()
    beyond = (*ids, *future[len(ids) :])
    tally = Tally()
    for bits in itertools.product([False, True], repeat=6):
        places = [0, *(place for place, bit in enumerate(bits, 1) if bit), 7]
        cuts = tuple(end - start for start, end in itertools.pairwise(places))
        drafter = CutDrafter(future=beyond, cuts=cuts, tally=tally)

        assert expected == replace(setup, drafter=drafter).run()
    assert tally.accepted > 0
