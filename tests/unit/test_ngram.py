from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import SpeculationConfig
from outrider.drafters.ngram import Calibration, ContextIndex, Evidence, NgramDrafter
from outrider.tree import DraftTree
from outrider.types import Verdict

CHAIN = SpeculationConfig(max_draft_len=6)
TREE = SpeculationConfig(max_draft_len=6, use_dynamic_tree=True, max_total_draft_tokens=12)
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@dataclass
class Request:
    """A request as a drafter sees it; the n-gram drafter never asks for the sampler."""

    request_id: int
    token_ids: list[int]
    sampler: Any = None
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)


def verdict_on(tree: DraftTree, future: Sequence[int]) -> Verdict:
    """What a target does that is going to write ``future``."""
    children = tree.children()
    path, tokens, node = [], [], 0
    for token in future:
        tokens.append(token)
        if token not in children[node]:
            break
        node = children[node][token]
        path.append(node)
    return Verdict(tuple(path), tuple(tokens[: len(path) + 1]), tree.num_drafted)


def step(drafter: NgramDrafter, request: Request, future: Sequence[int]) -> Verdict:
    """One draft and verify step; the request grows by the emitted tokens."""
    tree = drafter.propose([request], [len(future)])[0]
    verdict = verdict_on(tree, future)
    request.token_ids.extend(verdict.tokens)
    drafter.observe([request], [tree], [verdict], [None])
    return verdict


def propose_one(drafter: NgramDrafter, tokens: list[int], max_depth: int = 128) -> DraftTree:
    """A tree for a request that lives for this proposal only."""
    request = Request(-1, tokens)
    tree = drafter.propose([request], [max_depth])[0]
    drafter.release(request)
    return tree


def earlier_ends(tokens: Sequence[int], context: Sequence[int]) -> list[int]:
    """Brute force: where the context ends in ``tokens`` with a token after it."""
    size = len(context)
    return [
        end
        for end in range(size - 1, len(tokens) - 1)
        if list(tokens[end - size + 1 : end + 1]) == list(context)
    ]


# --- the index against brute force -----------------------------------------------------------


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_matches_are_all_earlier_occurrences_of_every_suffix(
    tokens: list[int], context: list[int], max_match: int
):
    """Lone occurrences are given once, at the longest suffix that has one."""
    index = ContextIndex(max_match, 1, 32)
    index.extend(tokens)
    for query in (context, tokens):
        by_length = {
            size: ends
            for size in range(1, min(max_match, len(query)) + 1)
            if (ends := earlier_ends(tokens, query[-size:]))
        }
        longest = max(by_length, default=0)
        expected = [
            (size, by_length[size])
            for size in sorted(by_length, reverse=True)
            if len(by_length[size]) > 1 or size == longest
        ]

        assert expected == index.matches(query)


@given(TOKENS, st.lists(st.integers(0, 6), max_size=10))
def test_growing_by_any_pieces_gives_the_same_index(tokens: list[int], sizes: list[int]):
    whole, pieces = ContextIndex(6, 1, 32), ContextIndex(6, 1, 32)
    whole.extend(tokens)
    rest = list(tokens)
    for size in [*sizes, len(tokens)]:
        pieces.extend(rest[:size])
        rest = rest[size:]

    assert whole._root == pieces._root
    assert whole.tokens == pieces.tokens


@given(TOKENS, st.integers(1, 5), st.integers(1, 3), st.integers(1, 8))
def test_candidates_carry_the_true_counts(
    tokens: list[int], width: int, min_match: int, max_occurrences: int
):
    """Each one's evidence is recounted; the longest match's continuations come first, all."""
    index = ContextIndex(8, min_match, max_occurrences)
    index.extend(tokens)
    found = index.candidates(tokens, width)
    seen: list[int] = []
    for rank, (token, evidence) in enumerate(found):
        ends = earlier_ends(tokens, tokens[-evidence.match_len :])[-max_occurrences:]
        counts = Counter(tokens[end + 1] for end in ends if tokens[end + 1] not in seen)

        assert Evidence(rank, evidence.match_len, counts[token], counts.total()) == evidence
        assert max(counts.values()) == counts[token]
        seen.append(token)
    lengths = [candidate.evidence.match_len for candidate in found]
    matched = [n for n in range(1, min(8, len(tokens)) + 1) if earlier_ends(tokens, tokens[-n:])]
    longest = max(matched, default=0)

    assert len(set(seen)) == len(seen) <= width
    assert sorted(lengths, reverse=True) == lengths
    assert bool(found) == (longest >= min_match)
    if found:
        recent = earlier_ends(tokens, tokens[-longest:])[-max_occurrences:]
        continuations = {tokens[end + 1] for end in recent}
        from_longest = {token for token, evidence in found if evidence.match_len == longest}

        assert from_longest == continuations or len(found) == width


def test_equally_frequent_continuations_are_ranked_by_recency():
    index = ContextIndex(4, 1, 32)
    index.extend([7, 1, 7, 2, 7, 3, 7])

    assert [3, 2, 1] == [candidate.token for candidate in index.candidates([7], 3)]


def test_shorter_contexts_add_what_the_longest_match_does_not_know():
    index = ContextIndex(4, 1, 32)
    index.extend([5, 7, 1, 6, 7, 2, 6, 7, 3, 5, 7])
    found = index.candidates(index.tokens, 4)

    assert (1, Evidence(0, 2, 1, 1)) == found[0]
    assert [3, 2] == [candidate.token for candidate in found[1:]]
    assert Evidence(1, 1, 1, 2) == found[1].evidence


def test_a_shorter_context_is_asked_when_it_occurred_twice_as_often():
    index = ContextIndex(4, 1, 32)
    index.extend([6, 7, 1, 6, 7, 1, 8, 7, 2])

    assert [1] == [candidate.token for candidate in index.candidates([6, 7], 3)]
    index.extend([9, 7, 3, 0])
    assert [1, 3, 2] == [candidate.token for candidate in index.candidates([6, 7], 3)]


class SlicedFromTheEnd(list):
    """Tokens that may only be read from where the drafter has not read yet."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        assert isinstance(key, slice)
        assert key.start == self.num_read
        self.num_read = len(self)
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        raise AssertionError("the whole text was scanned")


def test_a_step_reads_only_the_new_tokens():
    drafter = NgramDrafter(CHAIN)
    request = Request(0, SlicedFromTheEnd([1, 2, 3] * 50))
    drafter.admit(request)
    for new in ([1], [2, 3, 1], [2], [3, 1, 2, 3]):
        request.token_ids.extend(new)
        tree = drafter.propose([request], [6])[0]

        assert new[-1] == tree.token[0]


# --- trees -----------------------------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn) -> SpeculationConfig:
    """Chains and trees of every shape."""
    depth = draw(st.integers(1, 8))
    branching = draw(st.integers(1, 4))
    return SpeculationConfig(
        max_draft_len=depth,
        use_dynamic_tree=draw(st.booleans()) or branching > 1,
        dynamic_tree_max_topK=branching,
        max_total_draft_tokens=draw(st.integers(depth, branching * depth)),
    )


@given(configs(), TOKENS, st.integers(0, 10), st.lists(st.integers(0, 3), max_size=30))
def test_every_tree_is_valid(
    config: SpeculationConfig, tokens: list[int], max_depth: int, future: list[int]
):
    """At each step of a generation: shape, order, scores and limits."""
    assert config.dynamic_tree_max_topK is not None
    drafter = NgramDrafter(config, max_match=6)
    request = Request(0, tokens)
    drafter.admit(request)
    while future:
        tree = drafter.propose([request], [max_depth])[0]
        children = tree.children()  # asserts distinct siblings
        scores = torch.tensor(tree.score, dtype=torch.float32)

        assert request.token_ids[-1] == tree.token[0]
        assert [-1, 0, 1.0] == [tree.parent[0], tree.depth[0], tree.score[0]]
        assert tree.num_drafted <= (config.max_total_draft_tokens or 0)
        assert max(tree.depth) <= min(max_depth, config.max_draft_len)
        assert sorted(tree.score, reverse=True) == tree.score
        assert set(tree.token) <= set(request.token_ids)
        for node in range(1, len(tree)):
            parent = tree.parent[node]
            assert 0 <= parent < node
            assert tree.depth[parent] + 1 == tree.depth[node]
            assert 0.0 < scores[node] < scores[parent]
        for node, siblings in enumerate(children):
            assert len(siblings) <= config.dynamic_tree_max_topK
            assert sum(tree.score[child] for child in siblings.values()) < tree.score[node]
        verdict = verdict_on(tree, future)
        request.token_ids.extend(verdict.tokens)
        drafter.observe([request], [tree], [verdict], [None])
        future = future[len(verdict.tokens) :]


@given(TOKENS, st.integers(6, 24))
def test_a_smaller_tree_is_the_best_part_of_a_larger_one(tokens: list[int], budget: int):
    large = SpeculationConfig(max_draft_len=6, use_dynamic_tree=True, max_total_draft_tokens=24)
    small = SpeculationConfig(max_draft_len=6, use_dynamic_tree=True, max_total_draft_tokens=budget)
    expected = propose_one(NgramDrafter(large), tokens).best(budget, 6)

    assert expected == propose_one(NgramDrafter(small), tokens)


@given(TOKENS)
def test_a_tree_of_branching_one_is_the_chain(tokens: list[int]):
    narrow = SpeculationConfig(max_draft_len=6, use_dynamic_tree=True, dynamic_tree_max_topK=1)
    tree = propose_one(NgramDrafter(narrow), tokens)

    assert propose_one(NgramDrafter(CHAIN), tokens) == tree
    assert list(range(-1, tree.num_drafted)) == tree.parent


@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_a_request_without_a_match_or_depth_gets_the_root_alone(config: SpeculationConfig):
    drafter = NgramDrafter(config)

    assert DraftTree.root(4) == propose_one(drafter, [1, 2, 3, 4])
    assert DraftTree.root(9) == propose_one(drafter, [9])
    assert DraftTree.root(1) == propose_one(drafter, [1, 1, 1], max_depth=0)


def test_requests_of_unequal_length_and_depth_come_and_go():
    drafter = NgramDrafter(TREE)
    first, second = Request(1, [1, 2, 1, 2, 1]), Request(2, [3, 4, 5, 3, 4, 5, 3])
    drafter.admit(first)
    trees = drafter.propose([first, second], [3, 1])  # the second was never admitted

    assert [1, 2, 1, 2] == trees[0].token[:1] + trees[0].path_tokens(3)
    assert ([3, 4], [0, 1]) == (trees[1].token, trees[1].depth)
    second.token_ids += [4]
    drafter.observe([second], trees[1:], [Verdict((1,), (4, 9), 1)], [None])
    drafter.release(first)
    drafter.release(first)
    drafter.observe([first], trees[:1], [Verdict((), (7,), 3)], [None])  # ended in this very step

    assert [4, 5, 3] == drafter.propose([second], [2])[0].token[:3]
    assert 1 == len(drafter._requests)


# --- what is predicted -----------------------------------------------------------------------


@pytest.mark.parametrize("config", [CHAIN, TREE])
def test_a_loop_is_predicted_past_the_end_of_the_text(config: SpeculationConfig):
    tree = propose_one(NgramDrafter(config), [1, 2, 3, 1, 2, 3, 1])
    deepest = max(range(len(tree)), key=tree.depth.__getitem__)

    assert [2, 3, 1, 2, 3, 1] == tree.path_tokens(deepest)


def test_copying_the_prompt_is_predicted():
    """An answer that repeats its input: only its first token is a surprise."""
    text = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:120].tolist()
    drafter, request = NgramDrafter(CHAIN), Request(0, [*text, 999])
    drafter.admit(request)
    num_steps = num_emitted = 0
    while num_emitted < len(text):
        num_emitted += len(step(drafter, request, text[num_emitted:]).tokens)
        num_steps += 1

    assert 1 + -(-119 // 7) == num_steps  # six accepted and one bonus token a step


def test_a_copy_with_one_word_changed_is_resumed_two_tokens_later():
    source = list(range(20))
    tree = propose_one(NgramDrafter(CHAIN), [*source, 50, *source[:8], 99, 9])

    assert [10, 11, 12, 13, 14, 15] == tree.token[1:]


def test_a_context_reaches_from_the_text_into_the_path():
    """After 5 6 comes 1, and after 5 6 1 comes 2, though 1 was last followed by 3."""
    tree = propose_one(NgramDrafter(CHAIN), [5, 6, 1, 2, 7, 6, 1, 3, 5, 6])

    assert [1, 2] == tree.token[1:3]


def test_a_tree_holds_several_continuations_where_a_chain_must_choose():
    tokens = [7, 1, 2, 7, 3, 4, 7]
    tree, chain = propose_one(NgramDrafter(TREE), tokens), propose_one(NgramDrafter(CHAIN), tokens)

    assert {1, 3} == set(tree.children()[0])
    assert {3} == set(chain.children()[0])


def test_the_majority_wins_over_the_most_recent():
    tree = propose_one(NgramDrafter(CHAIN), [7, 1, 7, 1, 7, 1, 7, 2, 7])

    assert 1 == tree.token[1]


def test_the_longest_match_wins_over_the_more_frequent_continuation():
    tokens = [5, 6, 7, 1, 8, 7, 2, 9, 7, 2, 5, 6, 7]

    assert 1 == propose_one(NgramDrafter(CHAIN), tokens).token[1]


def test_min_match_forbids_drafting_from_less():
    tokens = [5, 7, 1, 6, 7]

    assert 1 == propose_one(NgramDrafter(CHAIN, min_match=1), tokens).token[1]
    assert 0 == propose_one(NgramDrafter(CHAIN, min_match=2), tokens).num_drafted


# --- calibration -----------------------------------------------------------------------------


def test_confidence_rises_where_proposals_hold_and_falls_where_they_do_not():
    """It ends near the true rate: 1 and 0 here."""
    text = [1, 2, 3, 1]
    scores: dict[bool, list[float]] = {True: [], False: []}
    for is_right in (True, False):
        drafter = NgramDrafter(CHAIN)
        for request_id in range(200):
            request = Request(request_id, [*text])
            scores[is_right].append(propose_one(drafter, text, max_depth=1).score[1])
            step(drafter, request, [2 if is_right else 9])
            drafter.release(request)

    assert sorted(scores[True]) == scores[True]
    assert sorted(scores[False], reverse=True) == scores[False]
    assert scores[True][-1] > 0.95
    assert scores[False][-1] < 0.05


def test_confidence_is_the_rate_of_acceptance():
    """A target that goes on with 2 in three of four cases and with 3 else, in a fixed order."""
    drafter, text = NgramDrafter(TREE), [1, 3, 8, 1, 2, 9, 1]
    for request_id in range(400):
        request = Request(request_id, [*text])
        step(drafter, request, [3 if request_id % 4 == 0 else 2])
        drafter.release(request)
    tree = propose_one(drafter, text, max_depth=1)

    assert pytest.approx(0.75, abs=0.03) == tree.score[tree.token.index(2)]
    assert pytest.approx(0.25, abs=0.03) == tree.score[tree.token.index(3)]


def test_a_chain_changes_its_choice_when_the_other_candidate_turns_out_right():
    drafter, text = NgramDrafter(CHAIN), [1, 3, 8, 1, 2, 9, 1]
    before = propose_one(drafter, text, max_depth=1).token[1]
    for request_id in range(50):
        request = Request(request_id, [*text])
        step(drafter, request, [3])
        drafter.release(request)

    assert (2, 3) == (before, propose_one(drafter, text, max_depth=1).token[1])


def test_every_emitted_token_is_learned_from_once():
    drafter, request = NgramDrafter(CHAIN), Request(0, [1, 2, 3, 4, 5, 1])
    tree = drafter.propose([request], [4])[0]
    verdict = verdict_on(tree, [2, 3, 4, 5, 1])
    request.token_ids.extend(verdict.tokens)
    for _ in range(2):  # the second time there is no proposal to judge
        drafter.observe([request], [tree], [verdict], [None])

        assert 4 == sum(drafter._calibration._table._trials.values())
        assert 4 == sum(drafter._calibration._table._hits.values())


def test_hopeless_nodes_are_not_drafted_however_long_the_chain_may_be():
    config = SpeculationConfig(max_draft_len=128)
    drafter, text = NgramDrafter(config), [1, 2, 3] * 20
    confident = propose_one(drafter, text)
    for request_id in range(300):
        step(drafter, Request(request_id, [*text]), [9])
    doubtful = propose_one(drafter, text)

    assert 128 == confident.num_drafted > doubtful.num_drafted > 0
    assert 1e-6 <= doubtful.score[-1]


def test_confidence_follows_a_change_of_workload():
    calibration, evidence = Calibration(), Evidence(0, 3, 1, 1)
    for _ in range(5_000):
        calibration.record(evidence, True)
    for _ in range(600):
        calibration.record(evidence, False)

    assert calibration.chance(evidence) < 0.5


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 64), st.booleans()), max_size=50),
    st.integers(1, 64),
    st.integers(1, 32),
)
def test_a_chance_is_strictly_between_0_and_1(trials, match_len: int, num_same: int):
    calibration = Calibration()
    for rank, length, is_right in trials:
        calibration.record(Evidence(rank, length, num_same, num_same), is_right)
    for rank, num_total in itertools.product(range(5), (num_same, num_same + 1, 64)):
        assert 0.0 < calibration.chance(Evidence(rank, match_len, num_same, num_total)) < 1.0


def test_before_anything_was_seen_more_evidence_means_more_confidence():
    chance = Calibration().chance

    assert chance(Evidence(0, 1, 1, 1)) < chance(Evidence(0, 4, 1, 1))
    assert chance(Evidence(0, 4, 1, 1)) < chance(Evidence(0, 4, 3, 3))
    assert chance(Evidence(0, 4, 1, 3)) < chance(Evidence(0, 4, 2, 3))
    assert chance(Evidence(1, 4, 1, 1)) < chance(Evidence(0, 4, 1, 1))


def run_all(drafter: NgramDrafter, texts: Sequence[list[int]]) -> list[DraftTree]:
    """Generate each text's second half from its first; returns every tree proposed."""
    trees = []
    for request_id, text in enumerate(texts):
        half = len(text) // 2 + 1
        request, future = Request(request_id, text[:half]), text[half:]
        drafter.admit(request)
        while future:
            tree = drafter.propose([request], [len(future)])[0]
            verdict = verdict_on(tree, future)
            request.token_ids.extend(verdict.tokens)
            drafter.observe([request], [tree], [verdict], [None])
            future = future[len(verdict.tokens) :]
            trees.append(tree)
        drafter.release(request)
    return trees


@given(st.lists(TOKENS, min_size=1, max_size=4))
def test_the_same_history_gives_the_same_trees(texts: list[list[int]]):
    assert run_all(NgramDrafter(TREE), texts) == run_all(NgramDrafter(TREE), texts)


@given(st.lists(TOKENS, min_size=1, max_size=3), TOKENS)
def test_nothing_of_a_released_request_is_left_but_counts(texts: list[list[int]], tokens):
    """The next request, though it reuses an id, is drafted from its own tokens alone."""
    shifted = [[token + 10 for token in text] for text in texts]
    drafter = NgramDrafter(TREE)
    run_all(drafter, shifted)

    assert {} == drafter._requests
    tree = drafter.propose([Request(0, tokens)], [6])[0]
    fresh = propose_one(NgramDrafter(TREE), tokens)
    assert set(tree.token) <= set(tokens)
    assert fresh.num_drafted == tree.num_drafted


@given(TOKENS, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 12))
def test_learning_does_not_depend_on_what_the_budget_cut_off(tokens, future, num_kept: int):
    """The emitted tokens tell about every candidate on their way, drafted or not."""
    learned = []
    for limit in (12, num_kept):
        drafter, request = NgramDrafter(TREE), Request(0, [*tokens])
        tree = drafter.propose([request], [6])[0].best(limit, 6)
        verdict = verdict_on(tree, future)
        request.token_ids.extend(verdict.tokens)
        drafter.observe([request], [tree], [verdict], [None])
        learned.append((verdict.tokens, drafter._calibration._table.__dict__))
    (tokens_full, full), (tokens_cut, cut) = learned

    assert tokens_full[: len(tokens_cut)] == tokens_cut
    if tokens_full == tokens_cut:
        assert full == cut


# --- DraftTree.best ------------------------------------------------------------------------


@st.composite
def small_trees(draw: st.DrawFn) -> DraftTree:
    """Up to eight nodes whose scores fall along every path."""
    tree = DraftTree.root(0)
    for token in range(1, draw(st.integers(0, 8)) + 1):
        parent = draw(st.integers(0, len(tree) - 1))
        tree.add(parent, token, tree.score[parent] * draw(st.sampled_from([0.25, 0.5, 0.75])))
    return tree


@given(small_trees(), st.integers(0, 8), st.integers(0, 5))
def test_best_is_the_heaviest_set_that_is_closed_under_parents(
    tree: DraftTree, max_nodes: int, max_depth: int
):
    """Against all subsets; among equally heavy ones it takes the earlier nodes."""
    allowed = [node for node in range(1, len(tree)) if tree.depth[node] <= max_depth]
    closed = [
        nodes
        for size in range(min(max_nodes, len(allowed)) + 1)
        for nodes in itertools.combinations(allowed, size)
        if all(tree.parent[node] in (0, *nodes) for node in nodes)
    ]
    heaviest = max(sum(tree.score[node] for node in nodes) for nodes in closed)
    best = tree.best(max_nodes, max_depth)

    assert pytest.approx(heaviest) == sum(best.score[1:])
    assert best.num_drafted <= max_nodes
    assert max(best.depth) <= max_depth
    paths = {(*tree.path_tokens(node),) for node in range(len(tree))}
    assert {(*best.path_tokens(node),) for node in range(len(best))} <= paths
