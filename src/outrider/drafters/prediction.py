"""Drafts from what the caller expects the answer to be: an edited text is mostly the old one.

Owns where an answer stands in its prediction. Unlike a drafter it belongs to one request; ``step``
adds its guesses to those of whatever drafter runs, or of none, and they are verified like any
other, so a wrong prediction costs time and never changes the text.

The place follows the emitted tokens. Where the answer departs, a substitution is assumed until the
answer's last tokens are found in the prediction again::

    prediction   f o o ( a , b )            place after each token of the answer
    answer       f o o ( x , b )
                         ^ departs: assume that x stands for a
                           ^ "," is where it was expected: on from there

Matches ahead of the last place come first, since an answer repeats its prediction in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.calibration import ChanceTable
from outrider.drafters.ngram import ContextIndex
from outrider.tree import DraftTree
from outrider.types import PredictionStats, Verdict

# As many rows as one block of the linears takes along at little cost; see ``budget``, which keeps
# those that pay.
PREDICTION_DEPTH = 16

_MAX_MATCH = 16
_MAX_OCCURRENCES = 32
_NEARBY = 32  # how far ahead a single matching token still says something

# A guess's chance by how many tokens agree before it: 0, 1, 2-3, 4-7, 8 and more.
_PRIORS = (0.4, 0.6, 0.8, 0.9, 0.95)


class Prediction:
    """One request's prediction, and how far to trust it.

    Args:
        prediction_ids: the expected answer, in the target's ids.
        max_len: tokens to look at, since it takes time to index them; the others come after the
            end of any answer, unless it leaves some out.
    """

    def __init__(self, prediction_ids: Sequence[int], max_len: int) -> None:
        self._ids = list(prediction_ids[:max_len])
        self._index = ContextIndex(_MAX_MATCH, 1, _MAX_OCCURRENCES)
        self._index.extend(self._ids)
        self._chances = ChanceTable()
        self._place = 0  # of the token that is expected next
        self._agreed = 0  # the place after the last token that was in both
        self._num_agreeing = 0  # how many were, before the place; 0 where it is assumed
        self._num_seen = 0  # tokens of the answer that were followed
        self._chain: list[int] = []
        self._num_accepted = 0
        self._num_rejected = 0

    @property
    def stats(self) -> PredictionStats:
        """What became of the tokens that were verified."""
        return PredictionStats(self._num_accepted, self._num_rejected)

    def propose(self, token_ids: Sequence[int], prompt_len: int, max_depth: int) -> DraftTree:
        """A chain behind the last of ``token_ids``; the root alone past the prediction's end."""
        for num_output in range(self._num_seen + 1, len(token_ids) - prompt_len + 1):
            self._follow(token_ids[prompt_len : prompt_len + num_output])
        tree = DraftTree.root(token_ids[-1])
        depth = min(max_depth, PREDICTION_DEPTH)
        self._chain = self._ids[self._place : self._place + depth]
        score = 1.0
        for node, token in enumerate(self._chain):
            score *= self._chance(node)
            tree.looked_up[tree.add(node, token, score)] = score
        return tree

    def observe(self, tree: DraftTree, verdict: Verdict, num_emitted: int) -> None:
        """Count what the step made of the last proposal.

        ``tree`` is what was verified of it, among other guesses; of the verdict's tokens, the first
        ``num_emitted`` are part of the answer.
        """
        for depth, (guess, token) in enumerate(zip(self._chain, verdict.tokens, strict=False)):
            self._chances.record(self._kind(depth), guess == token)
            if guess != token:
                break
        accepted = set(verdict.path[:num_emitted])
        children, node = tree.children(), 0
        for guess in self._chain:
            child = children[node].get(guess)
            if child is None:  # it was left out before the pass, and so was what follows
                break
            node = child
            self._num_accepted += node in accepted
            self._num_rejected += node not in accepted
        self._chain = []

    def _follow(self, output_ids: Sequence[int]) -> None:
        """Move on by the last of these tokens."""
        self._num_seen = len(output_ids)
        if self._ids[self._place : self._place + 1] == [output_ids[-1]]:
            self._place += 1
            self._num_agreeing += 1
            self._agreed = self._place
            return
        found = self._find(output_ids[-_MAX_MATCH:])
        if found is None:
            self._place = min(self._place + 1, len(self._ids))
            self._num_agreeing = 0
        else:
            self._place, self._num_agreeing = found
            self._agreed = self._place

    def _find(self, context: Sequence[int]) -> tuple[int, int] | None:
        """Where to go on, and how many tokens agree there."""
        for length, ends in self._index.matches(context):
            ahead = [end for end in ends if end >= self._agreed]
            if length == 1:
                ahead = [end for end in ahead if end < self._place + _NEARBY]
            if ahead:
                return ahead[0] + 1, length
            if length > 1:
                return ends[-1] + 1, length
        return None

    def _kind(self, depth: int) -> int:
        return min((self._num_agreeing + depth).bit_length(), len(_PRIORS) - 1)

    def _chance(self, depth: int) -> float:
        kind = self._kind(depth)
        return self._chances.chance(kind, _PRIORS[kind])
