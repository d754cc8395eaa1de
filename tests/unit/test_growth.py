"""The growth of draft trees: which candidates there are, what they score, which are kept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.config import SamplingParams, SpeculationConfig
from outrider.drafters.calibration import NOISE_WEIGHTS
from outrider.drafters.growth import Experience, Growth, Shape
from outrider.noise import gumbel_vector
from outrider.tree import DraftTree
from outrider.vocabulary import DraftVocabulary
from tests.draft_requests import bare_request

TEXT = [3, 1, 4, 1]
VOCAB = 9
Logits = Callable[[Sequence[int]], np.ndarray]
"""The draft logits after a path of the target's ids."""


def lively(seed: int, size: int = VOCAB) -> Logits:
    """Logits without ties, a function of the path."""

    def logits_of(path: Sequence[int]) -> np.ndarray:
        generator = np.random.default_rng([seed, len(path), *path])
        return (2 * generator.standard_normal(size)).astype(np.float32)

    return logits_of


def grown(
    logits_of: Logits,
    shape: Shape,
    params: SamplingParams | None = None,
    *,
    vocabulary: DraftVocabulary | None = None,
    experience: Experience | None = None,
    min_score: float = 0.0,
    **more: Any,
) -> Growth:
    """A growth driven to its end, as the autoregressive drafter does."""
    request = bare_request(TEXT, params, vocab_size=VOCAB, **more)
    growth = Growth(request, shape, vocabulary, experience or Experience.none())
    nodes = [0]
    while nodes:
        growth.extend(nodes, [logits_of(growth.tree.path_tokens(node)) for node in nodes])
        nodes = growth.frontier(min_score)
    return growth


def ranks(growth: Growth) -> list[float]:
    return [growth.rank(node) for node in range(len(growth.tree))]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.path_tokens(node)) for node in range(1, len(tree))]


# --- what is kept -------------------------------------------------------------------------------


def closed_subsets(tree: DraftTree, size: int) -> list[tuple[int, ...]]:
    """All sets of so many nodes that hold the parent of each of theirs, the root implied."""
    return [
        nodes
        for nodes in itertools.combinations(range(1, len(tree)), size)
        if all(tree.parent[node] in (0, *nodes) for node in nodes)
    ]


@given(
    st.lists(
        st.lists(st.sampled_from([-np.inf, 0.0, 0.0, 1.0, 1.5, 30.0]), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(1, 4), (2, 3), (3, 2), (4, 1)]),
    st.integers(1, 12),
)
def test_the_kept_nodes_are_the_best_closed_set_of_their_number(
    rows: list[list[float]], width_and_depth: tuple[int, int], max_nodes: int
) -> None:
    """Against a search over all of them; rows with ties, masks and near-certain tokens."""
    width, depth = width_and_depth

    def logits_of(path: Sequence[int]) -> np.ndarray:
        row = rows[sum((place + 1) * token for place, token in enumerate(path)) % len(rows)]
        return np.array([*row, *[-np.inf] * (VOCAB - 4)], dtype=np.float32)

    growth = grown(logits_of, Shape(width, max_nodes, depth))
    candidates, rank, kept = growth.tree, ranks(growth), growth.kept()
    num_kept = min(max_nodes, candidates.num_drafted)
    best = max(
        sum(math.exp(rank[node]) for node in nodes)
        for nodes in closed_subsets(candidates, num_kept)
    )
    order = sorted(range(1, len(candidates)), key=lambda node: (-rank[node], node))
    places = {path: node for node, path in enumerate(paths(candidates), start=1)}

    assert sorted(order[:num_kept]) == [places[path] for path in paths(kept)]
    assert best == pytest.approx(sum(math.exp(rank[places[path]]) for path in paths(kept)))


def test_ties_go_to_lower_tokens_and_earlier_nodes() -> None:
    growth = grown(lambda _: np.zeros(VOCAB, dtype=np.float32), Shape(2, 3, 3))
    third_layer = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]

    assert [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), *third_layer] == paths(growth.tree)
    assert [(0,), (1,), (0, 0)] == paths(growth.kept())


# --- the dynamic tree ---------------------------------------------------------------------------


def eagle2(
    log_probs_of: Logits, width: int, depth: int, max_nodes: int
) -> tuple[dict[tuple[int, ...], float], set[tuple[int, ...]]]:
    """Plain dynamic tree (Li et al. 2024): all candidates by path with their ranks, and the kept.

    Each layer takes the best ``width`` continuations of each of its nodes; of those ``width`` x
    ``width``, the best by cumulative log-probability make the next layer; in the end the best of
    all candidates are kept.
    """
    candidates: dict[tuple[int, ...], float] = {}
    layer = {(): 0.0}
    for _ in range(depth):
        found = {}
        for path, rank in layer.items():
            log_probs = log_probs_of(path)
            for token in np.argsort(-log_probs, kind="stable")[:width].tolist():
                found[*path, token] = rank + float(log_probs[token])
        candidates |= found
        layer = dict(sorted(found.items(), key=lambda item: -item[1])[:width])
    kept = sorted(candidates.items(), key=lambda item: -item[1])[:max_nodes]
    return candidates, {path for path, _ in kept}


@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_a_tree_grows_as_published(
    seed: int, width: int, depth: int, max_nodes: int, temperature: float
) -> None:
    """On log-probabilities of the logits, above temperature 0 with half of the noise added."""
    params = SamplingParams(temperature=temperature, seed=seed)
    logits_of = lively(seed)

    def log_probs_of(path: Sequence[int]) -> np.ndarray:
        row = logits_of(path).astype(np.float64)
        if temperature > 0:
            row = row / temperature + 0.5 * gumbel_vector(seed, 0, len(TEXT) + len(path), VOCAB)
        return row - np.logaddexp.reduce(row)

    candidates, kept = eagle2(log_probs_of, width, depth, max_nodes)
    falling = sorted(candidates.values())
    assume(all(later - earlier > 1e-4 for earlier, later in itertools.pairwise(falling)))
    growth = grown(logits_of, Shape(width, max_nodes, depth), params)
    rank_of = dict(zip(paths(growth.tree), ranks(growth)[1:], strict=True))

    assert candidates.keys() == rank_of.keys()
    assert candidates == pytest.approx(rank_of, abs=1e-4)
    assert kept == set(paths(growth.kept()))


def test_a_layer_is_grown_from_its_best_nodes_only() -> None:
    growth = grown(lively(1), Shape(3, 99, 3))

    assert [1, 3, 9, 9] == [growth.tree.depth.count(depth) for depth in range(4)]


def test_the_shape_is_the_configurations() -> None:
    tree = SpeculationConfig(
        max_draft_len=3, use_dynamic_tree=True, dynamic_tree_max_topK=4, max_total_draft_tokens=9
    )

    assert Shape(4, 9, 3) == Shape.of(tree)
    assert Shape(1, 5, 5) == Shape.of(SpeculationConfig(max_draft_len=5))


@pytest.mark.parametrize("width", [1, 4])
def test_no_node_is_deeper_than_allowed(width: int) -> None:
    growth = grown(lively(1), Shape(width, 99, 1))

    assert width == growth.kept().num_drafted
    assert [1] * width == growth.kept().depth[1:]


# --- scores -------------------------------------------------------------------------------------

EXTREME = st.sampled_from([-3e38, -1e4, -50.0, 0.0, 0.0, 1.0, 60.0, 1e4, 3e38, -np.inf])


@given(
    st.lists(st.lists(EXTREME, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=3),
    st.sampled_from([(1, 40), (2, 6), (4, 3)]),
    st.sampled_from([0.0, 1e-3, 0.8, 100.0]),
    st.sampled_from(["coupled", "rejection"]),
    st.lists(st.booleans(), max_size=30),
)
def test_scores_are_chances_that_fall_along_every_path(
    rows: list[list[float]],
    width_and_depth: tuple[int, int],
    temperature: float,
    accept: Any,
    verdicts: list[bool],
) -> None:
    """Whatever the logits and the experience; ranks fall too."""
    width, depth = width_and_depth
    params = SamplingParams(temperature=temperature, seed=1, accept=accept)
    experience = Experience.none()
    arrays = [np.array(row, dtype=np.float32) for row in rows]

    def logits_of(path: Sequence[int]) -> np.ndarray:
        return arrays[len(path) % len(arrays)]

    for is_right in verdicts:
        growth = grown(logits_of, Shape(width, 99, 1), params, experience=experience)
        if growth.tree.num_drafted:
            token = growth.tree.token[1]
            growth.learn(growth.tree, [token if is_right else (token + 1) % VOCAB])
    growth = grown(logits_of, Shape(width, 99, depth), params, experience=experience)
    tree, rank = growth.tree, ranks(growth)

    assert all(0 < score <= 1 for score in tree.score)
    assert all(tree.score[n] <= tree.score[tree.parent[n]] for n in range(1, len(tree)))
    assert all(rank[n] <= rank[tree.parent[n]] for n in range(1, len(tree)))


def test_without_experience_a_score_is_the_paths_probability() -> None:
    growth = grown(lively(2), Shape(3, 99, 3))

    assert [math.exp(rank) for rank in ranks(growth)] == pytest.approx(growth.tree.score)


def test_experience_moves_the_scores_but_not_the_choice() -> None:
    experience = Experience.none()
    before = grown(lively(2), Shape(2, 4, 2), experience=experience)
    for _ in range(50):
        missed = (before.tree.token[1] + 1) % VOCAB
        grown(lively(2), Shape(1, 1, 1), experience=experience).learn(before.tree, [missed])
    after = grown(lively(2), Shape(2, 4, 2), experience=experience)

    assert paths(before.kept()) == paths(after.kept())
    assert after.tree.score[1] < before.tree.score[1]


def test_growth_stops_where_no_node_would_pay() -> None:
    shape = Shape(2, 99, 4)
    whole = grown(lively(3), shape)
    best_of = [
        max(s for s, d in zip(whole.tree.score, whole.tree.depth, strict=True) if d == depth)
        for depth in range(5)
    ]
    for depth in range(1, 4):
        growth = grown(lively(3), shape, min_score=1.0001 * best_of[depth])

        assert depth == max(growth.tree.depth)
        assert max(grown(lively(3), shape, min_score=best_of[depth]).tree.depth) > depth


# --- rows that offer less -----------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_rows_that_are_not_finite_propose_nothing(bad: str, width: int, accept: Any) -> None:
    params = SamplingParams(temperature=0.8, seed=1, accept=accept)
    row = np.zeros(VOCAB, dtype=np.float32)
    row[2] = {"nan": np.nan, "inf": np.inf, "nothing": 0}[bad]
    if bad == "nothing":
        row[:] = -np.inf
    nothing = grown(lambda _: row, Shape(width, 9, 3), params)
    good = lively(4)
    first_layer = grown(good, Shape(width, 9, 1), params)
    poor = grown(lambda path: row if path else good(path), Shape(width, 9, 3), params)

    assert [TEXT[-1]] == nothing.kept().token
    assert paths(first_layer.tree) == paths(poor.kept())


def test_one_bad_row_leaves_its_siblings_to_go_on() -> None:
    good = lively(4)
    whole = grown(good, Shape(2, 99, 2))
    bad = whole.tree.path_tokens(1)

    def logits_of(path: Sequence[int]) -> np.ndarray:
        return np.full(VOCAB, np.nan, dtype=np.float32) if list(path) == bad else good(path)

    growth = grown(logits_of, Shape(2, 99, 2))

    assert [path for path in paths(whole.tree) if path[:1] != tuple(bad) or len(path) == 1] == (
        paths(growth.tree)
    )


@pytest.mark.parametrize(
    ("filters", "num_children"), [({"top_k": 2}, 2), ({"top_p": 0.01}, 1), ({"min_p": 1.0}, 1)]
)
@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_what_the_filters_mask_is_not_drafted(
    filters: dict[str, Any], num_children: int, accept: Any
) -> None:
    """Under ``rejection``, nothing is left to draw where the fixed children are all there is."""
    params = SamplingParams(temperature=1.0, seed=1, accept=accept, **filters)
    growth = grown(lively(5), Shape(4, 99, 2), params)

    assert [num_children] * (1 + num_children) == [
        len(siblings)
        for siblings, depth in zip(growth.tree.children(), growth.tree.depth, strict=True)
        if depth < 2
    ]
    assert {} == growth.tree.drawn


# --- vocabulary and parameters ------------------------------------------------------------------

IDS = DraftVocabulary(np.array([7, 2, 8, 0, 5]), VOCAB)


@given(
    st.integers(0, 10**6), st.sampled_from([0.0, 0.9]), st.sampled_from(["coupled", "rejection"])
)
def test_a_reduced_vocabulary_drafts_what_the_full_one_would_with_the_rest_masked(
    seed: int, temperature: float, accept: Any
) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        accept=accept,
        top_p=0.95,
        repetition_penalty=1.4,
        logit_bias={7: 1.5, 3: 50.0},
    )
    small = lively(seed, IDS.size)

    def masked(path: Sequence[int]) -> np.ndarray:
        return IDS.scatter(small(path), -np.inf)

    reduced = grown(small, Shape(3, 7, 3), params, vocabulary=IDS)
    full = grown(masked, Shape(3, 7, 3), params)
    fixed = [node for node in range(len(reduced.tree)) if node not in reduced.tree.drawn]

    assert reduced.tree.parent == full.tree.parent
    assert [reduced.tree.token[n] for n in fixed] == [full.tree.token[n] for n in fixed]
    assert reduced.tree.score == pytest.approx(full.tree.score, rel=1e-4)
    assert set(reduced.tree.token[1:]) <= {*IDS.ids_W.tolist()}
    for node, law_V in reduced.tree.drawn.items():
        assert np.allclose(law_V, full.tree.drawn[node], atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"min_tokens": 2},
    ],
)
def test_a_greedy_chain_is_what_plain_decoding_of_the_draft_logits_emits(
    settings: dict[str, Any],
) -> None:
    """Penalties and forbidden ids follow the path: every row alone has one favourite token."""
    params = SamplingParams(max_tokens=9, **settings)
    row = np.array([3.0, 0.5, 2.5, 0, 2.0, 0, 1.5, 0, 0], dtype=np.float32)
    plain: list[int] = []
    sampler = bare_request(TEXT, params, vocab_size=VOCAB, eos_ids=frozenset({0})).sampler
    for _ in range(5):
        text = [*TEXT, *plain]
        plain += sampler.choose(torch.from_numpy(row)[None], text, DraftTree.root(text[-1]))
    growth = grown(lambda _: row, Shape(1, 5, 5), params, eos_ids=frozenset({0}))

    assert plain == growth.kept().token[1:]
    assert len(set(plain)) > 1


@pytest.mark.parametrize("weight", NOISE_WEIGHTS)
def test_the_noise_is_believed_as_far_as_experience_says(weight: float) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    experience = Experience.none()
    experience.noise_weight.at = lambda _: weight  # type: ignore[method-assign]
    growth = grown(lively(6), Shape(1, 1, 1), params, experience=experience)
    row = lively(6)([]) + weight * gumbel_vector(3, 0, len(TEXT), VOCAB)

    assert [int(row.argmax())] == growth.tree.token[1:]


# --- drawn nodes --------------------------------------------------------------------------------


def rejecting(seed: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, accept="rejection", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [None, IDS], ids=["full", "reduced"])
def test_a_chain_is_drawn_token_by_token(vocabulary: DraftVocabulary | None) -> None:
    """Each from the warped draft law after the tokens drawn before it."""
    logits_of = lively(7, VOCAB if vocabulary is None else vocabulary.size)
    growth = grown(logits_of, Shape(1, 4, 4), rejecting(1), vocabulary=vocabulary)
    tree = growth.kept()
    view = bare_request(TEXT, rejecting(1), vocab_size=VOCAB).sampler.draft_view(TEXT, vocabulary)

    assert tree.is_chain
    assert {1, 2, 3, 4} == tree.drawn.keys()
    for node, law_V in tree.drawn.items():
        path = tree.path_tokens(node)[:-1]
        probs = view.probs(logits_of(path), path)
        assert np.allclose(probs if vocabulary is None else vocabulary.scatter(probs, 0), law_V)
        assert 1 == pytest.approx(float(law_V.sum(dtype=np.float64)), abs=1e-6)


def test_a_trees_inner_nodes_have_one_drawn_leaf_beside_their_best() -> None:
    growth = grown(lively(8), Shape(3, 99, 3), rejecting(1))
    tree = growth.tree
    view = bare_request(TEXT, rejecting(1), vocab_size=VOCAB).sampler.draft_view(TEXT, None)
    children = tree.children()
    inner = [node for node in range(len(tree)) if children[node]]

    assert [1, 3, 6, 9] == [tree.depth.count(depth) for depth in range(4)]
    assert {node: tree.drawn_children()[node] for node in inner} == tree.drawn_children()
    for node in inner:
        path = tree.path_tokens(node)
        probs_V = view.probs(lively(8)(path), path)
        *fixed, drawn = children[node].values()
        fixed_tokens = [tree.token[child] for child in fixed]
        left_V = probs_V.copy()
        left_V[fixed_tokens] = 0
        law_V = tree.drawn[drawn]

        assert fixed_tokens == np.argsort(-probs_V, kind="stable")[:2].tolist()
        assert [0, 0] == law_V[fixed_tokens].tolist()
        assert np.allclose(left_V / left_V.sum(), law_V)
        assert not children[drawn]
        assert not tree.drawn.keys() & set(fixed)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.integers(1, 12))
def test_nothing_but_the_drawn_tokens_depends_on_the_draw(
    seed: int, width: int, max_nodes: int
) -> None:
    """Shape, scores and ranks are the same for every seed: pruning by them tells nothing."""
    experience = Experience.none()
    seen = []
    for draw in range(4):
        growth = grown(
            lively(seed), Shape(width, max_nodes, 3), rejecting(draw), experience=experience
        )
        tree, kept = growth.tree, growth.kept()
        fixed = [tree.token[n] for n in range(len(tree)) if n not in tree.drawn]
        seen.append(
            (
                tree.parent,
                sorted(tree.drawn),
                tree.score,
                ranks(growth),
                fixed,
                kept.parent,
                sorted(kept.drawn),
                kept.score,
            )
        )

    assert [seen[0]] * 4 == seen


def test_the_draw_depends_on_the_seed() -> None:
    """Without which the test above would show nothing."""
    for width in (1, 3):
        tokens = {
            tuple(growth.tree.token[node] for node in sorted(growth.tree.drawn))
            for growth in (grown(lively(9), Shape(width, 99, 3), rejecting(s)) for s in range(8))
        }

        assert len(tokens) > 2


# --- learning -----------------------------------------------------------------------------------


def test_candidates_that_were_pruned_are_judged_too() -> None:
    """A fixed guess is right or wrong whether it was verified or not."""
    experience = Experience.none()
    row = np.zeros(VOCAB, dtype=np.float32)
    before = grown(lambda _: row, Shape(3, 3, 1), experience=experience)
    before.learn(DraftTree.root(TEXT[-1]), [2])
    after = grown(lambda _: row, Shape(3, 3, 1), experience=experience)

    assert after.tree.score[1] < before.tree.score[1]
    assert after.tree.score[2] < before.tree.score[2]
    assert after.tree.score[3] > before.tree.score[3]


@pytest.mark.parametrize("width", [1, 3])
def test_a_drawn_draft_is_judged_only_where_it_was_verified(width: int) -> None:
    """Unverified, it is right when the target happens to draw the same: far less often."""

    def score_after(*, is_verified: bool) -> float:
        experience = Experience.none()
        growth = grown(lively(9), Shape(width, 9, 1), rejecting(1), experience=experience)
        (drawn,) = growth.tree.drawn
        verified = growth.tree if is_verified else growth.tree.keep(range(1, drawn))
        growth.learn(verified, [growth.tree.token[drawn]])
        again = grown(lively(9), Shape(width, 9, 1), rejecting(1), experience=experience)
        return again.tree.score[drawn] - growth.tree.score[drawn]

    assert score_after(is_verified=True) > 0
    assert 0 == score_after(is_verified=False)


def test_the_noise_is_judged_by_the_targets_first_pick_in_the_drafts_own_ids() -> None:
    experience = Experience.none()
    params = SamplingParams(temperature=1.0, seed=3)
    judged: list[tuple[float, int, int]] = []
    experience.noise_weight.record = (  # type: ignore[method-assign]
        lambda temperature, _row, _noise, pick, width: judged.append((temperature, pick, width))
    )
    for token in (8, 3):  # the draft's id 2, and one it does not have
        growth = grown(
            lively(9, IDS.size), Shape(2, 4, 2), params, vocabulary=IDS, experience=experience
        )
        growth.learn(growth.tree, [token])

    assert [(1.0, 2, 2)] == judged
