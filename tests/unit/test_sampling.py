"""The sampler against a plain twin, and what it promises about rows, neighbours and noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.config import SamplingParams
from outrider.noise import gumbel_vector
from outrider.sampling import RequestSampler, argmax_rows
from outrider.tree import DraftTree
from outrider.verify import walk
from outrider.vocabulary import DraftVocabulary
from tests.strategies import logits_rows, sampling_params, trees

VOCAB_SIZE = 8
NO_EOS: frozenset[int] = frozenset()


# --- the plain twin -----------------------------------------------------------------------------


def reference_warp(
    row: Sequence[float],
    prefix: Sequence[int],
    params: SamplingParams,
    prompt_len: int,
    eos_ids: frozenset[int],
) -> list[np.float32]:
    """Token by token, in the order that SamplingParams documents; lists and sorting only."""
    output = prefix[prompt_len:]
    values = []
    for token, logit in enumerate(map(np.float32, row)):
        value = logit
        if token in prefix and params.repetition_penalty != 1.0:
            factor = np.float32(params.repetition_penalty)
            value = value / factor if value > 0 else value * factor
        count = output.count(token)
        value -= np.float32(
            params.presence_penalty * (count > 0) + params.frequency_penalty * count
        )
        values.append(value + np.float32(params.logit_bias.get(token, 0.0)))
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_ids)
    if len(output) < params.min_tokens:
        held_back = [np.float32(-np.inf) if t in ends else v for t, v in enumerate(values)]
        values = held_back if max(held_back) > -np.inf else values
    if params.temperature == 0.0:
        return values
    largest = max(values)
    values = [(value - largest) / np.float32(params.temperature) for value in values]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.top_k:
        kth = values[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if values[token] >= kth]
    total = math.fsum(math.exp(values[token]) for token in order)
    kept: list[int] = []
    for token in order:
        mass = math.fsum(math.exp(values[t]) for t in kept)
        if params.top_p == 1.0 or mass < params.top_p * total:
            kept.append(token)
    if params.min_p:
        kept = [token for token in kept if float(values[token]) >= math.log(params.min_p)]
    return [v if t in kept else np.float32(-np.inf) for t, v in enumerate(values)]


def reference_choose(
    logits_NV: Tensor,
    token_ids: Sequence[int],
    tree: DraftTree,
    params: SamplingParams,
    prompt_len: int,
    eos_ids: frozenset[int],
) -> list[int]:
    """The pick after each node, each worked out from its whole prefix."""
    picks = []
    for node in range(len(tree)):
        row = logits_NV[node].tolist()
        if any(map(math.isnan, row)) or not math.isfinite(max(row)):
            picks.append(-1)
            continue
        prefix = [*token_ids, *tree.path_tokens(node)]
        values = reference_warp(row, prefix, params, prompt_len, eos_ids)
        if params.temperature > 0.0:
            assert params.seed is not None
            noise = gumbel_vector(params.seed, params.choice, len(prefix), len(row))
            values = [value + g for value, g in zip(values, noise, strict=True)]
        picks.append(max(range(len(values)), key=lambda token: (values[token], -token)))
    return picks


@st.composite
def requests(
    draw: st.DrawFn,
) -> tuple[SamplingParams, list[int], list[int], frozenset[int], DraftTree, Tensor]:
    """Parameters, prompt, tokens so far, end ids, a tree on them, and a row for each node."""
    tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)
    prompt = draw(tokens.filter(bool))
    token_ids = prompt + draw(tokens)
    tree = draw(trees(vocab_size=VOCAB_SIZE, max_nodes=6))
    tree.token[0] = token_ids[-1]
    return (
        draw(sampling_params(vocab_size=VOCAB_SIZE)),
        prompt,
        token_ids,
        draw(st.frozensets(st.integers(0, VOCAB_SIZE + 2), max_size=2)),
        tree,
        draw(logits_rows(len(tree), VOCAB_SIZE)),
    )


Example = tuple[SamplingParams, list[int], list[int], frozenset[int], DraftTree, Tensor]


@given(requests())
def test_every_node_is_picked_as_the_plain_twin_picks_it(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    expected = reference_choose(logits_NV, token_ids, tree, params, len(prompt), eos_ids)

    assert expected == sampler.choose(logits_NV, token_ids, tree)


@given(requests())
def test_warped_logits_are_those_of_the_plain_twin(example: Example) -> None:
    params, prompt, token_ids, eos_ids, _, logits_NV = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    row = logits_NV[0].tolist()
    expected = reference_warp(row, token_ids, params, len(prompt), eos_ids)
    warped_V = sampler.warp(logits_NV[0], token_ids)

    assert torch.float32 == warped_V.dtype
    assert expected == warped_V.tolist()


@given(requests())
def test_no_combination_of_filters_removes_everything(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    picks = sampler.choose(logits_NV, token_ids, tree)

    assert sampler.warp(logits_NV[0], token_ids).max().isfinite()
    for row, pick in enumerate(picks):
        assert logits_NV[row, pick].isfinite(), "a masked token must never be picked"


@given(requests())
def test_logits_and_tokens_are_only_read(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    before, tokens_before = logits_NV.clone(), list(token_ids)
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    sampler.choose(logits_NV, token_ids, tree)
    sampler.warp(logits_NV[0], token_ids).fill_(7.0)

    assert torch.equal(before, logits_NV)
    assert tokens_before == token_ids


@given(requests(), st.data())
def test_a_node_is_picked_alike_alone_and_among_others(
    example: Example, data: st.DataObject
) -> None:
    """As the root of a later step, with its path committed, a node gives the same pick."""
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    node = data.draw(st.integers(0, len(tree) - 1))
    prefix = [*token_ids, *tree.path_tokens(node)]
    alone = sampler.choose(logits_NV[node : node + 1], prefix, DraftTree.root(prefix[-1]))

    assert alone == [sampler.choose(logits_NV, token_ids, tree)[node]]


@given(requests())
def test_picks_on_demand_are_those_chosen_at_once(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    chosen = sampler.choose(logits_NV, token_ids, tree)
    picks = sampler.picks(logits_NV, token_ids, tree)
    token_ids.append(0)  # the step emits before anyone looks again

    assert len(tree) == len(picks)
    assert chosen[::-1] == list(picks[::-1])
    assert chosen[-1] == picks[-1]
    assert walk(tree, chosen) == walk(tree, picks)


def test_picks_draw_noise_for_the_path_only() -> None:
    tree = DraftTree.root(0)
    for token in range(4):
        tree.add(tree.add(0, token, 0.2), 0, 0.1)
    params = SamplingParams(temperature=1.0, seed=3)
    sampler = RequestSampler(params, vocab_size=8, prompt_ids=[0], eos_ids=NO_EOS)
    asked = []
    at = sampler.noise.at
    sampler.noise.at = lambda position: asked.append(position) or at(position)  # type: ignore[method-assign]
    logits_NV = torch.zeros(len(tree), 8)
    logits_NV[0, 7] = 100.0  # no child: the walk ends at the root
    walk(tree, sampler.picks(logits_NV, [0], tree))

    assert [1] == asked


# --- greedy and rows that are not finite --------------------------------------------------------


@given(st.integers(1, 5).flatmap(lambda rows: logits_rows(rows, VOCAB_SIZE)))
def test_argmax_rows_takes_the_lowest_of_the_largest(logits_RV: Tensor) -> None:
    expected = [row.index(max(row)) for row in logits_RV.tolist()]

    assert expected == argmax_rows(logits_RV)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param([0.0, math.nan, 1.0], id="NaN"),
        pytest.param([math.nan] * 3, id="all NaN"),
        pytest.param([math.inf, math.nan, 1.0], id="infinity before NaN"),
        pytest.param([0.0, math.inf, 1.0], id="infinity"),
        pytest.param([-math.inf] * 3, id="nothing possible"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_marked_and_leave_their_neighbours_alone(
    row: list[float], temperature: float
) -> None:
    logits_RV = torch.tensor([[0.0, 9.0, 1.0], row, [9.0, 0.0, 9.0]])
    tree = DraftTree.root(0)
    tree.add(tree.add(0, 1, 0.5), 2, 0.5)
    params = SamplingParams(temperature=temperature, seed=0, top_k=1, logit_bias={2: -0.5})
    sampler = RequestSampler(params, vocab_size=3, prompt_ids=[0], eos_ids=NO_EOS)

    assert [1, -1, 0] == argmax_rows(logits_RV)
    assert [1, -1, 0] == sampler.choose(logits_RV, [0], tree)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_no_fault(temperature: float) -> None:
    logits_RV = torch.tensor([[-math.inf, -5.0, -math.inf]])
    params = SamplingParams(temperature=temperature, seed=0)
    sampler = RequestSampler(params, vocab_size=3, prompt_ids=[0], eos_ids=NO_EOS)

    assert [1] == argmax_rows(logits_RV)
    assert [1] == sampler.choose(logits_RV, [0], DraftTree.root(0))


@pytest.mark.parametrize("threads", [1, 2])
def test_ties_go_to_the_lowest_id_in_a_large_vocabulary(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits_RV = torch.zeros(2, 151_936)
        logits_RV[:, [40_000, 40_001, 120_000, 151_935]] = 5.0
        picks = argmax_rows(logits_RV)
    finally:
        torch.set_num_threads(before)

    assert [40_000, 40_000] == picks


@pytest.mark.parametrize(
    ("changes", "is_raw"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),  # without effect at temperature 0
        ({"min_tokens": 2}, False),
        ({"min_tokens": 2, "ignore_eos": True}, True),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": (1,)}, False),
        ({"stop_token_ids": (1,)}, True),
        ({"logit_bias": {1: 0.5}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"temperature": 0.1}, False),
    ],
)
def test_raw_argmax_is_claimed_where_nothing_touches_the_logits(
    changes: dict[str, Any], is_raw: bool
) -> None:
    params = SamplingParams(**changes)
    sampler = RequestSampler(params, vocab_size=8, prompt_ids=[1], eos_ids=frozenset({2}))

    assert is_raw == sampler.is_raw_argmax


@given(requests())
def test_where_raw_argmax_is_claimed_it_gives_the_same(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    params = SamplingParams(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)

    assert sampler.is_raw_argmax
    assert argmax_rows(logits_NV) == sampler.choose(logits_NV, token_ids, tree)


# --- noise --------------------------------------------------------------------------------------


def test_noise_is_that_of_the_position_the_token_will_take() -> None:
    """With flat logits the pick shows the noise: the root's token comes right after the tokens."""
    tree = DraftTree.root(3)
    child = tree.add(0, 4, 0.5)
    tree.add(0, 5, 0.5)
    tree.add(child, 6, 0.5)
    params = SamplingParams(temperature=1.0, seed=9, choice=2)
    sampler = RequestSampler(params, vocab_size=100, prompt_ids=[1, 2], eos_ids=NO_EOS)
    expected = [int(gumbel_vector(9, 2, position, 100).argmax()) for position in (3, 4, 4, 5)]

    assert expected == sampler.choose(torch.zeros(4, 100), [1, 2, 3], tree)


def test_a_request_without_a_seed_gets_a_private_one_of_64_bits() -> None:
    samplers = [
        RequestSampler(SamplingParams(), vocab_size=8, prompt_ids=[1], eos_ids=NO_EOS)
        for _ in range(64)
    ]
    seeds = {sampler.seed for sampler in samplers}

    assert 64 == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**48, "all of 64 draws below 2**48 has a chance of 2**-1024"


def test_a_given_seed_is_kept() -> None:
    params = SamplingParams(seed=2**64 - 1)
    sampler = RequestSampler(params, vocab_size=8, prompt_ids=[1], eos_ids=NO_EOS)

    assert 2**64 - 1 == sampler.seed


def test_release_frees_committed_positions_and_changes_no_pick() -> None:
    params = SamplingParams(temperature=1.0, seed=4)
    sampler = RequestSampler(params, vocab_size=50, prompt_ids=[1], eos_ids=NO_EOS)
    logits_NV, tokens, tree = torch.zeros(1, 50), [1, 2, 3], DraftTree.root(3)
    before = sampler.choose(logits_NV, tokens, tree)
    old = sampler.noise.at(2)
    sampler.release(3)

    assert old is not sampler.noise.at(2)
    assert before == sampler.choose(logits_NV, tokens, tree)


# --- laws, for the rejection rule ---------------------------------------------------------------


@given(requests())
def test_a_node_s_law_is_the_softmax_of_its_warped_row(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    params = replace(params, temperature=params.temperature or 1.0)
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    laws = sampler.laws(logits_NV, token_ids, tree)

    assert len(tree) == len(laws)
    for node in range(len(tree)):
        prefix = [*token_ids, *tree.path_tokens(node)]
        row = logits_NV[node].tolist()
        warped = np.array(reference_warp(row, prefix, params, len(prompt), eos_ids), np.float64)
        law_V = laws[node]
        assert law_V is not None
        assert np.float32 == law_V.dtype
        np.testing.assert_allclose(
            np.exp(warped) / np.exp(warped).sum(), law_V, rtol=1e-6, atol=1e-12
        )
        assert np.array_equal(np.isneginf(warped), law_V == 0) or warped.min() < -80


def test_a_row_that_is_not_finite_has_no_law_and_costs_the_others_nothing() -> None:
    logits_NV = torch.zeros(3, VOCAB_SIZE)
    logits_NV[1, 2] = math.nan
    tree = DraftTree.root(0)
    tree.add(tree.add(0, 1, 0.5), 2, 0.25)
    params = SamplingParams(temperature=1.0, seed=1)
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=[0], eos_ids=NO_EOS)
    laws = sampler.laws(logits_NV, [0], tree)

    assert laws[1] is None
    assert [1 / 8] * 8 == laws[0].tolist() == laws[2].tolist()  # type: ignore[union-attr]


# --- the drafter's view -------------------------------------------------------------------------


def view_of(
    params: SamplingParams, token_ids: Sequence[int], vocabulary: DraftVocabulary | None
) -> Any:
    sampler = RequestSampler(
        params, vocab_size=VOCAB_SIZE, prompt_ids=token_ids[:2], eos_ids=frozenset({3})
    )
    return sampler.draft_view(token_ids, vocabulary)


@given(requests(), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, unique=True), st.data())
def test_draft_logits_are_warped_in_their_own_vocabulary(
    example: Example, ids: list[int], data: st.DataObject
) -> None:
    """As the plain twin does it, after every id is translated and unknown ones are left out."""
    params, prompt, token_ids, eos_ids, tree, _ = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    vocabulary = DraftVocabulary(np.array(ids), VOCAB_SIZE)
    view = sampler.draft_view(token_ids, vocabulary)
    path = tree.path_tokens(len(tree) - 1)
    logits_W = data.draw(logits_rows(1, len(ids)))[0]

    def translated(tokens: Sequence[int]) -> list[int]:
        return [ids.index(token) if token in ids else VOCAB_SIZE + token for token in tokens]

    stops = tuple(translated(params.stop_token_ids))
    bias = dict(zip(translated(list(params.logit_bias)), params.logit_bias.values(), strict=True))
    expected = reference_warp(
        logits_W.tolist(),
        translated([*token_ids, *path]),
        replace(params, stop_token_ids=stops, logit_bias=bias),
        len(prompt),
        frozenset(translated(sorted(eos_ids))),
    )
    before = logits_W.clone()
    warped_W = view.warp(logits_W, path)

    assert expected == warped_W.tolist() == view.warp(logits_W.numpy(), path).tolist()
    assert np.float32 == warped_W.dtype
    assert torch.equal(before, logits_W), "the caller's row is only read"


@given(requests())
def test_a_view_of_the_target_s_own_vocabulary_warps_as_the_target_does(example: Example) -> None:
    params, prompt, token_ids, eos_ids, tree, logits_NV = example
    sampler = RequestSampler(params, vocab_size=VOCAB_SIZE, prompt_ids=prompt, eos_ids=eos_ids)
    view = sampler.draft_view(token_ids, None)
    for node in range(len(tree)):
        path = tree.path_tokens(node)
        expected = sampler.warp(logits_NV[node], [*token_ids, *path])

        assert expected.tolist() == view.warp(logits_NV[node], path).tolist()


def test_a_view_shows_the_target_s_noise_at_the_child_s_position() -> None:
    params = SamplingParams(temperature=1.0, seed=9, choice=4)
    vocabulary = DraftVocabulary(np.array([6, 0, 3]), VOCAB_SIZE)
    token_ids = [0, 1, 2, 3, 4]
    for depth in range(3):
        noise_V = gumbel_vector(9, 4, len(token_ids) + depth, VOCAB_SIZE)

        assert noise_V.tolist() == view_of(params, token_ids, None).noise(depth).tolist()
        assert noise_V[[6, 0, 3]].tolist() == (
            view_of(params, token_ids, vocabulary).noise(depth).tolist()
        )
    assert len(token_ids) == view_of(params, token_ids, vocabulary).num_tokens


def test_a_greedy_view_has_no_noise_and_no_temperature() -> None:
    view = view_of(SamplingParams(top_k=1, logit_bias={1: 1.0}), [0, 1], None)
    logits_W = torch.arange(8.0)

    assert view.noise(0) is None
    assert [0, 2, 2, 3, 4, 5, 6, 7] == view.warp(logits_W, []).tolist()


def test_a_view_s_probabilities_are_the_softmax_of_its_warped_row() -> None:
    vocabulary = DraftVocabulary(np.array([5, 1, 2]), VOCAB_SIZE)
    view = view_of(SamplingParams(temperature=0.5, top_k=2), [0, 1], vocabulary)
    probs_W = view.probs(torch.log(torch.tensor([1.0, 2.0, 4.0])), [])

    assert np.float32 == probs_W.dtype
    np.testing.assert_allclose([0, 0.2, 0.8], probs_W, rtol=1e-6)


@pytest.mark.parametrize(
    "values", [[math.nan, 0, 0], [math.inf, 0, 0], [-math.inf] * 3], ids=["nan", "inf", "masked"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_logits_that_are_not_finite_propose_nothing(
    values: list[float], temperature: float
) -> None:
    vocabulary = DraftVocabulary(np.array([5, 1, 2]), VOCAB_SIZE)
    params = SamplingParams(temperature=temperature, top_p=0.5, presence_penalty=1.0)
    view = view_of(params, [0, 1, 2], vocabulary)

    assert [-np.inf] * 3 == view.warp(torch.tensor(values), []).tolist()
    assert [0, 0, 0] == view.probs(torch.tensor(values), []).tolist()
