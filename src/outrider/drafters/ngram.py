"""Drafts from the request's own text: what followed the last tokens when they occurred before.

Owns an index of each request's contexts and the statistics that say how far to trust a match.
Stands behind the :class:`~outrider.drafters.base.Drafter` contract; runs no model and draws no
noise, so a proposal is a function of the tokens and of the verdicts observed before.

A node of the tree stands for the text plus the node's path. Its children are drafted like this::

    context    ... the cat sat on the | ?         longest earlier occurrences first
    length 4   sat on the -> mat                  chance .8           score .8
    length 2   on the -> mat, sofa                mat is taken        sofa: .2 x .3 = .06
    length 1   the -> cat (2 times), mat, ...     cat: .2 x .7 x .2 = .03

Each candidate is tried in this order, and its chance is that of being right *given that those
before it were wrong*; hence siblings never claim more than 1 together, and scores fall along a
path. The chances are counted per kind of evidence in what was really emitted, over all requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from outrider.drafters.calibration import ChanceTable
from outrider.tree import DraftTree

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.config import SpeculationConfig
    from outrider.drafters.base import DraftRequest, Identified
    from outrider.types import Verdict

_MIN_WIDTH = 3  # candidates to weigh at a node, even where only one is drafted
_MIN_SCORE = 1e-6  # below this a node is noise, and float32 scores stay distinct along a path


class Evidence(NamedTuple):
    """What speaks for a candidate.

    ``rank`` is its place among its siblings, ``match_len`` the number of tokens matched; of
    ``num_total`` occurrences (those that went on with a sibling ranked before it left out),
    ``num_same`` went on with it.
    """

    rank: int
    match_len: int
    num_same: int
    num_total: int


class Candidate(NamedTuple):
    """A token that may come next, and why."""

    token: int
    evidence: Evidence


class _Offer(NamedTuple):
    """A node that may join the tree; the best score sorts first, ties as they were found."""

    negative_score: float
    parent: int
    rank: int
    token: int


class NgramDrafter:
    """Longest-suffix matches over prompt and output, merged into one tree per request.

    With ``use_dynamic_tree`` the best ``max_total_draft_tokens`` nodes of at most
    ``dynamic_tree_max_topK`` children each, else a chain of the best child at each depth.
    Scores are calibrated chances of lying on the accepted path.

    Args:
        config: size and shape of the trees.
        max_match: longest match, in tokens; more tokens than this say little more.
        min_match: shortest match that is drafted from.
        max_occurrences: of a context's occurrences, the most recent so many are counted.
    """

    captures = ()
    num_passes = 0

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        max_match: int = 16,
        min_match: int = 1,
        max_occurrences: int = 32,
    ) -> None:
        assert 1 <= min_match <= max_match
        assert max_occurrences >= 1
        assert config.dynamic_tree_max_topK is not None
        assert config.max_total_draft_tokens is not None
        self._branching = config.dynamic_tree_max_topK
        self._max_nodes = config.max_total_draft_tokens
        self._max_depth = config.max_draft_len
        self._max_match = max_match
        self._new_index = partial(ContextIndex, max_match, min_match, max_occurrences)
        self._calibration = Calibration()
        self._requests: dict[int, _RequestState] = {}

    def admit(self, request: DraftRequest) -> None:
        """Index the prompt."""
        self._state_of(request)

    def adopt(
        self, request: DraftRequest, source_id: int, num_tokens: int, *, takes_over: bool
    ) -> int:
        """Index the prompt afresh: an index goes on with its own text alone."""
        if takes_over:
            self._requests.pop(source_id, None)
        self.admit(request)
        return num_tokens

    def prefill(self, request: DraftRequest, num_committed: int, hidden_TC: Tensor | None) -> None:
        """Nothing to learn: the whole prompt is known from the start."""

    def propose(
        self,
        requests: Sequence[DraftRequest],
        max_depth: Sequence[int],
        min_score: float = 0.0,  # noqa: ARG002 - matching costs next to nothing
    ) -> list[DraftTree]:
        """One tree per request, at most ``max_depth`` and ``max_draft_len`` deep.

        Nodes come best first. A request without a match, or with ``max_depth`` 0, gets the root
        alone.
        """
        return [
            self._grow(self._state_of(request), min(depth, self._max_depth))
            for request, depth in zip(requests, max_depth, strict=True)
        ]

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],  # noqa: ARG002 - the plan holds also what was pruned
        verdicts: Sequence[Verdict],
        hidden: Sequence[Tensor | None],  # noqa: ARG002 - nothing to learn here
    ) -> None:
        """Count which candidates were right, along the emitted tokens."""
        for request, verdict in zip(requests, verdicts, strict=True):
            state = self._requests.get(request.request_id)
            if state is not None:
                self._learn(state.plan, verdict.tokens)
                state.plan = []

    def release(self, request: Identified) -> None:
        """Drop the request's index; unknown requests are fine."""
        self._requests.pop(request.request_id, None)

    def _state_of(self, request: DraftRequest) -> _RequestState:
        """The request's state, its index extended by the tokens that are new."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = _RequestState(self._new_index())
            self._requests[request.request_id] = state
        num_known = len(state.index.tokens)
        assert num_known <= len(request.token_ids), "a request's tokens only grow"
        state.index.extend(request.token_ids[num_known:])
        return state

    def _grow(self, state: _RequestState, max_depth: int) -> DraftTree:
        """Add the best node that is left, again and again; what it leads to joins the rest."""
        tree = DraftTree.root(state.index.tokens[-1])
        state.plan = [_Plan()]
        frontier: list[_Offer] = []
        node = 0
        while tree.num_drafted < self._max_nodes:
            if tree.depth[node] < max_depth:
                self._expand(state, tree, node, frontier)
            if not frontier:
                break
            best = heapq.heappop(frontier)
            node = tree.add(best.parent, best.token, -best.negative_score)
            tree.looked_up[node] = tree.score[node]
            state.plan[best.parent].children[best.token] = node
            state.plan.append(_Plan())
        return tree

    def _expand(
        self, state: _RequestState, tree: DraftTree, node: int, frontier: list[_Offer]
    ) -> None:
        """Offer the best children of a node, as many as it may have."""
        context = [*state.index.tokens[-self._max_match :], *tree.path_tokens(node)]
        candidates = state.index.candidates(context, max(self._branching, _MIN_WIDTH))
        state.plan[node].candidates = candidates
        offers, left = [], tree.score[node]
        for token, evidence in candidates:
            chance = self._calibration.chance(evidence)
            offers.append(_Offer(-left * chance, node, evidence.rank, token))
            left *= 1.0 - chance
        for offer in sorted(offers)[: self._branching]:
            if -offer.negative_score >= _MIN_SCORE:
                heapq.heappush(frontier, offer)

    def _learn(self, plan: Sequence[_Plan], emitted: Iterable[int]) -> None:
        """Walk the emitted tokens through what was planned and count hits and misses."""
        node = 0 if plan else None
        for token in emitted:
            if node is None:
                break
            for candidate in plan[node].candidates:
                is_right = candidate.token == token
                self._calibration.record(candidate.evidence, is_right)
                if is_right:
                    break
            node = plan[node].children.get(token)


@dataclass(slots=True)
class _Plan:
    """What was considered at one node of a proposed tree."""

    candidates: list[Candidate] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _RequestState:
    """One request's index and the plan behind its latest tree."""

    index: ContextIndex
    plan: list[_Plan] = field(default_factory=list)


class ContextIndex:
    """Where each context of up to ``max_match`` tokens ended before: a trie read backwards.

    A child is the same context with one token more in front::

        tokens  a b c a b d a b        (root) ── b ── a     "b" and "a b" end at 1 and 4
        end     0 1 2 3 4 5 6 7               ── a          "a" ends at 0, 3, 6
                                              ── c, d       lone: not followed further

    A lone occurrence is followed only when a second one comes, so a new token costs about as many
    steps as its longest match is long. The end of the text itself is not in the index: it becomes
    an earlier occurrence when the next token shows how it went on.
    """

    def __init__(self, max_match: int, min_match: int, max_occurrences: int) -> None:
        self.tokens: list[int] = []
        self._max_match = max_match
        self._min_match = min_match
        self._max_occurrences = max_occurrences
        self._root: dict[int, _Context] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens; the text so far is indexed token by token."""
        for token in tokens:
            if self.tokens:
                self._insert(len(self.tokens) - 1)
            self.tokens.append(token)

    def matches(self, context: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Length and ends of the context's suffixes that occurred, the longest first.

        ``ends`` are indices into ``tokens``, ascending, each followed by a token. Of a context's
        suffixes with one and the same lone occurrence only the longest is given.
        """
        limit = min(self._max_match, len(context))
        found: list[tuple[int, list[int]]] = []
        level: dict[int, _Context] | None = self._root
        while level is not None and len(found) < limit:
            known = level.get(context[-1 - len(found)])
            if known is None:
                break
            found.append((len(found) + 1, known.ends))
            level = known.longer
        if found and level is None:
            found[-1] = (self._lone_length(found[-1][1][0], context, limit), found[-1][1])
        return found[::-1]

    def candidates(self, context: Sequence[int], width: int) -> list[Candidate]:
        """At most ``width`` tokens that followed the context, the best founded first.

        The longest match comes first, then the most frequent, then the most recent continuation.
        A shorter context is asked only if it occurred at least twice as often as the last one
        asked, since its occurrences contain those of the longer one.
        """
        found: list[Candidate] = []
        seen: set[int] = set()
        num_asked = 0
        for length, ends in self.matches(context):
            if length < self._min_match:
                break
            if len(ends) < 2 * num_asked:
                continue
            num_asked = len(ends)
            counts: dict[int, int] = {}
            for end in reversed(ends[-self._max_occurrences :]):
                token = self.tokens[end + 1]
                if token not in seen:
                    counts[token] = counts.get(token, 0) + 1
            total = sum(counts.values())
            for token in sorted(counts, key=counts.__getitem__, reverse=True):
                found.append(Candidate(token, Evidence(len(found), length, counts[token], total)))
                seen.add(token)
                total -= counts[token]
                if len(found) == width:
                    return found
        return found

    def _lone_length(self, end: int, context: Sequence[int], limit: int) -> int:
        """How many tokens up to ``end`` are the context's last ones."""
        limit = min(limit, end + 1)
        for length in range(limit):
            if self.tokens[end - length] != context[-1 - length]:
                return length
        return limit

    def _insert(self, end: int) -> None:
        """Add one occurrence to every context that ends there, as deep as others share it."""
        level = self._root
        for length in range(1, min(self._max_match, end + 1) + 1):
            token = self.tokens[end - length + 1]
            known = level.get(token)
            if known is None:
                level[token] = _Context([end])
                return
            if known.longer is None:
                known.longer = {}
                before = known.ends[0] - length
                if before >= 0:
                    known.longer[self.tokens[before]] = _Context([known.ends[0]])
            known.ends.append(end)
            level = known.longer


@dataclass(slots=True)
class _Context:
    """Ends of one context's occurrences; ``longer`` is None while there is a lone one."""

    ends: list[int]
    longer: dict[int, _Context] | None = None


class Calibration:
    """How often candidates with such evidence turned out right, over all requests.

    Counts per kind of evidence, on top of a prior (:class:`~.calibration.ChanceTable`).
    """

    def __init__(self) -> None:
        self._table = ChanceTable()

    def chance(self, evidence: Evidence) -> float:
        """Chance in (0, 1) that the candidate is right, those ranked before it being wrong."""
        return self._table.chance(self._kind(evidence), _prior_chance(evidence))

    def record(self, evidence: Evidence, is_right: bool) -> None:
        """Count one trial."""
        self._table.record(self._kind(evidence), is_right)

    @staticmethod
    def _kind(evidence: Evidence) -> tuple[int, int, int]:
        """Rank, length and support in classes that behave alike."""
        rank, match_len, num_same, num_total = evidence
        length_class = match_len if match_len <= 4 else 2 + match_len.bit_length()  # 5-7, 8-15, ...
        is_unanimous = num_same == num_total
        support_class = min(num_same, 4) if is_unanimous else -(4 * num_same // num_total)
        return min(rank, 2), length_class, support_class


@lru_cache(maxsize=4096)
def _prior_chance(evidence: Evidence) -> float:
    """A guess before anything was observed.

    Fitted by eye to SmolLM2-135M-Instruct's own answers: agreement of all occurrences counts by
    the logarithms of their number and of the match's length; where they disagree, the length says
    little and the share of the occurrences much.
    """
    rank, match_len, num_same, num_total = evidence
    if num_same == num_total:
        log_odds = -0.6 + 0.8 * math.log2(match_len) + 0.8 * math.log2(num_same)
    else:
        log_odds = 3.0 * num_same / num_total - 2.3
    return 1.0 / (1.0 + math.exp(-(log_odds - 1.1 * min(rank, 2))))
