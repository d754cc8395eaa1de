"""A head and n-gram in one tree: the merge, its bounds, and who learns what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import Method, SamplingParams, SpeculationConfig
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.tree import DraftTree
from outrider.types import Verdict
from tests.draft_requests import BareRequest, bare_request
from tests.strategies import trees

VOCAB = 64
REPEATING = [1, 2, 3, 4, 5, 1, 2, 3]
"""N-gram goes on with 4, 5, 1."""
CONFIG = SpeculationConfig(
    method=Method.NGRAM,
    max_draft_len=3,
    use_dynamic_tree=True,
    dynamic_tree_max_topK=2,
    max_total_draft_tokens=6,
)


class FixedHead:
    """Proposes a given tree to every request and notes what it is told."""

    captures = (2, 5)
    num_passes = 7

    def __init__(self, build: Any) -> None:
        self.build = build
        self.calls: list[tuple[str, Any]] = []

    def admit(self, request) -> None:
        self.calls.append(("admit", request.request_id))

    def prefill(self, request, num_committed, hidden_TC) -> None:
        self.calls.append(("prefill", (request.request_id, num_committed, hidden_TC)))

    def propose(self, requests, max_depth, min_score=0.0) -> list[DraftTree]:
        self.calls.append(("propose", (list(max_depth), min_score)))
        return [self.build(request.token_ids[-1]) for request in requests]

    def observe(self, requests, trees, verdicts, hidden) -> None:
        self.calls.append(("observe", (list(trees), list(verdicts), list(hidden))))

    def release(self, request) -> None:
        self.calls.append(("release", request.request_id))


def two_guesses(root: int) -> DraftTree:
    """One that n-gram has too (4), with a child of its own, and one that it has not (9)."""
    tree = DraftTree.root(root)
    shared = tree.add(0, 4, 0.5)
    tree.add(0, 9, 0.4)
    tree.add(shared, 9, 0.3)
    return tree


def request_of(params: SamplingParams | None = None) -> BareRequest:
    return bare_request(REPEATING, params, vocab_size=VOCAB)


def combined(max_nodes: int, build: Any = two_guesses) -> tuple[CombinedDrafter, FixedHead]:
    head = FixedHead(build)
    return CombinedDrafter(head, NgramDrafter(CONFIG), max_nodes), head


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.path_tokens(node)): tree.score[node] for node in range(1, len(tree))}


def test_both_drafters_nodes_are_in_one_tree_without_duplicates() -> None:
    drafter, _ = combined(max_nodes=99)
    request = request_of()
    (tree,) = drafter.propose([request], [9])
    ours = paths(two_guesses(REPEATING[-1]))
    theirs = paths(NgramDrafter(CONFIG).propose([request], [9])[0])
    both = ours.keys() & theirs.keys()

    assert {(4,)} == both
    assert {path: max(ours.get(path, 0), theirs.get(path, 0)) for path in ours | theirs} == (
        paths(tree)
    )
    assert len(tree) == 1 + len(ours | theirs)


@given(trees(), st.integers(1, 9))
def test_the_best_nodes_of_both_stay(head_tree: DraftTree, max_nodes: int) -> None:
    head_tree.token[0] = REPEATING[-1]
    drafter, _ = combined(max_nodes, lambda _: head_tree)
    (whole,) = combined(99, lambda _: head_tree)[0].propose([request_of()], [9])
    (tree,) = drafter.propose([request_of()], [9])
    falling = sorted(whole.score[1:], reverse=True)

    assert falling[:max_nodes] == sorted(tree.score[1:], reverse=True)
    assert all(0 <= tree.parent[node] < node for node in range(1, len(tree)))
    assert paths(tree).items() <= paths(whole).items()
    assert len(tree) == len(paths(tree)) + 1


def test_a_request_under_rejection_gets_the_heads_tree_alone() -> None:
    rejecting = SamplingParams(temperature=0.8, seed=1, accept="rejection")  # type: ignore[arg-type]
    drafter, _ = combined(max_nodes=2)
    requests = [request_of(rejecting), request_of()]
    alone, merged = drafter.propose(requests, [9, 9])

    assert two_guesses(REPEATING[-1]) == alone
    assert alone != merged
    assert 2 == merged.num_drafted


def test_a_head_that_has_nothing_to_say_leaves_ngrams_tree() -> None:
    drafter, _ = combined(99, DraftTree.root)
    (expected,) = NgramDrafter(CONFIG).propose([request_of()], [2])
    (tree,) = drafter.propose([request_of()], [2])

    assert paths(expected) == paths(tree)
    assert 2 == max(tree.depth)


def test_the_head_is_told_everything_and_speaks_for_both() -> None:
    drafter, head = combined(6)
    request, hidden = request_of(), object()
    drafter.admit(request)
    drafter.prefill(request, 5, hidden)  # type: ignore[arg-type]
    (tree,) = drafter.propose([request], [9], 0.25)
    verdict = Verdict((), (4,), tree.num_drafted)
    drafter.observe([request], [tree], [verdict], [hidden])  # type: ignore[list-item]
    drafter.release(request)

    assert ((2, 5), 7) == (drafter.captures, drafter.num_passes)
    assert [
        ("admit", 0),
        ("prefill", (0, 5, hidden)),
        ("propose", ([9], 0.25)),
        ("observe", ([tree], [verdict], [hidden])),
        ("release", 0),
    ] == head.calls


@pytest.mark.parametrize("is_right", [True, False])
def test_ngram_learns_from_its_own_guesses(is_right: bool) -> None:
    """What it was right or wrong about moves its scores, though the head's were taken."""
    drafter, _ = combined(99, DraftTree.root)
    request = request_of()
    (before,) = drafter.propose([request], [1])
    for _ in range(20):
        (tree,) = drafter.propose([request], [1])
        token = tree.token[1] if is_right else 60
        drafter.observe([request], [tree], [Verdict((), (token,), 1)], [None])
    (after,) = drafter.propose([request], [1])

    assert is_right == (after.score[1] > before.score[1])
    assert after.score[1] != before.score[1]
