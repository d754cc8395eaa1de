"""What a constraint does to picks, laws and a drafter's view; and log-probabilities of raw rows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import SamplingParams
from outrider.sampling import RequestSampler, token_logprobs
from outrider.tree import DraftTree
from outrider.vocabulary import DraftVocabulary
from tests.strategies import logits, logits_rows
from tests.unit.test_sampling import VOCAB_SIZE, Example, requests


class Arbitrary:
    """Allows a set of tokens that the output alone decides; often few, sometimes none."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        draw = random.Random(f"{self.seed} {list(output_ids)}")
        share = draw.choice([0.0, 0.2, 0.5, 0.9])
        return np.array([draw.random() < share for _ in range(VOCAB_SIZE)])

    def for_drafts(self) -> Arbitrary:
        return self

    def num_valid(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        raise NotImplementedError

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        raise NotImplementedError

    def failure(self, output_ids: Sequence[int]) -> str | None:
        raise NotImplementedError


def masked(
    logits_NV: Tensor, constraint: Arbitrary, output_ids: list[int], tree: DraftTree
) -> Tensor:
    """Rows in which what is not allowed after each node's own prefix is gone from the start."""
    masks = [constraint.mask([*output_ids, *tree.path_tokens(n)]) for n in range(len(tree))]
    return logits_NV.masked_fill(~torch.tensor(np.array(masks)), -math.inf)


@given(requests(), st.integers(0, 999))
def test_picks_are_those_of_rows_that_lack_what_is_not_allowed(example: Example, seed: int) -> None:
    """At every node after its own prefix, under all parameters; -1 where nothing is left."""
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    constraint = Arbitrary(seed)
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "prompt_ids": prompt, "eos_ids": eos_ids}
    free = RequestSampler(params, **options)
    bound = RequestSampler(params, **options, constraint=constraint)
    free.seed, free.noise = bound.seed, bound.noise
    rows_NV = masked(logits_NV, constraint, token_ids[len(prompt) :], tree)

    assert free.choose(rows_NV, token_ids, tree) == bound.choose(logits_NV, token_ids, tree)
    assert not bound.is_raw_argmax
    if not params.is_greedy:
        for law, expected in zip(
            bound.laws(logits_NV, token_ids, tree),
            free.laws(rows_NV, token_ids, tree),
            strict=True,
        ):
            assert (law is None) == (expected is None)
            assert law is None or np.array_equal(expected, law)  # type: ignore[arg-type]


@given(requests(), st.integers(0, 999), st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1))
def test_a_drafter_sees_the_same_mask_in_its_own_vocabulary(
    example: Example, seed: int, ids: set[int]
) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    constraint = Arbitrary(seed)
    vocabulary = DraftVocabulary(np.array(sorted(ids)), VOCAB_SIZE)
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "prompt_ids": prompt, "eos_ids": eos_ids}
    free = RequestSampler(params, **options).draft_view(token_ids, vocabulary)
    bound = RequestSampler(params, **options, constraint=constraint)
    view = bound.draft_view(token_ids, vocabulary)
    rows_NV = masked(logits_NV, constraint, token_ids[len(prompt) :], tree)
    for node in range(len(tree)):
        path = tree.path_tokens(node)
        expected_W = free.warp(rows_NV[node].numpy()[vocabulary.ids_W], path)
        warped_W = view.warp(logits_NV[node].numpy()[vocabulary.ids_W], path)

        assert np.array_equal(expected_W, warped_W)
        assert not np.isnan(view.probs(logits_NV[node].numpy()[vocabulary.ids_W], path)).any()


def test_min_tokens_yields_where_the_grammar_leaves_only_the_end() -> None:
    class EndOnly(Arbitrary):
        def mask(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
            return np.arange(VOCAB_SIZE) == 3

    params = SamplingParams(min_tokens=5)
    sampler = RequestSampler(
        params,
        vocab_size=VOCAB_SIZE,
        prompt_ids=[0],
        eos_ids=frozenset({3}),
        constraint=EndOnly(0),
    )

    assert [3] == sampler.choose(torch.zeros(1, VOCAB_SIZE), [0], DraftTree.root(0))


# --- log-probabilities --------------------------------------------------------------------------


@given(logits(VOCAB_SIZE), st.integers(0, VOCAB_SIZE - 1), st.integers(0, VOCAB_SIZE + 2))
@example([-1.0] * (VOCAB_SIZE - 1) + [1e-44], 0, 1)
@example([0.0] * (VOCAB_SIZE - 1) + [1e-44], 0, 1)
def test_logprobs_are_those_of_the_plain_twin(row: list[float], token: int, num_top: int) -> None:
    row_V = torch.tensor(row, dtype=torch.float32)
    values = row_V.tolist()
    largest = max(values)
    total = math.fsum(math.exp(value - largest) for value in values)
    expected = [value - largest - math.log(total) for value in values]
    order = sorted(range(VOCAB_SIZE), key=lambda other: (-values[other], other))
    possible = [other for other in order if values[other] > -math.inf]
    before = row_V.clone()
    found = token_logprobs(row_V, token, num_top)

    assert token == found.token_id
    assert found.logprob == pytest.approx(expected[token], abs=1e-9)
    assert possible[:num_top] == [other for other, _ in found.top]
    assert [expected[other] for other in possible[:num_top]] == pytest.approx(
        [value for _, value in found.top], abs=1e-9
    )
    assert torch.equal(before, row_V)


@given(logits_rows(3, VOCAB_SIZE), st.integers(0, VOCAB_SIZE - 1))
def test_logprobs_of_a_row_do_not_depend_on_the_rows_beside_it(
    logits_RV: Tensor, token: int
) -> None:
    assert token_logprobs(logits_RV[1].clone(), token, 4) == token_logprobs(logits_RV[1], token, 4)


def test_ties_in_a_large_row_go_to_the_lowest_ids() -> None:
    row_V = torch.zeros(50_000)
    row_V[40_000] = 1.0

    assert [40_000, 0, 1, 2] == [token for token, _ in token_logprobs(row_V, 7, 4).top]
