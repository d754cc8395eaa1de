"""The load policy: draft, and verify what was drafted, only where it pays for its time.

Owns the three choices of a step: whether the drafter is asked at all, what its passes must promise,
and which of its nodes are verified. Stands around the drafter, whose ``score`` is a calibrated
chance of being accepted, before the target's pass; :mod:`outrider.costs` says what rounds cost.
Under the coupled rule any choice leaves the text unchanged, so this is about speed alone.

All three choices use one currency, the tokens that a second is worth at this load: those that are
being decoded in it, by drafting or plainly, whichever is more::

    a node is verified     if its chance of being accepted exceeds what its row's time is worth
    a pass is made         if the best node it would extend may yield what the pass's time is worth
    the drafter is asked   as long as the account of this load is not empty

The account says in plain rounds what drafting has saved. A round that drafted pays in the time that
its tokens would have taken plainly, less its own; a plain round pays in 1 %. It holds little, so
that a good past does not pay for a bad present. Empty, it closes, and opens again once a round is
in it. So drafting that loses is left out after a few rounds, and costs about 1 % from then on,
which is what looking whether it would pay again takes; a step without drafting is plain decoding,
and the drafter is not called. One round in a hundred is plain while drafting pays, so that what it
is held against is known.

Single rounds are too noisy for that account: a token more or less, a processor that somebody else
took. So a round pays by what it should take, corrected by what such rounds took, and by the tokens
hoped for, corrected by what came of such hopes. ``docs/load-policy.md`` has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from outrider.costs import CostTable, RoundCosts, load_of
from outrider.tree import DraftTree
from outrider.types import StepRecord

LEARNING = 0.05  # weight of the newest round in the load's rate
YIELD = 0.5  # of a node's chance: what its best child has, about
FADING = 0.98  # of what hopes came to, per round that drafted
TRUST = 5.0  # tokens, hoped for and accepted, that a new load is taken to have seen
CEILING = 8.0  # most that an account holds, in plain rounds
BEGINNING = 3.0  # what a new one begins with
PLAIN_ROUNDS = 5  # that a new load begins with: the price that all is held against
OPENING = 1.0  # what a closed account must hold before it opens again
ALLOWANCE = 0.01  # what a plain round pays in


@dataclass(slots=True)
class _Load:
    """What is known of one number of requests at once."""

    first_s: float = 0.0  # moving averages over rounds that drafted: the drafter's first pass
    later_s: float = 0.0  # each further one
    tokens: float = 0.0
    seconds: float = 0.0
    hoped: float = TRUST  # fading sums: tokens hoped for, and what became of them
    accepted: float = TRUST
    account: float = BEGINNING
    is_open: bool = True
    num_plain: int = 0
    num_since_plain: int = 0

    @property
    def wants_plain(self) -> bool:
        """Whether plain decoding, which drafting is held against, must be looked at again."""
        return self.num_plain < PLAIN_ROUNDS or self.num_since_plain * ALLOWANCE >= 1

    def follow(self, record: StepRecord) -> None:
        """Take in what a round that drafted took and brought."""
        self.tokens = _towards(self.tokens, record.num_tokens)
        self.seconds = _towards(self.seconds, record.draft_s + record.verify_s + record.rest_s)
        if record.draft_passes < 2:
            self.first_s = _towards(self.first_s, record.draft_s)
        else:
            first_s = min(self.first_s or record.draft_s / record.draft_passes, record.draft_s)
            later_s = (record.draft_s - first_s) / (record.draft_passes - 1)
            self.later_s = _towards(self.later_s, later_s)

    def drafting_s(self, record: StepRecord) -> float:
        """What such drafting takes on average."""
        return (self.first_s or self.later_s) + max(0, record.draft_passes - 1) * self.later_s

    def credited(self, hoped: float, accepted: float) -> float:
        """What a round's guesses count for: the tokens hoped for, as far as hopes came true."""
        self.hoped = FADING * self.hoped + hoped
        self.accepted = FADING * self.accepted + accepted
        return hoped * self.accepted / self.hoped if hoped else 0.0

    def pay(self, rounds: float) -> None:
        """Pay so many plain rounds' time in, or out if negative."""
        self.account = min(CEILING, self.account + rounds)
        self.is_open = self.account > (0.0 if self.is_open else OPENING)


def _towards(average: float, value: float) -> float:
    """The average moved on by a new value; the first one is the average."""
    return average + LEARNING * (value - average) if average else value


class Budget:
    """Decides for each step what is drafted and verified.

    Args:
        table: the target's costs, or None to ask always and verify everything (pinned settings).
        max_rows: most rows of one pass.
    """

    def __init__(self, table: CostTable | None, *, max_rows: int) -> None:
        self._costs = None if table is None else RoundCosts(table)
        self._max_rows = max_rows
        self._loads: dict[int, _Load] = {}
        self._hoped = 0.0  # sum of the chances of the nodes that are being verified

    def min_score(self, contexts: Sequence[int]) -> float | None:
        """None to leave the drafter out of this step, else what a node must promise to be extended.

        ``contexts`` are the requests' committed lengths. A pass over all requests yields at most
        one more token in each; 0 where everything is verified.
        """
        if self._costs is None:
            return 0.0
        load = self._load(len(contexts))
        if not load.is_open or load.wants_plain:
            return None
        return load.later_s * self._rate(self._costs, contexts) / len(contexts) / YIELD

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """The batch's trees reduced to the nodes worth verifying; roots always stay.

        ``num_silent`` are the prompt rows that share the pass.
        """
        nodes = sorted(
            (-tree.score[node], b, node)
            for b, tree in enumerate(trees)
            for node in range(1, len(tree))
        )
        nodes = nodes[: max(0, self._max_rows - len(trees))]
        if self._costs is not None:
            # Prompt rows count too: what more rows than the table's cost is not known.
            nodes = nodes[: max(0, self._max_rows - len(trees) - num_silent)]
            scores = [-score for score, _, _ in nodes]
            nodes = nodes[: self._best_count(self._costs, scores, contexts, num_silent)]
        self._hoped = -sum(negative for negative, _, _ in nodes)
        kept: list[list[int]] = [[] for _ in trees]
        for _, b, node in nodes:
            kept[b].append(node)
        return [
            tree if len(keep) == tree.num_drafted else tree.keep(keep)
            for tree, keep in zip(trees, kept, strict=True)
        ]

    def observe(self, record: StepRecord, contexts: Sequence[int], num_silent: int = 0) -> None:
        """Take in what a step took and what came of it."""
        if self._costs is None:
            return
        num_requests, context = len(contexts), fmean(contexts)
        served_s = record.verify_s + record.rest_s
        if not num_silent:  # a prompt's rows cost less than others
            self._costs.observe(num_requests, record.num_rows, context, served_s)
        load = self._load(num_requests)
        if not record.was_asked:
            load.num_plain += 1
            load.num_since_plain = 0
            load.pay(ALLOWANCE)
            return
        load.num_since_plain += 1
        plain_s = self._costs.at(num_requests, num_requests + num_silent, context)
        load.follow(record)
        accepted = record.num_tokens - num_requests
        rows = record.num_rows + num_silent
        taken_s = load.drafting_s(record) + self._costs.at(num_requests, rows, context)
        load.pay(1 + load.credited(self._hoped, accepted) / num_requests - taken_s / plain_s)

    def _load(self, num_requests: int) -> _Load:
        return self._loads.setdefault(load_of(num_requests), _Load())

    def _rate(self, costs: RoundCosts, contexts: Sequence[int]) -> float:
        """Tokens that a second is worth."""
        num_requests = len(contexts)
        plain = num_requests / costs.at(num_requests, num_requests, fmean(contexts))
        load = self._load(num_requests)
        return max(plain, load.tokens / load.seconds if load.seconds else 0.0)

    def _best_count(
        self, costs: RoundCosts, scores: Sequence[float], contexts: Sequence[int], num_silent: int
    ) -> int:
        """How many of the best nodes to verify: tokens hoped for, less what their time is worth."""
        base_rows = len(contexts) + num_silent
        rows = np.arange(base_rows, base_rows + len(scores) + 1)
        seconds = costs.curve(len(contexts), rows, fmean(contexts))
        hoped = np.concatenate([[0.0], np.cumsum(scores)])
        return int(np.argmax(hoped - self._rate(costs, contexts) * seconds))
