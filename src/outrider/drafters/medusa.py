"""Drafting with MEDUSA heads: all depths at once, from one state.

Owns the tree that the heads' joint probabilities make: heads do not see each other's tokens, so a
path's chance is the product of its tokens' under their heads, and the best tree of a size follows
best first. The heads themselves are :mod:`outrider.models.heads.medusa`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.drafters.base import DraftRequest, Identified
from outrider.drafters.growth import Experience, Growth, Shape
from outrider.models.heads.medusa import MedusaHeads
from outrider.tree import DraftTree
from outrider.types import Verdict
from outrider.warping import Row


class MedusaDrafter:
    """One tree per request, no deeper than there are heads.

    Args:
        heads: what predicts.
        config: the tree's shape; a chain takes each head's best token.
    """

    def __init__(self, heads: MedusaHeads, config: SpeculationConfig) -> None:
        self.captures = heads.captures
        self.num_passes = 0
        self.heads = heads
        self._shape = Shape.of(config).within(heads.config.num_heads)
        self._experience = Experience.none()
        self._state_of: dict[int, Tensor] = {}
        self._growths: dict[int, Growth] = {}

    def admit(self, request: DraftRequest) -> None:
        """Nothing to prepare: the heads keep no cache."""

    def adopt(
        self,
        request: DraftRequest,  # noqa: ARG002 - nothing is kept per prompt
        source_id: int,
        num_tokens: int,
        *,
        takes_over: bool,
    ) -> int:
        """Nothing is missed: the first step brings the state that counts."""
        if takes_over:
            self._forget(source_id)
        return num_tokens

    def prefill(self, request: DraftRequest, num_committed: int, hidden_TC: Tensor | None) -> None:
        """Nothing to learn: the first step brings the state that counts."""

    def propose(
        self,
        requests: Sequence[DraftRequest],
        max_depth: Sequence[int],
        min_score: float = 0.0,
    ) -> list[DraftTree]:
        """One tree per request; the root alone in a request's first step, before any state.

        All heads run in one pass, which extends the root, whose score is 1.
        """
        trees = [DraftTree.root(request.token_ids[-1]) for request in requests]
        drafting = [
            b
            for b, (request, depth) in enumerate(zip(requests, max_depth, strict=True))
            if depth > 0 and request.request_id in self._state_of
        ]
        if not drafting or min_score > 1:
            return trees
        self.num_passes += 1
        state_BD = torch.stack([self._state_of[requests[b].request_id] for b in drafting])
        num_heads = min(self._shape.max_depth, max(max_depth[b] for b in drafting))
        logits = [rows.numpy() for rows in self.heads.forward(state_BD, num_heads)]
        for place, b in enumerate(drafting):
            shape = self._shape.within(max_depth[b])
            growth = Growth(requests[b], shape, None, self._experience)
            grow(growth, [rows[place] for rows in logits[: shape.max_depth]])
            self._growths[requests[b].request_id] = growth
            trees[b] = growth.kept()
        return trees

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Sequence[Tensor | None],
    ) -> None:
        """Count hits and misses; keep the newest state, that of the token before the root."""
        for request, tree, verdict, hidden_TD in zip(
            requests, trees, verdicts, hidden, strict=True
        ):
            growth = self._growths.pop(request.request_id, None)
            if growth is not None:
                growth.learn(tree, verdict.tokens)
            assert hidden_TD is not None
            self._state_of[request.request_id] = hidden_TD[-1]

    def release(self, request: Identified) -> None:
        """Forget the request's state."""
        self._forget(request.request_id)

    def _forget(self, request_id: int) -> None:
        self._state_of.pop(request_id, None)
        self._growths.pop(request_id, None)


def grow(growth: Growth, logits_by_depth: Sequence[Row]) -> None:
    """Add the best node that is left, again and again, until the tree is full.

    Its children are its head's best tokens, whatever the path: penalties for tokens on the path
    itself are left to the target.
    """
    choices = [growth.choices(depth, [], row) for depth, row in enumerate(logits_by_depth)]
    open_nodes = [(0.0, 0)]
    num_taken = 0
    while open_nodes and num_taken < growth.shape.max_nodes:
        _, node = heapq.heappop(open_nodes)
        num_taken += 1
        depth = growth.tree.depth[node]
        if depth < len(choices):
            for child in growth.add_fixed(node, choices[depth]):
                heapq.heappush(open_nodes, (-growth.rank(child), child))
