"""Where an answer stands in its prediction, and what is drafted from there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.prediction import PREDICTION_DEPTH, Prediction
from outrider.tree import DraftTree
from outrider.types import PredictionStats, Verdict

PROMPT = [90, 91]
ANY_DEPTH = 100
ANY_LEN = 1000


def drafted(prediction: Prediction, output: Sequence[int], max_depth: int = ANY_DEPTH) -> list[int]:
    """The proposed chain behind an output."""
    tree = prediction.propose([*PROMPT, *output], len(PROMPT), max_depth)

    assert tree.is_chain
    assert tree.token[0] == [*PROMPT, *output][-1]
    return tree.token[1:]


def test_before_the_first_token_the_beginning_is_drafted() -> None:
    assert [1, 2, 3] == drafted(Prediction([1, 2, 3], ANY_LEN), [])


def test_an_answer_that_agrees_is_followed_to_its_end() -> None:
    prediction = Prediction([1, 2, 3, 4], ANY_LEN)

    assert [2, 3, 4] == drafted(prediction, [1])
    assert [4] == drafted(prediction, [1, 2, 3])
    assert [] == drafted(prediction, [1, 2, 3, 4])
    assert [] == drafted(prediction, [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([1, 2, 9], [4, 5, 6, 7, 8]),  # one token in place of another
        ([1, 2, 9, 4], [5, 6, 7, 8]),
        ([1, 2, 9, 9, 9, 4], [5, 6, 7, 8]),  # an insertion
        ([1, 2, 5], [6, 7, 8]),  # a deletion
        ([1, 2, 9, 6, 7], [8]),  # a deletion behind a new token
        ([1, 2, 3, 1, 2], [3, 4, 5, 6, 7, 8]),  # a repetition
    ],
)
def test_an_answer_that_departs_is_found_again(output: list[int], expected: list[int]) -> None:
    assert expected == drafted(Prediction([1, 2, 3, 4, 5, 6, 7, 8], ANY_LEN), output)


def test_what_lies_ahead_is_preferred_to_what_has_been() -> None:
    text = [1, 2, 3, 7, 1, 2, 4, 7, 1, 2, 5]

    assert [4, 7, 1, 2, 5] == drafted(Prediction(text, ANY_LEN), [1, 2, 3, 9, 1, 2])


def test_a_single_far_token_says_nothing() -> None:
    far = [1, 2, *range(100, 160), 5, 6]

    assert 6 not in drafted(Prediction(far, ANY_LEN), [1, 5])


@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_no_deeper_than_asked_for(max_depth: int) -> None:
    assert [1, 2, 3, 4][:max_depth] == drafted(Prediction([1, 2, 3, 4], ANY_LEN), [], max_depth)


def test_no_deeper_than_pays() -> None:
    assert PREDICTION_DEPTH == len(drafted(Prediction(range(100), ANY_LEN), []))


def step(prediction: Prediction, output: list[int], future: Sequence[int]) -> None:
    """One verify step of the prediction alone, whose answer goes on with ``future``."""
    tree = prediction.propose([*PROMPT, *output], len(PROMPT), ANY_DEPTH)
    path = []
    for token in future:
        if len(path) == tree.num_drafted or tree.token[len(path) + 1] != token:
            break
        path.append(len(path) + 1)
    emitted = future[: len(path) + 1]
    prediction.observe(tree, Verdict(tuple(path), tuple(emitted), tree.num_drafted), len(emitted))
    output += emitted


@pytest.mark.parametrize("is_right", [True, False])
def test_trust_grows_with_success_and_falls_with_failure(is_right: bool) -> None:
    ids = list(range(1, 80)) if is_right else [1, 3] * 40
    experienced, output = Prediction(ids, ANY_LEN), list[int]()
    for _ in range(4):
        step(experienced, output, ids[len(output) :] if is_right else [2, 2])
    scores = [
        prediction.propose([*PROMPT, *output], len(PROMPT), ANY_DEPTH).score[1]
        for prediction in (experienced, Prediction(ids, ANY_LEN))
    ]

    assert is_right == (scores[0] > scores[1])
    assert scores[0] != scores[1]


def test_scores_fall_along_the_chain_within_0_and_1() -> None:
    score = Prediction(range(20), ANY_LEN).propose(PROMPT, len(PROMPT), ANY_DEPTH).score

    assert sorted(score, reverse=True) == score
    assert all(0 < one <= 1 for one in score)


# --- statistics ---------------------------------------------------------------------------------


def test_only_what_was_verified_is_counted_and_only_what_was_emitted_is_accepted() -> None:
    prediction = Prediction([1, 2, 3, 4], ANY_LEN)
    tree = prediction.propose(PROMPT, len(PROMPT), ANY_DEPTH).keep([1, 2, 3])
    verdict = Verdict((1, 2), (1, 2, 9), 3)
    prediction.observe(tree, verdict, 1)  # a stop event cut the second one off

    assert PredictionStats(accepted=1, rejected=2) == prediction.stats


def test_another_drafter_s_nodes_are_not_counted() -> None:
    prediction = Prediction([1, 2], ANY_LEN)
    other = DraftTree.root(PROMPT[-1])
    other.add(0, 5, 0.9)
    merged = other.merged(prediction.propose(PROMPT, len(PROMPT), ANY_DEPTH))
    prediction.observe(merged, Verdict((1,), (5, 6), merged.num_drafted), 2)

    assert PredictionStats(accepted=0, rejected=2) == prediction.stats


def test_a_step_that_never_ended_counts_nothing() -> None:
    """Preempted between proposal and verdict, a request proposes again."""
    prediction = Prediction([1, 2], ANY_LEN)
    drafted(prediction, [])
    step(prediction, [], [1, 2, 3])

    assert PredictionStats(accepted=2, rejected=0) == prediction.stats


@given(st.lists(st.integers(0, 3), max_size=30), st.data())
def test_the_place_depends_on_the_answer_and_not_on_the_steps(
    ids: list[int], data: st.DataObject
) -> None:
    """Preemption, other drafts and other batches change when it is asked, not what it says."""
    output = data.draw(st.lists(st.integers(0, 3), max_size=20))
    stepwise = Prediction(ids, ANY_LEN)
    for length in sorted(data.draw(st.sets(st.integers(0, len(output))))):
        drafted(stepwise, output[:length])

    assert drafted(Prediction(ids, ANY_LEN), output) == drafted(stepwise, output)
