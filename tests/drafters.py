"""Drafters for tests: an oracle, liars of several kinds, and shapes from chain to bush.

They exist to drive every branch of a verify step: always accepted, always rejected, rejected at
the last node, accepted through the last sibling.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from outrider.drafters.base import DraftRequest, Identified
from outrider.tree import DraftTree

# (tokens of the request, how many to foresee) -> the target's own next tokens
Foresight = Callable[[Sequence[int], int], list[int]]


class ScriptedDrafter:
    """Grows trees around the true continuation, hiding or spoiling it as told.

    Args:
        foresee: the target's own continuation of a request's tokens.
        vocab_size: ids for wrong branches.
        depth: how deep the true path is drafted.
        siblings: wrong children beside each true node, drawn at random.
        honesty: chance that the true token is among a node's children at all.
        order: ``first`` puts the true child before its siblings, ``last`` behind them.
    """

    captures = ()
    num_passes = 0

    def __init__(
        self,
        foresee: Foresight,
        vocab_size: int,
        *,
        depth: int = 4,
        siblings: int = 0,
        honesty: float = 1.0,
        order: str = "first",
        seed: int = 0,
    ) -> None:
        self._foresee = foresee
        self._vocab_size = vocab_size
        self._depth = depth
        self._siblings = siblings
        self._honesty = honesty
        self._order = order
        self._rng = random.Random(seed)
        self.live_requests: set[int] = set()

    @property
    def max_nodes(self) -> int:
        return self._depth * (1 + 2 * self._siblings)

    def admit(self, request: DraftRequest) -> None:
        self.live_requests.add(request.request_id)

    def adopt(self, request: DraftRequest, source_id, num_tokens, *, takes_over) -> int:
        if takes_over:
            self.live_requests.discard(source_id)
        self.admit(request)
        return num_tokens

    def prefill(self, request: DraftRequest, num_committed, hidden_TC) -> None:
        assert request.request_id in self.live_requests

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        return [
            self._grow(request, min(self._depth, limit))
            for request, limit in zip(requests, max_depth, strict=True)
        ]

    def observe(self, requests, trees, verdicts, hidden) -> None:
        for request in requests:
            assert request.request_id in self.live_requests

    def release(self, request: Identified) -> None:
        self.live_requests.discard(request.request_id)  # it may never have been admitted

    def _grow(self, request: DraftRequest, depth: int) -> DraftTree:
        tree = DraftTree.root(request.token_ids[-1])
        parent = 0
        for true_token in self._foresee(request.token_ids, depth):
            children = set()
            while len(children) < self._siblings:
                children.add(self._rng.randrange(self._vocab_size))
            children.discard(true_token)
            ordered = sorted(children)
            is_honest = self._rng.random() < self._honesty
            if is_honest:
                ordered.insert(0 if self._order == "first" else len(ordered), true_token)
            elif not ordered:
                ordered = [(true_token + 1) % self._vocab_size]
            added = {token: tree.add(parent, token, tree.score[parent] * 0.9) for token in ordered}
            for token in ordered:  # wrong branches go on, so that rejected subtrees exist
                is_wrong = token != true_token and self._siblings > 0
                if is_wrong and tree.depth[added[token]] < depth:
                    tree.add(added[token], true_token, tree.score[added[token]] * 0.5)
            if is_honest:
                parent = added[true_token]
            elif self._siblings:
                break
            else:
                parent = added[ordered[0]]
        return tree
