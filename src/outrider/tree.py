"""The draft tree: the one shape in which every drafter hands over its guesses.

Owns node order, ancestor masks and clipping; pure functions on small tensors. Stands between
``drafters.propose`` and the target's forward pass; knows neither models nor caches.

One request's nodes, parents always before children::

    index    0      1    2    3    4          root 0 ── 1 ── 3
    token   root    a    b    c    d               └── 2 ── 4
    parent   -1     0    0    1    2
    depth     0     1    1    2    2

Row 0 is the root: the last committed token, whose keys and values are not written yet. A chain is
a tree of branching 1; a request that drafts nothing has the root alone (plain decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class DraftTree:
    """One request's tree in plain lists; what drafters build and what the verifier walks.

    ``score`` is the drafter's own confidence that the node is on the accepted path, in (0, 1];
    it falls along a path. The root's is 1.

    ``drawn`` holds, for each node whose token was drawn at random, the float32 probabilities
    ``[V]`` it was drawn from; at most one child of a node. Every other node is a fixed guess:
    certain once its prefix is known. Only the ``rejection`` rule tells the two apart.

    ``looked_up`` holds, for each node that was found without a pass of a module, the score that it
    has on that ground alone: a tree may hold guesses of both kinds.

    ``is_finite``: no logits that the tree was made from, or would have been, were infinite or NaN.
    """

    token: list[int]
    parent: list[int] = field(default_factory=lambda: [-1])
    depth: list[int] = field(default_factory=lambda: [0])
    score: list[float] = field(default_factory=lambda: [1.0])
    drawn: dict[int, NDArray[Any]] = field(default_factory=dict)
    looked_up: dict[int, float] = field(default_factory=dict)
    is_finite: bool = True

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """A tree of the root alone."""
        return cls([token])

    def __len__(self) -> int:
        return len(self.token)

    @property
    def num_drafted(self) -> int:
        """Nodes without the root."""
        return len(self.token) - 1

    def add(
        self, parent: int, token: int, score: float, drawn_from: NDArray[Any] | None = None
    ) -> int:
        """Append a child and return its index; siblings must have distinct tokens.

        ``drawn_from`` are the probabilities that its token was drawn from, if it was.
        """
        assert 0 <= parent < len(self.token)
        if drawn_from is not None:
            assert drawn_from[token] > 0, "a drawn token has a probability"
            assert parent not in self.drawn_children(), "at most one child of a node is drawn"
            self.drawn[len(self.token)] = drawn_from
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.score.append(score)
        return len(self.token) - 1

    def children(self) -> list[dict[int, int]]:
        """For each node, a map from child token to child index."""
        result: list[dict[int, int]] = [{} for _ in self.token]
        for node in range(1, len(self.token)):
            siblings = result[self.parent[node]]
            assert self.token[node] not in siblings, "siblings must have distinct tokens"
            siblings[self.token[node]] = node
        return result

    def drawn_children(self) -> dict[int, int]:
        """The drawn child of each node that has one."""
        return {self.parent[node]: node for node in self.drawn}

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from below the root down to ``node``, ``node`` included; [] for the root."""
        return [self.token[place] for place in self.path(node)]

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to ``node``, ``node`` included; [] for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parent))

    def ancestor_mask(self, num_before: int = 0) -> Tensor | None:
        """Bool ``[N, N]``: entry ``[i, j]`` says that j is i or an ancestor of i; None for a chain.

        ``num_before`` tokens that lead to the root, one after the other, take the first rows and
        columns. Parents precede children, so one pass in node order suffices.
        """
        if self.is_chain:
            return None
        mask_NN = np.tri(num_before + len(self), dtype=np.bool_)
        mask_NN[num_before:, num_before:] = np.eye(len(self), dtype=np.bool_)
        for node in range(1, len(self)):
            mask_NN[num_before + node] |= mask_NN[num_before + self.parent[node]]
        return torch.from_numpy(mask_NN)

    def keep(self, nodes: Sequence[int]) -> DraftTree:
        """The subtree of these nodes (root implied); they must be closed under parents."""
        kept = sorted({0, *nodes})
        index = {old: new for new, old in enumerate(kept)}
        return DraftTree(
            token=[self.token[old] for old in kept],
            parent=[-1 if old == 0 else index[self.parent[old]] for old in kept],
            depth=[self.depth[old] for old in kept],
            score=[self.score[old] for old in kept],
            drawn={index[old]: law for old, law in self.drawn.items() if old in index},
            looked_up={index[old]: own for old, own in self.looked_up.items() if old in index},
            is_finite=self.is_finite,
        )

    def best(
        self, max_nodes: int, max_depth: int | None = None, *, rank: Sequence[float] | None = None
    ) -> DraftTree:
        """The ``max_nodes`` highest-ranked nodes within ``max_depth`` (root excluded from both).

        ``rank`` is the score unless given otherwise. It must not rise along a path; ties go to the
        earlier node, so the choice is closed under parents.
        """
        rank = self.score if rank is None else rank
        max_depth = max(self.depth) if max_depth is None else max_depth
        if len(self) - 1 <= max_nodes and max(self.depth) <= max_depth:
            return self
        order = sorted(range(1, len(self)), key=lambda node: (-rank[node], node))
        within = [node for node in order if self.depth[node] <= max_depth]
        return self.keep(within[: max(0, max_nodes)])

    def merged(self, other: DraftTree) -> DraftTree:
        """Both trees' nodes in one tree; a path that is in both keeps its higher score.

        Both have the same root and hold fixed guesses only.
        """
        assert self.token[0] == other.token[0]
        assert not self.drawn
        assert not other.drawn
        merged = self.keep(range(1, len(self)))
        merged.is_finite = self.is_finite and other.is_finite
        children = merged.children()
        place = [0]
        for node in range(1, len(other)):
            parent, token, score = place[other.parent[node]], other.token[node], other.score[node]
            known = children[parent].get(token)
            if known is None:
                known = children[parent][token] = merged.add(parent, token, score)
                children.append({})
            merged.score[known] = max(merged.score[known], score)
            if node in other.looked_up:
                merged.looked_up[known] = max(merged.looked_up.get(known, 0.0), score)
            place.append(known)
        return merged
