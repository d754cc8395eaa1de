"""The ``rejection`` rule: accept a drawn draft by its odds, else draw from what it left over.

Owns the rule for trees and for chains as a whole; pure. Stands beside ``verify``, whose walk is the
default, between the sampler, which knows the target's law at each node, and ``step``, which commits
the path. The emitted tokens have the target's law, whatever the draft's.

At a node with the target's law ``target_V`` one token is settled like this::

    a child y was drawn from draft_V:   y with probability min(1, target_V[y] / draft_V[y]),
                                        else z from max(target_V - draft_V, 0), normalised
    no child was drawn:                 z from target_V

Where the settled token is a child, drawn or fixed, the walk goes on there. That is rejection
sampling on a chain of drawn nodes (Leviathan et al. 2023, alg. 1; Chen et al. 2023), greedy
multi-draft on a tree of fixed nodes with one drawn child each (Hu et al. 2025, arXiv 2502.18779;
``draft_V`` is 0 on the fixed ones), and plain sampling beside guesses that are all fixed (n-gram,
MEDUSA).

Whether a node is in the tree may depend on its prefix, never on what is drawn at it or below: a
draft that stays only where it is likely is no longer a draw from ``draft_V``. Hence drafters give
a drawn node, and every node below it, scores that are the same whatever was drawn: pruning by
scores, which looks at those of the whole tree at once, then tells nothing about the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.draws import Draws, widened
from outrider.tree import DraftTree
from outrider.types import Verdict


def verify(
    tree: DraftTree,
    laws: Sequence[NDArray[Any] | None],
    draws: Draws,
    *,
    num_tokens: int,
    uses_blocks: bool,
) -> Verdict:
    """Settle tokens from the root down, until one is no child.

    ``laws[n]`` is the target's law ``[V]`` after node n, None where its logits were not finite;
    looked up only where needed. ``num_tokens`` is the length of the text, root last: the position
    of the root's children. ``uses_blocks`` verifies a chain of drawn nodes as a whole.
    """
    assert len(laws) == len(tree)
    is_block = tree.num_drafted > 1 and tree.is_chain and len(tree.drawn) == tree.num_drafted
    if uses_blocks and is_block:
        return verify_block(tree, laws, draws, num_tokens)
    return verify_nodes(tree, laws, draws, num_tokens)


def verify_nodes(
    tree: DraftTree, laws: Sequence[NDArray[Any] | None], draws: Draws, num_tokens: int
) -> Verdict:
    """One node after the other; arguments as for :func:`verify`."""
    children, drawn_children = tree.children(), tree.drawn_children()
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        target_V = laws[node]
        if target_V is None:
            return Verdict(tuple(path), tuple(tokens), tree.num_drafted, is_finite=False)
        position = num_tokens + tree.depth[node]
        drawn = drawn_children.get(node)
        if drawn is None:
            token = draws.residual(position, target_V)
        else:
            token = settle(target_V, tree.token[drawn], tree.drawn[drawn], draws, position)
        tokens.append(token)
        child = children[node].get(token)
        if child is None:
            return Verdict(tuple(path), tuple(tokens), tree.num_drafted)
        path.append(child)
        node = child


def settle(
    target_V: NDArray[Any], drafted: int, draft_V: NDArray[Any], draws: Draws, position: int
) -> int:
    """A token of the target's law: the drafted one where the odds allow, else another."""
    odds = _odds(target_V, draft_V, drafted)
    if odds > 0 and draws.coin(position) < odds:
        return drafted
    return draws.residual(position, leftover(target_V, draft_V))


def leftover(target_V: NDArray[Any], draft_V: NDArray[Any], carried: float = 1) -> NDArray[Any]:
    """What the target has beyond the draft, not normalised; ``carried`` scales the target."""
    left_V = _beyond(target_V, draft_V, carried)
    # Equal laws leave nothing but rounding, and then nothing would have been rejected.
    return left_V if left_V.any() else target_V


def verify_block(
    chain: DraftTree, laws: Sequence[NDArray[Any] | None], draws: Draws, num_tokens: int
) -> Verdict:
    """A chain of drawn nodes as a whole (Sun et al. 2025, "Block verification ...", alg. 2).

    ``carried[n]``, the odds of all nodes up to n with every product cut off at 1, is the chance
    that n is kept; part of it comes from the parts of the chain that go on below n, and n's own
    coin makes up for the rest. The deepest node whose coin allows it ends the path. A node whose
    row is not finite ends the chain.
    """
    if laws[0] is None:
        return Verdict((), (), chain.num_drafted, is_finite=False)
    carried: list[float] = [1]
    num_kept, end = 0, chain.num_drafted
    for node in range(1, chain.num_drafted + 1):
        before_V = laws[node - 1]
        assert before_V is not None
        odds = _odds(before_V, chain.drawn[node], chain.token[node])
        carried.append(min(1, carried[-1] * odds))
        if carried[node] == 0:  # and so is every later one: none is kept
            break
        target_V = laws[node]
        if target_V is None:
            end = node
        draft_V = chain.drawn[node + 1] if node < end else None
        if draws.coin(num_tokens + node - 1) < _own_chance(carried[node], target_V, draft_V):
            num_kept = node
        if node == end:
            break
    path = tuple(range(1, num_kept + 1))
    tokens = tuple(chain.token[1 : num_kept + 1])
    target_V = laws[num_kept]
    if target_V is None:
        return Verdict(path, tokens, chain.num_drafted, is_finite=False)
    if num_kept < end:
        target_V = leftover(target_V, chain.drawn[num_kept + 1], carried[num_kept])
    last = draws.residual(num_tokens + num_kept, target_V)
    return Verdict(path, (*tokens, last), chain.num_drafted)


def _own_chance(
    carried: float, target_V: NDArray[Any] | None, draft_V: NDArray[Any] | None
) -> float:
    """The chance of a node's own coin; ``draft_V`` is what its child was drawn from, if any."""
    if target_V is None or draft_V is None or carried == 1:
        return carried
    left = _beyond(target_V, draft_V, carried).sum()
    return left / (left + 1 - carried)


def _beyond(target_V: NDArray[Any], draft_V: NDArray[Any], carried: float) -> NDArray[Any]:
    """Where the scaled target exceeds the draft, and by how much; 0 elsewhere."""
    return np.maximum(carried * widened(target_V) - widened(draft_V), 0)


def _odds(target_V: NDArray[Any], draft_V: NDArray[Any], token: int) -> float:
    """How much likelier the target makes a token than the draft it was drawn from."""
    assert draft_V.item(token) > 0, "it was drawn"
    return target_V.item(token) / draft_V.item(token)
