"""The load policy: draft, and verify what was drafted, only where it pays for its time.

Owns the choices of a step: which guesses are asked for, what a pass of the drafter must promise,
and which nodes are verified. Stands around the drafter, whose ``score`` is a calibrated chance of
being accepted, before the target's pass; :mod:`outrider.costs` says what rounds cost. Under the
coupled rule any choice leaves the text unchanged, so this is about speed alone.

All choices use one currency, the tokens that a second is worth at this load: those that are being
decoded in it, by drafting or plainly, whichever is more::

    a node is verified    if its chance of being accepted exceeds what its row's time is worth
    a pass is made        if a child of the best node it would extend may yield what the pass's time
                          is worth, and the child's own row besides
    looking up, passes    as long as the account of either at this load is not empty

There are two kinds of guesses: those that are looked up in the text, which cost next to nothing,
and those that passes of a module make. Each has an account (:mod:`outrider.accounts`), since the
one may pay where the other does not. A round as a whole is priced three times over: as it was, as
it would have been with what was looked up alone, and plainly. Looking up pays in what it gains over
plain decoding, passes what they gain over the better of the two. With both accounts empty the step
is plain decoding, and the drafter is not called.

One round in a hundred is plain while drafting pays, so that what it is held against is known.
Single rounds are too noisy for the accounts: a token more or less, a processor that somebody else
took. So a round pays by what it should take, corrected by what such rounds took, and by the tokens
hoped for, corrected by what came of such hopes. ``docs/load-policy.md`` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.accounts import ALLOWANCE, Account, Average, Hopes
from outrider.costs import CostTable, RoundCosts, load_of
from outrider.tree import DraftTree
from outrider.types import StepRecord

LEARNING = 0.05  # weight of the newest round in a load's averages
YIELD = 0.5  # of a node's chance: what its best child has, about
BEGINNING = 1.0  # plain rounds that a new account holds, and as much again shared by all requests
MOST_OWED = 4.0  # plain rounds that catching up before a look may count as
PLAIN_ROUNDS = 5  # that a new load begins with: the price that all is held against
NO_PASSES = math.inf  # more than any node can promise, the root included

_new_average = partial(Average, LEARNING)


def _new_account(balance: float, before: Account | None) -> Account:
    """What does not pay for few requests hardly does for many: it is looked at later."""
    if before is None or before.is_open:
        return Account(balance)
    return Account(0.0, is_open=False)


@dataclass(slots=True)
class _Load:
    """What is known of one number of requests at once.

    ``tokens`` and ``seconds`` are of rounds that drafted, ``first_s`` of a round's first pass,
    ``later_s`` of each further one, ``lookup_s`` of drafting without a pass.
    """

    lookups: Account
    passes: Account
    tokens: Average = field(default_factory=_new_average)
    seconds: Average = field(default_factory=_new_average)
    lookup_s: Average = field(default_factory=_new_average)
    first_s: Average = field(default_factory=_new_average)
    later_s: Average = field(default_factory=_new_average)
    num_plain: int = 0
    num_since_plain: int = 0
    is_passing: bool = False  # in the latest round

    @property
    def wants_plain(self) -> bool:
        """Whether plain decoding, which drafting is held against, must be looked at again."""
        return self.num_plain < PLAIN_ROUNDS or self.num_since_plain * ALLOWANCE >= 1

    def follow(self, record: StepRecord) -> None:
        """Take in what a round that drafted took and brought."""
        self.tokens.follow(record.num_tokens)
        self.seconds.follow(record.draft_s + record.verify_s + record.rest_s)
        if not record.draft_passes:
            self.lookup_s.follow(record.draft_s)
            return
        passes_s = max(0.0, record.draft_s - self.lookup_s.value)
        if self.first_s.value and not self.is_passing:
            return  # the first one in a while takes in all that waits
        if record.draft_passes == 1:
            self.first_s.follow(passes_s)
        else:
            first_s = min(self.first_s.value or passes_s / record.draft_passes, passes_s)
            self.later_s.follow((passes_s - first_s) / (record.draft_passes - 1))

    def passes_s(self, num_passes: int) -> float:
        """What so many passes take on average."""
        first_s = self.first_s.value or self.later_s.value
        return first_s + max(0, num_passes - 1) * self.later_s.value


@dataclass(slots=True)
class _Choice:
    """What is verified in the step under way, and what would have been without passes.

    Tokens hoped for, those looked up apart from those of passes, and how many nodes would be
    verified ``without`` any.
    """

    trees: list[DraftTree]
    looked_up: float = 0.0
    of_passes: float = 0.0
    without: float = 0.0
    num_without: int = 0


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
        self._looked_up, self._of_passes = Hopes(), Hopes()
        self._looks_up = False  # whether the drafter was ever seen to
        self._choice = _Choice([])

    def min_score(self, contexts: Sequence[int]) -> float | None:
        """None to leave the drafter out of this step, else what a node must promise to be extended.

        ``contexts`` are the requests' committed lengths. A pass over all requests yields at most
        one more token in each; ``NO_PASSES`` is more than the root itself promises, 0 where
        everything is verified.
        """
        if self._costs is None:
            return 0.0
        num_requests, context = len(contexts), fmean(contexts)
        load = self._load(num_requests)
        if load.wants_plain:
            return None
        if not load.passes.is_open:
            return NO_PASSES if self._looks_up and load.lookups.is_open else None
        rows = np.array([num_requests, 2 * num_requests])
        alone_s, with_child_s = self._costs.curve(num_requests, rows, context)
        seconds = load.later_s.value + float(with_child_s - alone_s)
        return min(1.0, seconds * self._rate(self._costs, contexts) / num_requests / YIELD)

    def prune(
        self, trees: Sequence[DraftTree], contexts: Sequence[int], num_silent: int = 0
    ) -> list[DraftTree]:
        """The batch's trees reduced to the nodes worth verifying; roots always stay.

        ``num_silent`` are the prompt rows that share the pass.
        """
        self._choice = _Choice(list(trees))
        nodes = sorted(
            (-tree.score[node], b, node)
            for b, tree in enumerate(trees)
            for node in range(1, len(tree))
        )
        if not nodes:  # plain decoding does without the arithmetic
            return self._choice.trees
        room = max(0, self._max_rows - len(trees))
        if self._costs is not None:
            # Prompt rows count too: what more rows than the table's cost is not known.
            room = max(0, room - num_silent)
        nodes = nodes[:room]
        if self._costs is not None:
            scores = [-score for score, _, _ in nodes]
            nodes = nodes[: self._best_count(self._costs, scores, contexts, num_silent)]
        kept: list[list[int]] = [[] for _ in trees]
        for _, b, node in nodes:
            kept[b].append(node)
        chosen = [
            tree if len(keep) == tree.num_drafted else tree.keep(keep)
            for tree, keep in zip(trees, kept, strict=True)
        ]
        if self._costs is not None:
            known = [score for tree in trees for score in tree.looked_up.values()]
            known = sorted(known, reverse=True)[:room]
            count = self._best_count(self._costs, known, contexts, num_silent)
            self._looks_up = self._looks_up or bool(known)
            self._choice = _hopes(chosen, known[:count])
        return chosen

    def observe(
        self,
        record: StepRecord,
        contexts: Sequence[int],
        num_silent: int = 0,
        paths: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take in what a step took and what came of it.

        ``paths`` are the accepted nodes of each request's pruned tree.
        """
        if self._costs is None:
            return
        num_requests, context = len(contexts), fmean(contexts)
        served_s = record.verify_s + record.rest_s
        if not num_silent:  # a prompt's rows cost less than others
            self._costs.observe(num_requests, record.num_rows, context, served_s)
        load, choice = self._load(num_requests), self._choice
        if not record.was_asked:
            load.num_plain += 1
            load.num_since_plain = 0
            load.is_passing = False
            if load.lookups.allow():
                self._looked_up.begin_again()
            if load.passes.allow():
                self._of_passes.begin_again()
            return
        load.num_since_plain += 1
        self._count(choice, paths)
        load.follow(record)
        self._pay(self._costs, load, record, contexts, num_silent)
        load.is_passing = record.draft_passes > 0

    def _count(self, choice: _Choice, paths: Sequence[Sequence[int]]) -> None:
        """What came of the guesses of either kind."""
        accepted = [
            node in tree.looked_up
            for tree, path in zip(choice.trees, paths, strict=True)
            for node in path
        ]
        self._looked_up.observe(choice.looked_up, sum(accepted))
        if choice.of_passes:
            self._of_passes.observe(choice.of_passes, len(accepted) - sum(accepted))

    def _pay(
        self,
        costs: RoundCosts,
        load: _Load,
        record: StepRecord,
        contexts: Sequence[int],
        num_silent: int,
    ) -> None:
        """Price the round as it was, without passes, and plainly; the accounts take the gains."""
        choice, num_requests = self._choice, len(contexts)
        plain_s = costs.at(num_requests, num_requests + num_silent, fmean(contexts))
        lookup_s = load.lookup_s.value if self._looks_up or not record.draft_passes else 0.0
        drafted = np.array([sum(tree.num_drafted for tree in choice.trees), choice.num_without])
        rows = num_requests + num_silent + drafted
        served_s, without_s = map(float, costs.curve(num_requests, rows, fmean(contexts)))
        share = self._looked_up.share
        without = num_requests + share * choice.without
        without_s += lookup_s
        gain = without / num_requests - without_s / plain_s
        load.lookups.pay(gain)
        if record.draft_passes:
            tokens = num_requests + share * choice.looked_up
            tokens += self._of_passes.share * choice.of_passes
            seconds = served_s + lookup_s + load.passes_s(record.draft_passes)
            # Tokens are priced at what they take here: where the text repeats itself, next to
            # nothing without a pass; where it does not, a round each.
            token_s = min(plain_s / num_requests, without_s / without)
            if not load.is_passing:
                late_s = record.draft_s - lookup_s - load.passes_s(record.draft_passes)
                load.passes.owed = min(MOST_OWED, load.passes.owed + max(0.0, late_s / plain_s))
            load.passes.pay((tokens * token_s - seconds) / plain_s)
        elif load.passes.is_open:  # a drafter that only looks up: to it both are one
            load.passes.pay(gain)
        elif load.passes.allow():
            self._of_passes.begin_again()

    def _load(self, num_requests: int) -> _Load:
        place = load_of(num_requests)
        if place not in self._loads:
            fewer = max((other for other in self._loads if other < place), default=None)
            before = None if fewer is None else self._loads[fewer]
            balance = BEGINNING + BEGINNING / num_requests
            self._loads[place] = _Load(
                _new_account(balance, None if before is None else before.lookups),
                _new_account(balance, None if before is None else before.passes),
            )
        return self._loads[place]

    def _rate(self, costs: RoundCosts, contexts: Sequence[int]) -> float:
        """Tokens that a second is worth."""
        num_requests = len(contexts)
        plain = num_requests / costs.at(num_requests, num_requests, fmean(contexts))
        load = self._load(num_requests)
        seconds = load.seconds.value
        return max(plain, load.tokens.value / seconds if seconds else 0.0)

    def _best_count(
        self, costs: RoundCosts, scores: Sequence[float], contexts: Sequence[int], num_silent: int
    ) -> int:
        """How many of the best nodes to verify: tokens hoped for, less what their time is worth."""
        base_rows = len(contexts) + num_silent
        rows = np.arange(base_rows, base_rows + len(scores) + 1)
        seconds: NDArray[Any] = costs.curve(len(contexts), rows, fmean(contexts))
        hoped = np.concatenate([[0.0], np.cumsum(scores)])
        return int(np.argmax(hoped - self._rate(costs, contexts) * seconds))


def _hopes(chosen: list[DraftTree], without: Sequence[float]) -> _Choice:
    """What is hoped of the chosen nodes, and of those that would be chosen without passes."""
    choice = _Choice(chosen, without=sum(without), num_without=len(without))
    for tree in chosen:
        choice.looked_up += sum(tree.looked_up.values())
        choice.of_passes += sum(tree.score[1:])
        choice.of_passes -= sum(tree.score[node] for node in tree.looked_up)
    return choice
