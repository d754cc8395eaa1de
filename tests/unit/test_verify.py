"""The walk: what is emitted is the target's pick at each node of one root-to-somewhere path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.tree import DraftTree
from outrider.types import Verdict
from outrider.verify import walk
from tests.strategies import trees

VOCAB_SIZE = 8


def bushy() -> DraftTree:
    """The tree of the module's drawing: 0 ── 1(a=10) ── 3(c=12), 0 ── 2(b=11) ── 4(d=13)."""
    tree = DraftTree.root(9)
    a, b = tree.add(0, 10, 0.6), tree.add(0, 11, 0.3)
    tree.add(a, 12, 0.5)
    tree.add(b, 13, 0.2)
    return tree


def test_a_root_alone_emits_the_plain_pick() -> None:
    assert Verdict(path=(), tokens=(5,), num_drafted=0) == walk(DraftTree.root(3), [5])


def test_a_pick_that_is_no_child_is_the_correction() -> None:
    verdict = walk(bushy(), [7, 12, 13, 1, 1])

    assert Verdict(path=(), tokens=(7,), num_drafted=4) == verdict


def test_a_whole_path_earns_the_bonus() -> None:
    verdict = walk(bushy(), [11, 12, 13, 1, 2])

    assert Verdict(path=(2, 4), tokens=(11, 13, 2), num_drafted=4) == verdict


def test_a_cousin_with_the_right_token_is_not_a_child() -> None:
    """Node 1 picks 13, which is a child of node 2: the walk must stop at node 1."""
    verdict = walk(bushy(), [10, 13, 13, 1, 2])

    assert Verdict(path=(1,), tokens=(10, 13), num_drafted=4) == verdict


def test_a_child_that_repeats_its_parent_is_accepted_once() -> None:
    tree = DraftTree.root(4)
    tree.add(0, 4, 1.0)

    assert Verdict(path=(1,), tokens=(4, 4), num_drafted=1) == walk(tree, [4, 4])


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        pytest.param([-1, 12, 13, 1, 2], (), (), id="at the root"),
        pytest.param([10, -1, 13, 1, 2], (1,), (10,), id="after one accepted"),
        pytest.param([10, 12, 13, -1, 2], (1, 3), (10, 12), id="at the leaf"),
    ],
)
def test_logits_that_are_not_finite_end_the_walk_with_what_was_accepted(
    choices: list[int], path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    verdict = walk(bushy(), choices)

    assert Verdict(path, tokens, num_drafted=4, is_finite=False) == verdict


def test_logits_off_the_path_may_be_anything() -> None:
    verdict = walk(bushy(), [10, 3, -1, -1, -1])

    assert Verdict(path=(1,), tokens=(10, 3), num_drafted=4) == verdict


class LookedUp(Sequence[int]):
    """Choices that note which of them were asked for."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self.nodes: list[int] = []

    def __len__(self) -> int:
        return len(self._choices)

    def __getitem__(self, node: int) -> int:  # type: ignore[override]
        self.nodes.append(node)
        return self._choices[node]


@st.composite
def walks(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    """A tree and picks, most of which follow a child where there is one."""
    tree = draw(trees(vocab_size=VOCAB_SIZE))
    choices = []
    for children in tree.children():
        any_token = st.integers(-1, VOCAB_SIZE - 1)
        choices.append(
            draw(st.one_of(st.sampled_from(sorted(children)), any_token) if children else any_token)
        )
    return tree, choices


def reference_walk(tree: DraftTree, choices: list[int]) -> list[int]:
    """The accepted nodes by their definition: every edge of the path is the target's pick."""

    def is_accepted(node: int) -> bool:
        parent = tree.parent[node]
        return parent < 0 or (choices[parent] == tree.token[node] and is_accepted(parent))

    return [node for node in range(1, len(tree)) if is_accepted(node)]


@given(walks())
def test_the_path_is_every_node_whose_edges_the_target_picks(
    example: tuple[DraftTree, list[int]],
) -> None:
    tree, choices = example
    verdict = walk(tree, choices)
    end = verdict.path[-1] if verdict.path else 0

    assert reference_walk(tree, choices) == list(verdict.path)
    assert tree.path_tokens(end) == list(verdict.tokens[: len(verdict.path)])
    assert (choices[end] >= 0) == verdict.is_finite
    assert ([choices[end]] if verdict.is_finite else []) == list(
        verdict.tokens[len(verdict.path) :]
    )
    assert len(tree) - 1 == verdict.num_drafted


@given(walks())
def test_only_the_path_is_looked_up_and_each_node_once(
    example: tuple[DraftTree, list[int]],
) -> None:
    tree, choices = example
    looked_up = LookedUp(choices)
    verdict = walk(tree, looked_up)

    assert [0, *verdict.path] == looked_up.nodes


@given(walks(), st.data())
def test_removing_nodes_never_changes_the_emitted_tokens_but_only_their_number(
    example: tuple[DraftTree, list[int]], data: st.DataObject
) -> None:
    """Pruning is free: the walk of a smaller tree emits a prefix of what the larger one emits."""
    tree, choices = example
    size = data.draw(st.integers(0, tree.num_drafted))
    smaller = tree.best(size, max(tree.depth))
    kept = [0]
    for node in range(1, len(smaller)):
        siblings = tree.children()[kept[smaller.parent[node]]]
        kept.append(siblings[smaller.token[node]])
    verdict = walk(smaller, [choices[node] for node in kept])

    full = walk(tree, choices)

    assert full.tokens[: len(verdict.tokens)] == verdict.tokens
    assert len(verdict.path) <= len(full.path)
