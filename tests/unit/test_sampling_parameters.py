"""The sampler's parameters one by one: filters, penalties, bias, min_tokens, extremes, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike
from torch import Tensor

from outrider.config import SamplingParams
from outrider.errors import ParameterError
from outrider.sampling import RequestSampler
from outrider.tree import DraftTree
from outrider.warping import keep_min_p, keep_top_k, keep_top_p
from tests.strategies import logits, logits_rows

VOCAB_SIZE = 8
NO_EOS: frozenset[int] = frozenset()


# --- filters ------------------------------------------------------------------------------------


def shifted(values: ArrayLike) -> np.ndarray:
    """A float32 row whose largest is 0."""
    row = np.array(values, dtype=np.float32)
    return row - row.max()


def kept(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(row)).tolist()


def test_top_k_keeps_what_ties_with_the_last() -> None:
    assert [1, 2, 4] == kept(keep_top_k(shifted([0, 2, 1, 0.5, 1]), 2))


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert [0, 1, 2] == kept(keep_top_k(shifted([0, 2, 1]), 3))
    assert [0, 1, 2] == kept(keep_top_k(shifted([0, 2, 1]), 100))


def test_top_k_beyond_the_possible_tokens_keeps_those() -> None:
    assert [1] == kept(keep_top_k(shifted([-np.inf, 0, -np.inf]), 2))


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]

    assert [1] == kept(keep_top_p(shifted(np.log(probs)), 0.39))
    assert [1, 3] == kept(keep_top_p(shifted(np.log(probs)), 0.41))
    assert [1, 2, 3] == kept(keep_top_p(shifted(np.log(probs)), 0.89))
    assert [0, 1, 2, 3] == kept(keep_top_p(shifted(np.log(probs)), 0.91))


def test_top_p_takes_equals_by_id() -> None:
    assert [0, 1] == kept(keep_top_p(shifted([1, 1, 1, 1]), 0.5))
    assert [0, 1, 2] == kept(keep_top_p(shifted([1, 1, 1, 1]), 0.51))
    assert [1, 3] == kept(keep_top_p(shifted([0, 9, -1, 9, 9]), 0.6))


def test_top_p_always_keeps_the_first() -> None:
    assert [2] == kept(keep_top_p(shifted([0, 0, 5, 0]), 1e-30))


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.2, 1.0, 3.0, 8.0]),
    st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-7]),
    st.booleans(),
)
def test_the_nucleus_without_sorting_is_the_nucleus_by_sorting(
    seed: int, spread: float, top_p: float, is_coarse: bool
) -> None:
    """The prefilter must lose nothing, flat or peaked, with ties or without."""
    row = shifted(np.random.default_rng(seed).normal(0, spread, 3000))
    if is_coarse:
        row = shifted(row.astype(np.float16))
    order = np.lexsort((np.arange(row.size), -row))
    mass = np.cumsum(np.exp(row[order].astype(np.float64)))
    num_kept = int((mass < top_p * mass[-1]).sum()) + 1

    assert sorted(order[:num_kept].tolist()) == kept(keep_top_p(row, top_p))


def test_each_filter_sees_what_the_one_before_it_left() -> None:
    """Top-p counts what top-k left as the whole; min-p comes last and moves no nucleus."""
    logits_V = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]).log()

    def ids(**changes: Any) -> list[int]:
        params = SamplingParams(temperature=1.0, **changes)
        sampler = RequestSampler(params, vocab_size=5, prompt_ids=[0], eos_ids=NO_EOS)
        return kept(sampler.warp(logits_V, [0]).numpy())

    assert [0, 1] == ids(top_p=0.5)
    assert [0] == ids(top_k=2, top_p=0.5)
    assert [0, 1] == ids(top_p=0.5, min_p=0.5)


def test_min_p_is_relative_to_the_likeliest() -> None:
    probs = [0.5, 0.26, 0.24, 0.0]
    with np.errstate(divide="ignore"):
        row = shifted(np.log(probs))

    assert [0, 1] == kept(keep_min_p(row, 0.5))
    assert [0, 1, 2] == kept(keep_min_p(row, 0.4))
    assert [0, 1, 2] == kept(keep_min_p(row, 0.0))


def test_min_p_of_one_keeps_the_likeliest_with_its_equals() -> None:
    assert [1, 3] == kept(keep_min_p(shifted([0, 2, 1, 2]), 1.0))


@given(logits(VOCAB_SIZE), st.integers(1, 9), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_filters_keep_logits_as_they_are_and_leave_their_input_alone(
    values: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    row = shifted(values)
    before = row.copy()
    for filtered in (keep_top_k(row, top_k), keep_top_p(row, top_p), keep_min_p(row, min_p)):
        ids = kept(filtered)

        assert int(row.argmax()) in ids
        assert np.array_equal(row[ids], filtered[ids])
    assert np.array_equal(before, row)


# --- penalties, bias, min_tokens ----------------------------------------------------------------


def warped(params: SamplingParams, tokens: list[int], prompt_len: int) -> list[float]:
    """Greedy-warped logits of [2, -2, 1, 0]: what penalties and biases do to them."""
    sampler = RequestSampler(
        params, vocab_size=4, prompt_ids=tokens[:prompt_len], eos_ids=frozenset({3})
    )
    return sampler.warp(torch.tensor([2.0, -2.0, 1.0, 0.0]), tokens).tolist()


def test_repetition_penalty_sees_prompt_and_output_alike() -> None:
    params = SamplingParams(repetition_penalty=2.0)

    assert [1.0, -4.0, 1.0, 0.0] == warped(params, [0, 1], prompt_len=2)
    assert [1.0, -4.0, 1.0, 0.0] == warped(params, [0, 1], prompt_len=1)
    assert [1.0, -4.0, 1.0, 0.0] == warped(params, [0, 1, 0, 0], prompt_len=1)


def test_presence_and_frequency_see_the_output_only() -> None:
    presence = SamplingParams(presence_penalty=0.5)
    frequency = SamplingParams(frequency_penalty=0.5)

    assert [2.0, -2.0, 1.0, 0.0] == warped(presence, [0, 0, 1], prompt_len=3)
    assert [1.5, -2.5, 1.0, 0.0] == warped(presence, [2, 0, 0, 1], prompt_len=1)
    assert [1.0, -2.5, 1.0, 0.0] == warped(frequency, [2, 0, 0, 1], prompt_len=1)


def test_penalties_count_the_path_and_not_the_cousins() -> None:
    tree = DraftTree.root(0)
    a, b = tree.add(0, 1, 0.5), tree.add(0, 2, 0.5)
    tree.add(a, 1, 0.5)
    tree.add(b, 3, 0.5)
    params = SamplingParams(frequency_penalty=1.0)
    sampler = RequestSampler(params, vocab_size=4, prompt_ids=[0], eos_ids=NO_EOS)
    # Token 1 leads by 1.5: one occurrence leaves it ahead, two do not.
    logits_NV = torch.tensor([[0.0, 1.5, 0.0, 0.0]]).repeat(5, 1)

    assert [1, 1, 1, 0, 1] == sampler.choose(logits_NV, [0], tree)


def test_bias_comes_after_penalties() -> None:
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 3: -1.0})

    assert [4.0, -2.0, 1.0, -1.0] == warped(params, [0], prompt_len=1)


def test_min_tokens_holds_back_what_would_end_the_text_until_then() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(0,))

    assert [-math.inf, -2.0, 1.0, -math.inf] == warped(params, [1, 1], prompt_len=1)
    assert [2.0, -2.0, 1.0, 0.0] == warped(params, [1, 1, 1], prompt_len=1)


def test_min_tokens_counts_along_the_path() -> None:
    tree = DraftTree.root(1)
    tree.add(tree.add(0, 1, 0.5), 1, 0.5)
    params = SamplingParams(min_tokens=2)
    sampler = RequestSampler(params, vocab_size=4, prompt_ids=[1], eos_ids=frozenset({3}))
    logits_NV = torch.tensor([[0.0, 1.0, 0.0, 5.0]]).repeat(3, 1)

    assert [1, 1, 3] == sampler.choose(logits_NV, [1], tree)


def test_ignored_end_tokens_are_like_any_other() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(0,), ignore_eos=True)

    assert [-math.inf, -2.0, 1.0, 0.0] == warped(params, [1], prompt_len=1)


def test_an_end_token_stays_where_nothing_else_is_possible() -> None:
    params = SamplingParams(min_tokens=5)
    sampler = RequestSampler(params, vocab_size=3, prompt_ids=[0], eos_ids=frozenset({1}))
    logits_NV = torch.tensor([[-math.inf, 0.0, -math.inf]])

    assert [1] == sampler.choose(logits_NV, [0], DraftTree.root(0))


# --- extremes and refusals ----------------------------------------------------------------------

EXTREMES: list[dict[str, Any]] = [
    {"temperature": 5e-324},
    {"temperature": 1e-38, "top_p": 0.5, "min_p": 0.5},
    {"temperature": 1.0, "repetition_penalty": 5e-324},
    {"temperature": 1.0, "repetition_penalty": 100.0},
    {"temperature": 0.0, "repetition_penalty": 1e-40},
    {"temperature": 1.0, "top_p": 5e-324},
    {"temperature": 1.0, "top_p": 1 - 2**-53},
    {"temperature": 1.0, "min_p": 5e-324},
]


@pytest.mark.parametrize("changes", EXTREMES)
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e30, 3e38])
def test_extreme_settings_and_logits_never_give_nan(changes: dict[str, Any], scale: float) -> None:
    params = SamplingParams(seed=1, **changes)
    sampler = RequestSampler(params, vocab_size=5, prompt_ids=[0, 1, 4], eos_ids=NO_EOS)
    logits_NV = torch.tensor([[1.0, -1.0, 0.5, -0.25, -math.inf]]) * scale
    warped_V = sampler.warp(logits_NV[0], [0, 1, 4, 2])
    (pick,) = sampler.choose(logits_NV, [0, 1, 4, 2], DraftTree.root(2))

    assert not warped_V.isnan().any()
    assert warped_V.max().isfinite()
    assert pick in (0, 1, 2, 3)


@given(logits_rows(1, VOCAB_SIZE), st.integers(0, 2**64 - 1))
def test_a_vanishing_temperature_draws_among_the_largest(logits_NV: Tensor, seed: int) -> None:
    params = SamplingParams(temperature=1e-300, seed=seed)
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=[0], eos_ids=NO_EOS)
    (pick,) = sampler.choose(logits_NV, [0], DraftTree.root(0))

    assert logits_NV.max() == logits_NV[0, pick]


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_with_the_range(name: str) -> None:
    value: Any = {8: 1.0} if name == "logit_bias" else (8,)
    params = SamplingParams(**{name: value})
    with pytest.raises(ParameterError, match=rf"{name}: token id 8 .* 0 \.\. 7"):
        RequestSampler(params, vocab_size=8, prompt_ids=[0], eos_ids=NO_EOS)


def test_min_tokens_that_leaves_no_token_is_refused() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(0, 1))
    with pytest.raises(ParameterError, match="min_tokens: 3 forbids all 3 tokens"):
        RequestSampler(params, vocab_size=3, prompt_ids=[0], eos_ids=frozenset({2}))


def test_end_ids_beyond_the_vocabulary_are_no_user_s_fault() -> None:
    """Some checkpoints name end tokens that their own embedding does not have."""
    params = SamplingParams(min_tokens=3)
    sampler = RequestSampler(params, vocab_size=3, prompt_ids=[0], eos_ids=frozenset({99}))

    assert sampler.is_raw_argmax
