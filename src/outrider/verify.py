"""The verifier: walk down the draft tree along the target's own picks.

Owns the acceptance rule and nothing else; pure. Stands between the sampler, which says what the
target picks at each node, and ``step``, which commits the path.

What is emitted is always the target's pick, never the draft's token: a draft token is accepted
because it *is* the pick. So the output cannot depend on the drafter, on the tree's shape, or on
which nodes were pruned, whatever the drafter looked at. (Daliri, Musco and Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding", for one draft.)
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.tree import DraftTree
from outrider.types import Verdict


def walk(tree: DraftTree, choice_N: Sequence[int]) -> Verdict:
    """Descend from the root while the target's pick is a child's token.

    ``choice_N[n]`` is the target's pick after node n, or negative where its logits were not
    finite. Only the nodes of the path are looked up, so the picks may be computed on demand.

    The emitted tokens are the accepted ones, then the first pick that is no child: the correction,
    or the bonus at a leaf. A pick that is not finite ends the walk with the accepted ones alone.
    """
    assert len(choice_N) == len(tree)
    children = tree.children()
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        choice = choice_N[node]
        if choice < 0:
            return Verdict(tuple(path), tuple(tokens), tree.num_drafted, is_finite=False)
        tokens.append(choice)
        child = children[node].get(choice)
        if child is None:
            return Verdict(tuple(path), tuple(tokens), tree.num_drafted)
        path.append(child)
        node = child
