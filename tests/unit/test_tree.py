"""Draft trees: node order, ancestor masks and clipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.tree import DraftTree
from tests.strategies import trees


def ancestors(tree: DraftTree, node: int) -> set[int]:
    """A node, its parent, and so on up to the root."""
    found = set()
    while node >= 0:
        found.add(node)
        node = tree.parent[node]
    return found


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Each node by its path of tokens, with its score: the tree without its node order."""
    return {tuple(tree.path_tokens(node)): tree.score[node] for node in range(len(tree))}


def test_a_root_alone_drafts_nothing() -> None:
    tree = DraftTree.root(7)

    assert 1 == len(tree)
    assert 0 == tree.num_drafted
    assert [{}] == tree.children()
    assert [] == tree.path_tokens(0)


def test_add_returns_the_index_and_sets_the_depth() -> None:
    tree = DraftTree.root(7)
    a = tree.add(0, 1, 0.5)
    b = tree.add(a, 2, 0.25)

    assert (1, 2) == (a, b)
    assert [-1, 0, 1] == tree.parent
    assert [0, 1, 2] == tree.depth
    assert [1, 2] == tree.path_tokens(b)


def test_siblings_with_the_same_token_are_our_own_mistake() -> None:
    tree = DraftTree.root(7)
    tree.add(0, 1, 0.5)
    tree.add(0, 1, 0.5)

    with pytest.raises(AssertionError, match="distinct"):
        tree.children()


def test_a_parent_must_exist() -> None:
    with pytest.raises(AssertionError):
        DraftTree.root(7).add(1, 2, 0.5)


@given(trees())
def test_parents_come_first_and_every_path_names_one_node(tree: DraftTree) -> None:
    assert all(tree.parent[node] < node for node in range(len(tree)))
    assert len(tree) == len(paths(tree))
    assert [len(tree.path_tokens(node)) for node in range(len(tree))] == tree.depth


@given(trees())
def test_children_invert_parents(tree: DraftTree) -> None:
    children = tree.children()

    assert {(tree.parent[node], tree.token[node], node) for node in range(1, len(tree))} == {
        (parent, token, node)
        for parent, siblings in enumerate(children)
        for token, node in siblings.items()
    }


@given(trees(), st.integers(0, 14), st.integers(0, 7))
def test_best_keeps_a_closed_subtree_of_the_highest_scores(
    tree: DraftTree, max_nodes: int, max_depth: int
) -> None:
    best = tree.best(max_nodes, max_depth)
    within = [node for node in range(1, len(tree)) if tree.depth[node] <= max_depth]
    expected = sorted((tree.score[node] for node in within), reverse=True)[:max_nodes]

    assert expected == sorted(best.score[1:], reverse=True)
    assert paths(best).items() <= paths(tree).items()
    assert all(best.parent[node] < node for node in range(len(best)))
    assert max(best.depth) <= max_depth


@given(trees(), st.integers(0, 14), st.data())
def test_best_follows_another_rank_where_one_is_given(
    tree: DraftTree, max_nodes: int, data: st.DataObject
) -> None:
    """Scores keep their values but no longer decide; ties go to the earlier node."""
    rank = [0.0]
    for node in range(1, len(tree)):
        rank.append(rank[tree.parent[node]] - data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    best = tree.best(max_nodes, rank=rank)
    order = sorted(range(1, len(tree)), key=lambda node: (-rank[node], node))
    chosen = sorted(order[:max_nodes])

    assert [0, *chosen] == [list(paths(tree)).index(path) for path in paths(best)]
    assert [tree.score[node] for node in (0, *chosen)] == best.score


@given(trees(), trees())
def test_a_merge_has_every_path_of_both_once_with_its_higher_score(
    ours: DraftTree, theirs: DraftTree
) -> None:
    theirs.token[0] = ours.token[0]
    before = paths(ours), paths(theirs)
    merged = ours.merged(theirs)
    expected = {
        path: max(scores.get(path, 0) for scores in before) for path in before[0] | before[1]
    }

    assert expected == paths(merged)
    assert len(expected) == len(merged)
    assert before == (paths(ours), paths(theirs))
    for node in range(1, len(merged)):
        assert merged.parent[node] < node
        assert merged.depth[node] == merged.depth[merged.parent[node]] + 1
        assert merged.score[node] <= merged.score[merged.parent[node]]


@given(trees(), trees())
def test_a_merge_does_not_depend_on_which_tree_comes_first(
    ours: DraftTree, theirs: DraftTree
) -> None:
    theirs.token[0] = ours.token[0]

    assert paths(ours.merged(theirs)) == paths(theirs.merged(ours))


def test_trees_of_different_roots_or_with_drawn_nodes_are_not_merged() -> None:
    drawn = DraftTree.root(7)
    drawn.add(0, 0, 0.5, law(0.5, 0.5))

    for ours, theirs in ((7, 8), (drawn, 7), (7, drawn)):
        pair = [
            tree if isinstance(tree, DraftTree) else DraftTree.root(tree) for tree in (ours, theirs)
        ]
        with pytest.raises(AssertionError):
            pair[0].merged(pair[1])


@given(trees())
def test_best_with_room_to_spare_changes_nothing(tree: DraftTree) -> None:
    assert tree == tree.best(len(tree), max(tree.depth))


@given(trees(), st.data())
def test_keep_takes_exactly_the_nodes_asked_for(tree: DraftTree, data: st.DataObject) -> None:
    leaves = data.draw(st.lists(st.integers(0, len(tree) - 1), max_size=4))
    nodes = {node for leaf in leaves for node in ancestors(tree, leaf)}
    kept = tree.keep(sorted(nodes))

    assert {tuple(tree.path_tokens(node)) for node in nodes | {0}} == set(paths(kept))


@given(trees())
def test_the_ancestor_mask_holds_each_node_and_its_ancestors(tree: DraftTree) -> None:
    mask_NN = tree.ancestor_mask()
    if mask_NN is None:
        mask_NN = torch.ones(len(tree), len(tree)).tril().bool()

    for node in range(len(tree)):
        assert ancestors(tree, node) == set(mask_NN[node].nonzero().flatten().tolist())


def test_only_a_chain_needs_no_mask() -> None:
    chain = DraftTree.root(7)
    chain.add(chain.add(0, 1, 0.5), 2, 0.25)
    fork = DraftTree.root(7)
    fork.add(0, 1, 0.5)
    fork.add(0, 2, 0.25)

    assert chain.is_chain
    assert chain.ancestor_mask() is None
    assert not fork.is_chain
    assert fork.ancestor_mask() is not None


def law(*probs: float) -> np.ndarray:
    return np.array(probs, dtype=np.float32)


def test_a_drawn_node_keeps_the_law_it_was_drawn_from() -> None:
    tree = DraftTree.root(7)
    fixed = tree.add(0, 0, 0.5)
    drawn = tree.add(0, 1, 0.25, law(0, 0.75, 0.25))
    below = tree.add(drawn, 2, 0.125, law(0.5, 0, 0.5))

    assert {drawn, below} == tree.drawn.keys()
    assert {0: drawn, drawn: below} == tree.drawn_children()
    assert [0, 0.75, 0.25] == tree.drawn[drawn].tolist()
    assert fixed not in tree.drawn


def test_a_second_drawn_child_or_an_impossible_draw_is_our_own_mistake() -> None:
    tree = DraftTree.root(7)
    tree.add(0, 0, 0.5, law(0.5, 0.5))

    with pytest.raises(AssertionError, match="at most one"):
        tree.add(0, 1, 0.5, law(0.5, 0.5))
    with pytest.raises(AssertionError, match="has a probability"):
        tree.add(1, 1, 0.5, law(1, 0))


def test_the_laws_follow_their_nodes_when_others_go() -> None:
    tree = DraftTree.root(7)
    tree.add(0, 0, 0.125)
    drawn = tree.add(0, 1, 0.5, law(0.25, 0.75))
    below = tree.add(drawn, 0, 0.25, law(1, 0))
    tree.add(below, 1, 0.0625, law(0.5, 0.5))
    kept, best = tree.keep([drawn, below]), tree.best(1, 5)

    assert {1: [0.25, 0.75], 2: [1, 0]} == {n: row.tolist() for n, row in kept.drawn.items()}
    assert [7, 1] == best.token
    assert {1: [0.25, 0.75]} == {n: row.tolist() for n, row in best.drawn.items()}
    assert {} == tree.keep([1]).drawn
