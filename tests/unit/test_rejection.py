"""The rejection rule by hand: coins at their edges, residuals, blocks; its law is in exactness/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outrider.rejection import leftover, settle, verify
from outrider.tree import DraftTree


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@dataclass
class Scripted:
    """Coins by position, and residual draws that take the likeliest; notes what was asked."""

    coins: dict[int, float] = field(default_factory=dict)
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def coin(self, position: int) -> float:
        self.asked.append(("coin", position))
        return self.coins[position]

    def residual(self, position: int, weights: np.ndarray) -> int:
        self.asked.append(("residual", position, *np.round(weights.astype(float), 6).tolist()))
        return int(np.argmax(weights))


def judged(
    tree: DraftTree, laws: list[Any], coins: dict[int, float], *, uses_blocks: bool = False
) -> tuple[Any, list[tuple[Any, ...]]]:
    draws: Any = Scripted(coins)
    return verify(tree, laws, draws, num_tokens=10, uses_blocks=uses_blocks), draws.asked


# --- one node -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coin", "expected"), [(0.0, 0), (0.49, 0), (0.5, 1), (np.nextafter(1.0, 0.0), 1)]
)
def test_a_draft_is_accepted_below_its_odds_only(coin: float, expected: int) -> None:
    draws: Any = Scripted({3: coin})

    assert expected == settle(row(0.25, 0.75), 0, row(0.5, 0.5), draws, 3)


def test_what_the_target_never_says_is_rejected_even_at_a_coin_of_zero() -> None:
    draws: Any = Scripted({3: 0.0})

    assert 1 == settle(row(0, 1), 0, row(1, 0), draws, 3)


def test_a_draft_that_the_target_likes_better_is_always_accepted() -> None:
    draws: Any = Scripted({3: np.nextafter(1.0, 0.0)})

    assert 0 == settle(row(0.5, 0.5), 0, row(0.5, 0.5), draws, 3)
    assert 0 == settle(row(0.75, 0.25), 0, row(1e-30, 1), draws, 3)


def test_the_leftover_is_what_the_target_has_more() -> None:
    left_V = leftover(row(0.5, 0.25, 0.25), row(0.25, 0.75, 0), carried=0.75)

    assert [0.125, 0, 0.1875] == left_V.tolist()
    assert np.float64 == left_V.dtype


def test_laws_that_differ_by_rounding_alone_leave_the_target() -> None:
    target_V = row(0.5, np.nextafter(np.float32(0.5), np.float32(0)))

    assert target_V.tolist() == leftover(target_V, row(0.5, 0.5)).tolist()


def test_a_draft_from_nothing_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="it was drawn"):
        settle(row(0.5, 0.5), 0, row(0, 1), Scripted({3: 0.0}), 3)  # type: ignore[arg-type]


# --- trees --------------------------------------------------------------------------------------


def multi_draft() -> DraftTree:
    """Two fixed children, one with a drawn child of its own, and a drawn leaf."""
    tree = DraftTree.root(9)
    first = tree.add(0, 0, 0.5)
    tree.add(0, 1, 0.5)
    tree.add(0, 2, 0.25, row(0, 0, 0.5, 0.5))
    tree.add(first, 3, 0.25, row(0.25, 0.25, 0.25, 0.25))
    return tree


LAWS = [
    row(0.5, 0.125, 0.125, 0.25),
    row(0.125, 0.25, 0.5, 0.125),
    row(0, 0, 0, 1),
    row(1, 0, 0, 0),
    row(0, 1, 0, 0),
]


def test_an_accepted_leaf_is_followed_by_the_bonus() -> None:
    verdict, asked = judged(multi_draft(), LAWS, {10: 0.2})

    assert ((3,), (2, 0), 4, True) == (
        verdict.path,
        verdict.tokens,
        verdict.num_drafted,
        verdict.is_finite,
    )
    assert [("coin", 10), ("residual", 11, 1, 0, 0, 0)] == asked


def test_a_residual_that_is_a_fixed_child_leads_on_and_keeps_the_child_s_whole_mass() -> None:
    verdict, asked = judged(multi_draft(), LAWS, {10: 0.25, 11: 0.5})

    assert ((1,), (0, 2)) == (verdict.path, verdict.tokens)
    assert [
        ("coin", 10),
        ("residual", 10, 0.5, 0.125, 0, 0),  # both fixed ones whole, less of the drawn one
        ("coin", 11),
        ("residual", 11, 0, 0, 0.25, 0),
    ] == asked


def test_a_tree_of_fixed_nodes_needs_no_coin() -> None:
    tree = DraftTree.root(9)
    tree.add(tree.add(0, 0, 0.5), 2, 0.25)
    verdict, asked = judged(tree, [LAWS[0], LAWS[1], LAWS[2]], {})

    assert ((1, 2), (0, 2, 3)) == (verdict.path, verdict.tokens)
    assert ["residual"] * 3 == [kind for kind, *_ in asked]


def test_a_row_that_is_not_finite_ends_the_path_with_what_was_accepted() -> None:
    laws = [LAWS[0], None, LAWS[2], None, LAWS[4]]
    verdict, _ = judged(multi_draft(), laws, {10: 0.25})

    assert ((1,), (0,), False) == (verdict.path, verdict.tokens, verdict.is_finite)
    assert judged(multi_draft(), [None] * 5, {})[0].tokens == ()


# --- blocks -------------------------------------------------------------------------------------


def chain(*tokens: int) -> DraftTree:
    tree = DraftTree.root(9)
    for node, token in enumerate(tokens):
        tree.add(node, token, 0.5 ** (node + 1), row(0.5, 0.5))
    return tree


# Odds of 0.5, then 1.5 and 0.75 in all: where the first is hard, the second may make up for it.
CHAIN_LAWS = [row(0.25, 0.75), row(0.25, 0.75), row(1, 0)]


def test_a_block_may_keep_what_token_by_token_is_rejected() -> None:
    coins = {10: 0.6, 11: 0.7}
    block, asked = judged(chain(0, 1), CHAIN_LAWS, coins, uses_blocks=True)
    single, _ = judged(chain(0, 1), CHAIN_LAWS, coins)

    assert ((1, 2), (0, 1, 0)) == (block.path, block.tokens)
    assert [("coin", 10), ("coin", 11), ("residual", 12, 1, 0)] == asked
    assert ((), (1,)) == (single.path, single.tokens)


def test_a_part_of_a_block_is_followed_by_what_its_odds_leave() -> None:
    # After node 1 the odds are 1, so its own coin always allows it.
    laws = [row(0.5, 0.5), row(0.25, 0.75), row(1, 0)]
    verdict, asked = judged(chain(0, 0), laws, {10: 0.999, 11: 0.5}, uses_blocks=True)

    assert ((1,), (0, 1)) == (verdict.path, verdict.tokens)
    assert ("residual", 11, 0, 0.25) == asked[-1]


def test_the_chance_of_a_part_is_the_published_one() -> None:
    """P = 1/2, sum of (P p - q)+ = 1/4 at node 1: h = (1/4) / (1/4 + 1 - 1/2) = 1/3."""
    tree = DraftTree.root(9)
    tree.add(tree.add(0, 0, 0.5, row(0.5, 0.5)), 0, 0.25, row(0.75, 0.25))
    laws = [row(0.25, 0.75), row(0, 1), row(1, 0)]
    below, asked = judged(tree, laws, {10: 0.333}, uses_blocks=True)
    above, _ = judged(tree, laws, {10: 0.334}, uses_blocks=True)

    assert ((1,), (0, 1)) == (below.path, below.tokens)
    assert ("residual", 11, 0, 0.25) == asked[-1]
    assert [("coin", 10)] == asked[:-1], "odds of 0 need no coin"
    assert ((), (1,)) == (above.path, above.tokens)


def test_equal_laws_accept_a_whole_block_whatever_the_coins() -> None:
    almost = float(np.nextafter(1.0, 0.0))
    laws = [row(0.5, 0.5)] * 4
    coins = {10: almost, 11: almost, 12: almost}
    verdict, _ = judged(chain(0, 1, 0), laws, coins, uses_blocks=True)

    assert (1, 2, 3) == verdict.path


def test_a_block_ends_before_a_row_that_is_not_finite() -> None:
    laws = [row(0.5, 0.5), None, row(1, 0)]
    verdict, _ = judged(chain(0, 1), laws, {10: 0.9}, uses_blocks=True)
    early, _ = judged(chain(0, 1), [None, None, None], {}, uses_blocks=True)
    rejected, _ = judged(
        chain(0, 1), [row(0.25, 0.75), None, row(1, 0)], {10: 0.9}, uses_blocks=True
    )

    assert ((1,), (0,), False) == (verdict.path, verdict.tokens, verdict.is_finite)
    assert ((), (), False) == (early.path, early.tokens, early.is_finite)
    assert ((), (1,), True) == (rejected.path, rejected.tokens, rejected.is_finite)


@pytest.mark.parametrize("uses_blocks", [True, False])
def test_trees_and_chains_with_fixed_nodes_are_never_blocks(uses_blocks: bool) -> None:
    mixed = DraftTree.root(9)
    mixed.add(mixed.add(0, 0, 0.5, row(0.5, 0.5)), 1, 0.25)
    fork = chain(0, 1)
    fork.add(0, 1, 0.5)
    coins = {10: 0.6, 11: 0.1}

    for tree in (mixed, fork):
        laws = [*CHAIN_LAWS, row(1, 0)][: len(tree)]
        assert judged(tree, laws, coins) == judged(tree, laws, coins, uses_blocks=uses_blocks)
