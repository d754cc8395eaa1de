"""Two drafters in one tree: a head's guesses and what the text itself has said before.

Owns the merge. A head is good where the text is predictable in kind, n-gram where it repeats itself
word for word; their trees have one root, so what both propose is verified once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outrider.drafters.base import Drafter, DraftRequest, Identified
from outrider.drafters.ngram import NgramDrafter
from outrider.tree import DraftTree
from outrider.types import Verdict


class CombinedDrafter:
    """A head's tree and n-gram's, merged, cut to the best ``max_nodes`` by score.

    A request under the ``rejection`` rule gets the head's tree alone: which drawn nodes stay must
    not depend on what was drawn, and a merge that removes duplicates would.
    """

    def __init__(self, head: Drafter, ngram: NgramDrafter, max_nodes: int) -> None:
        self.captures = head.captures
        self.head = head
        self._ngram = ngram
        self._max_nodes = max_nodes

    @property
    def num_passes(self) -> int:
        """The head's passes."""
        return self.head.num_passes

    def admit(self, request: DraftRequest) -> None:
        """Both take the request in."""
        self.head.admit(request)
        self._ngram.admit(request)

    def adopt(
        self, request: DraftRequest, source_id: int, num_tokens: int, *, takes_over: bool
    ) -> int:
        """What the head knows counts; n-gram only reads tokens."""
        self._ngram.adopt(request, source_id, num_tokens, takes_over=takes_over)
        return self.head.adopt(request, source_id, num_tokens, takes_over=takes_over)

    def prefill(self, request: DraftRequest, num_committed: int, hidden_TC: Tensor | None) -> None:
        """Hand the states to the head."""
        self.head.prefill(request, num_committed, hidden_TC)

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        """Both propose; the best nodes of both stay."""
        ours = self.head.propose(requests, max_depth, min_score)
        theirs = self._ngram.propose(requests, max_depth, min_score)
        return [
            head
            if request.sampler.params.uses_rejection
            else head.merged(ngram).best(self._max_nodes)
            for request, head, ngram in zip(requests, ours, theirs, strict=True)
        ]

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Sequence[Tensor | None],
    ) -> None:
        """Both learn; each remembers its own guesses."""
        self.head.observe(requests, trees, verdicts, hidden)
        self._ngram.observe(requests, trees, verdicts, hidden)

    def release(self, request: Identified) -> None:
        """Both forget the request."""
        self.head.release(request)
        self._ngram.release(request)
