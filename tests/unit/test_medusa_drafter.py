"""MEDUSA drafting: the best-first tree, one pass for a batch, and the states it waits for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.drafters.growth import Experience, Growth, Shape
from outrider.drafters.medusa import MedusaDrafter, grow
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.noise import gumbel_vector
from outrider.tree import DraftTree
from outrider.types import Verdict
from tests.draft_modules import random_drafter
from tests.draft_requests import BareRequest, bare_request
from tests.models import random_decoder

TEXT = [3, 1, 4]
VOCAB = 7
Rows = list[np.ndarray]


def rows_of(seed: int, num_heads: int) -> Rows:
    generator = np.random.default_rng(seed)
    return list((2 * generator.standard_normal((num_heads, VOCAB))).astype(np.float32))


def grown(rows: Rows, shape: Shape, params: SamplingParams | None = None) -> Growth:
    request = bare_request(TEXT, params, vocab_size=VOCAB)
    growth = Growth(request, shape, None, Experience.none())
    grow(growth, rows)
    return growth


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


# --- the tree -----------------------------------------------------------------------------------


@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.8]),
)
def test_the_tree_is_the_best_of_its_size_by_the_heads_joint_probability(
    seed: int, num_heads: int, width: int, max_nodes: int, temperature: float
) -> None:
    """Against all paths through every head's best tokens, sorted."""
    rows = rows_of(seed, num_heads)
    params = SamplingParams(temperature=temperature, seed=seed)
    log_probs = []
    for depth, row in enumerate(rows):
        wide = row.astype(np.float64)
        if temperature > 0:
            wide = wide / temperature + 0.5 * gumbel_vector(seed, 0, len(TEXT) + depth, VOCAB)
        log_probs.append(wide - np.logaddexp.reduce(wide))
    best_tokens = [np.argsort(-row, kind="stable")[:width].tolist() for row in log_probs]
    chance_of = {
        path: math.exp(sum(float(row[t]) for row, t in zip(log_probs, path, strict=False)))
        for depth in range(1, num_heads + 1)
        for path in itertools.product(*best_tokens[:depth])
    }
    falling = sorted(chance_of, key=lambda path: -chance_of[path])
    last = min(max_nodes, len(falling))
    if last < len(falling):
        assume(chance_of[falling[last - 1]] > 1.001 * chance_of[falling[last]])
    growth = grown(rows, Shape(width, max_nodes, num_heads), params)
    kept = growth.kept()

    assert set(falling[:last]) == paths(kept)
    assert [chance_of[tuple(kept.path_tokens(node))] for node in range(1, len(kept))] == (
        pytest.approx(kept.score[1:], rel=1e-3)
    )


def test_ties_keep_the_tree_whole() -> None:
    """All nodes tie: parents still come with their children, lower tokens first."""
    kept = grown([np.zeros(VOCAB, dtype=np.float32)] * 3, Shape(2, 5, 3)).kept()

    assert {(0,), (1,), (0, 0), (0, 1), (1, 0)} == paths(kept)
    certain = np.full(VOCAB, -np.inf, dtype=np.float32)
    certain[2] = 0
    assert {(2,), (2, 2)} == paths(grown([certain] * 3, Shape(2, 2, 3)).kept())


def test_no_more_candidates_are_made_than_the_tree_can_hold() -> None:
    growth = grown(rows_of(1, 5), Shape(3, 4, 5))

    assert 4 == growth.kept().num_drafted
    assert growth.tree.num_drafted <= 3 * 4


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_a_head_whose_logits_are_not_finite_ends_the_tree(accept: Any) -> None:
    rows = rows_of(1, 3)
    rows[1][0] = np.nan
    params = SamplingParams(temperature=0.8, seed=1, accept=accept)

    assert {1} == set(grown(rows, Shape(3, 9, 3), params).kept().depth[1:])
    rows[0][:] = np.inf
    assert 0 == grown(rows, Shape(3, 9, 3), params).kept().num_drafted


def test_under_rejection_all_nodes_are_fixed_guesses_that_look_at_no_noise() -> None:
    trees = [
        grown(
            rows_of(1, 3),
            Shape(3, 9, 3),
            SamplingParams(temperature=1.0, seed=seed, accept="rejection"),  # type: ignore[arg-type]
        ).kept()
        for seed in (1, 2)
    ]

    assert trees[0] == trees[1]
    assert {} == trees[0].drawn


# --- the drafter --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Decoder:
    return random_decoder(torch.float32)


def drafter_of(target: Decoder, *, depth: int = 3, use_tree: bool = True) -> MedusaDrafter:
    config = SpeculationConfig(method=Method.MEDUSA, head="-", max_draft_len=depth)
    if use_tree:
        config = replace(
            config, use_dynamic_tree=True, dynamic_tree_max_topK=4, max_total_draft_tokens=10
        )
    drafter = random_drafter(Method.MEDUSA, target, config, max_batch_size=3)
    assert isinstance(drafter, MedusaDrafter)
    return drafter


def requests_of(count: int) -> list[BareRequest]:
    return [bare_request([5, 6, 7 + i], vocab_size=331, request_id=i) for i in range(count)]


def hand_over(drafter: MedusaDrafter, request: BareRequest, states_TD: torch.Tensor) -> None:
    verdict = Verdict((), (request.token_ids[-1],), 0)
    drafter.observe([request], [DraftTree.root(0)], [verdict], [states_TD])


def test_the_newest_state_counts_and_one_pass_serves_the_batch(target: Decoder) -> None:
    generator = torch.Generator().manual_seed(3)
    states_BTD = torch.randn(3, 4, target.config.hidden_size, generator=generator)
    together, alone = drafter_of(target), drafter_of(target)
    requests = requests_of(3)
    for request, states_TD in zip(requests, states_BTD, strict=True):
        hand_over(together, request, states_TD)
        hand_over(alone, request, states_TD[-1:])
    trees = together.propose(requests, [9, 2, 1])

    assert (FINAL_STATE,) == together.captures
    assert 1 == together.num_passes
    assert [10, 10, 4] == [tree.num_drafted for tree in trees]
    assert all(max(tree.depth) <= depth for tree, depth in zip(trees, (3, 2, 1), strict=True))
    assert [tree.token for tree in trees] == [
        alone.propose([request], [depth])[0].token
        for request, depth in zip(requests, (9, 2, 1), strict=True)
    ]


def test_a_request_without_a_state_or_without_depth_gets_its_root_alone(target: Decoder) -> None:
    drafter = drafter_of(target)
    known, new = requests_of(2)
    hand_over(drafter, known, torch.zeros(1, target.config.hidden_size))

    assert [0, 0] == [tree.num_drafted for tree in drafter.propose([known, new], [0, 5])]
    assert 0 == drafter.num_passes
    assert [10, 0] == [tree.num_drafted for tree in drafter.propose([known, new], [5, 5])]


def test_no_tree_is_deeper_than_there_are_heads(target: Decoder) -> None:
    drafter = drafter_of(target, depth=8, use_tree=False)
    (request,) = requests_of(1)
    hand_over(drafter, request, torch.ones(1, target.config.hidden_size))
    (tree,) = drafter.propose([request], [8])

    assert tree.is_chain
    assert 3 == tree.num_drafted


def test_a_chain_takes_each_heads_best_token(target: Decoder) -> None:
    drafter = drafter_of(target, use_tree=False)
    (request,) = requests_of(1)
    state_RD = torch.ones(1, target.config.hidden_size)
    hand_over(drafter, request, state_RD)
    best = [int(logits_RV.argmax()) for logits_RV in drafter.heads.forward(state_RD, 3)]

    assert best == drafter.propose([request], [8])[0].token[1:]


def test_a_released_request_is_forgotten(target: Decoder) -> None:
    drafter = drafter_of(target)
    (request,) = requests_of(1)
    hand_over(drafter, request, torch.ones(1, target.config.hidden_size))
    drafter.propose([request], [5])
    drafter.release(request)
    drafter.release(request)  # as after an abort

    assert 0 == drafter.propose([request], [5])[0].num_drafted


def test_verdicts_move_the_scores(target: Decoder) -> None:
    drafter = drafter_of(target)
    (request,) = requests_of(1)
    states_TD = torch.ones(1, target.config.hidden_size)
    hand_over(drafter, request, states_TD)
    scores = []
    for _ in range(12):
        (tree,) = drafter.propose([request], [5])
        scores.append(tree.score[1])
        verdict = Verdict((1,), (tree.token[1], 0), tree.num_drafted)
        drafter.observe([request], [tree], [verdict], [states_TD])

    assert scores == sorted(scores)
    assert scores[-1] > 2 * scores[0]
