"""Drafting with a module that predicts one token at a time: a draft model, EAGLE-3, MTP.

Owns the module's cache and the order of its passes. The first pass of a step takes in what the
target has decided since the last one, with the target's true states, and predicts the root's
children; each further pass runs one layer of the tree. Slots of the module's own cache::

    [0 ........ committed)[committed ...... + T)[layer 1][layer 2] ...
     true rows             rows of the last      drafted rows: written over
                           verdict, committed    in the next step
                           by the first pass

Drafted rows are never kept, accepted or not: the next step's first pass computes the accepted ones
again from true states, which costs next to nothing and keeps acceptance from drifting.

A request that is not asked for guesses only collects its rows, which wait for the first pass of the
step that asks again, so most of a text that is decoded plainly is never taken in. Only where more
than ``MAX_WAITING`` rows wait they are taken in without being asked, those of all requests together
that have many, so that neither their states nor that first pass grow without bound.

Row t of a head joins the state at position t with token t + 1 (``token_shift`` 1), row t of a draft
model is token t (``token_shift`` 0); in both the newest true row predicts the root's children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from outrider.config import SpeculationConfig
from outrider.drafters.base import DraftRequest, Identified
from outrider.drafters.growth import Experience, Growth, Shape
from outrider.kv_cache import KVCache
from outrider.models.heads.base import DraftOutput
from outrider.models.layers import Segment
from outrider.tree import DraftTree
from outrider.types import Verdict
from outrider.vocabulary import DraftVocabulary

# Rows of a request that may wait to be taken in: as long as most answers, small beside its keys and
# values.
MAX_WAITING = 256
MAX_LATE = 32  # rows of a request that its first pass takes in besides; more come before it
MAX_ROWS = 512  # of a pass that only takes in


class DraftModule(Protocol):
    """What drafts: (tokens, parents, features) to draft logits and features."""

    @property
    def captures(self) -> tuple[int, ...]:
        """The target's states that true rows need; () for a module that reads tokens only."""
        ...

    @property
    def token_shift(self) -> int:
        """Which token row t holds: t + ``token_shift``."""
        ...

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """The module's own keys and values."""
        ...

    def forward(
        self,
        segments: Sequence[Segment],
        feature_RX: Tensor,
        cache: KVCache,
        *,
        from_target: bool,
    ) -> DraftOutput:
        """Run rows on the target's states, or on those the module fed back itself.

        ``feature_RX`` has no columns for a module that reads tokens only.
        """
        ...


@dataclass(slots=True)
class _State:
    """One request's cache row, states that are not taken in yet, and the tree that is out."""

    row: int
    waiting: list[Tensor] = field(default_factory=list)
    num_waiting: int = 0
    growth: Growth | None = None

    def add(self, states_TC: Tensor) -> None:
        """These rows wait too."""
        self.waiting.append(states_TC)
        self.num_waiting += len(states_TC)

    def take(self, count: int) -> None:
        """The first ``count`` rows wait no longer."""
        left = torch.cat(self.waiting)[count:]
        self.num_waiting = len(left)
        self.waiting = [left] if self.num_waiting else []


@dataclass(slots=True)
class _Layers:
    """The drafted rows of one growing tree, as they lie in the module's cache."""

    growth: Growth
    row: int
    feature_of: dict[int, Tensor]
    order: list[int] = field(default_factory=list)

    def segment(self, nodes: Sequence[int]) -> Segment:
        """The next layer's rows behind the earlier ones; each sees its ancestors and itself."""
        tree = self.growth.tree
        self.order += nodes
        depths = [tree.depth[node] - 1 for node in self.order]
        is_chain = len(nodes) == 1 and depths == list(range(len(depths)))
        mask = None
        if not is_chain:
            place = {node: i for i, node in enumerate(self.order)}
            mask = torch.zeros(len(nodes), len(self.order), dtype=torch.bool)
            for i, node in enumerate(nodes):
                ancestor = node
                while ancestor > 0:
                    mask[i, place[ancestor]] = True
                    ancestor = tree.parent[ancestor]
        return Segment(self.row, [tree.token[node] for node in nodes], depths, mask)


class AutoregressiveDrafter:
    """Grows a chain or a dynamic tree per request, all requests in one pass per layer.

    Args:
        module: what predicts.
        config: the tree's shape.
        max_batch_size: most requests at once.
        max_model_len: most tokens of one request.
        vocabulary: the module's; None where it is the target's own.
    """

    def __init__(
        self,
        module: DraftModule,
        config: SpeculationConfig,
        *,
        max_batch_size: int,
        max_model_len: int,
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self.captures = module.captures
        self.num_passes = 0
        self.module = module
        self._shape = Shape.of(config)
        self.vocabulary = vocabulary
        self._experience = Experience.none()
        self._cache = module.new_cache(
            max_batch_size=max_batch_size,
            num_slots=max_model_len + drafted_slots(config),
        )
        self._states: dict[int, _State] = {}

    def admit(self, request: DraftRequest) -> None:
        """Take a row of the module's cache."""
        self._states[request.request_id] = _State(self._cache.allocate())

    def adopt(
        self, request: DraftRequest, source_id: int, num_tokens: int, *, takes_over: bool
    ) -> int:
        """Start on another request's true rows: its cache row itself, or a copy of their part.

        A head's row t is made of token t + 1 too, so the row of the last shared position is another
        one. Its state is at hand only while it waits to be taken in.
        """
        source = self._states.get(source_id)
        if source is None:
            self.admit(request)
            return 0
        num_known = self._cache.committed(source.row)
        num_rows = min(num_known, num_tokens - self.module.token_shift)
        num_states = max(0, num_tokens - num_known)
        waiting = source.waiting
        if takes_over:
            del self._states[source_id]
            self._cache.rollback(source.row, num_rows)
            state = _State(source.row)
        else:
            state = _State(self._cache.allocate())
            self._cache.copy_prefix(source.row, state.row, num_rows)
        if waiting and num_states:
            state.add(torch.cat(waiting)[:num_states])
        self._states[request.request_id] = state
        return num_rows + state.num_waiting if self.captures else num_tokens

    def prefill(self, request: DraftRequest, num_committed: int, hidden_TC: Tensor | None) -> None:
        """Keep the prompt's states; take them in only where very many wait.

        A short prompt's rows share the first pass that is made for guesses, if one ever is.
        """
        state = self._states[request.request_id]
        if hidden_TC is not None:
            state.add(hidden_TC)
        end = num_committed + self.module.token_shift
        tokens = request.token_ids[self._first_token(state) : end]
        if len(tokens) > MAX_WAITING:
            self._take_in([(state, tokens)], is_silent=True)

    def propose(
        self, requests: Sequence[DraftRequest], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        """One tree per request; the root alone where the target's states are not there yet.

        That is so in a request's first step, which is what computes the prompt's last states.
        """
        trees = [DraftTree.root(request.token_ids[-1]) for request in requests]
        if min_score > 1:  # which is the root's
            return trees
        rows: list[tuple[_State, list[int]]] = []
        late: list[tuple[_State, list[int]]] = []
        growing: list[tuple[int, _Layers]] = []
        for b, (request, depth) in enumerate(zip(requests, max_depth, strict=True)):
            state = self._states[request.request_id]
            tokens = self._new_tokens(request, state)
            if depth < 1 or not tokens:
                continue
            if len(tokens) > MAX_LATE:
                late.append((state, tokens[:-1]))
                tokens = tokens[-1:]
            shape = self._shape.within(depth)
            state.growth = Growth(request, shape, self.vocabulary, self._experience)
            rows.append((state, tokens))
            growing.append((b, _Layers(state.growth, state.row, {})))
        if growing:
            self._catch_up(late)
            layers = [layer for _, layer in growing]
            output = self._take_in(rows, is_silent=False)
            self._extend(layers, [[0]] * len(layers), output)
            self._grow(layers, min_score)
            for b, layer in growing:
                trees[b] = layer.growth.kept()
        return trees

    def observe(
        self,
        requests: Sequence[DraftRequest],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Sequence[Tensor | None],
    ) -> None:
        """Count hits and misses; keep the new states for the next step's first pass.

        Where a request has very many rows that wait, those of all that have many are taken in here.
        States that a call that failed left behind are not taken twice.
        """
        many: list[tuple[_State, list[int]]] = []
        is_due = False
        for request, tree, verdict, hidden_TC in zip(
            requests, trees, verdicts, hidden, strict=True
        ):
            state = self._states[request.request_id]
            if state.growth is not None:
                growth, state.growth = state.growth, None
                growth.learn(tree, verdict.tokens)
            num_rows = len(request.token_ids) - self._first_token(state)
            if hidden_TC is not None and state.num_waiting < num_rows:
                state.add(hidden_TC)
            if num_rows > MAX_WAITING // 2 and (tokens := self._new_tokens(request, state)):
                many.append((state, tokens[:-1]))  # the newest row's logits are the next guesses
                is_due = is_due or num_rows > MAX_WAITING
        if is_due:
            self._catch_up(many)

    def release(self, request: Identified) -> None:
        """Give the cache row back, scrubbed: states of a target that failed are not finite."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._cache.free(state.row, scrub=True)

    def _first_token(self, state: _State) -> int:
        """Which token the first row that is not taken in yet holds."""
        return self._cache.committed(state.row) + self.module.token_shift

    def _new_tokens(self, request: DraftRequest, state: _State) -> list[int]:
        """The tokens of the rows to take in; none while a head lacks some of their states."""
        tokens = request.token_ids[self._first_token(state) :]
        is_complete = not self.captures or len(tokens) == state.num_waiting
        return tokens if is_complete else []

    def _catch_up(self, pairs: Sequence[tuple[_State, list[int]]]) -> None:
        """Take in rows of several requests, in passes of at most ``MAX_ROWS`` or one request.

        They guess nothing, so they are not counted as passes.
        """
        num_passes = self.num_passes
        group: list[tuple[_State, list[int]]] = []
        for pair in pairs:
            if group and sum(len(tokens) for _, tokens in [*group, pair]) > MAX_ROWS:
                self._take_in(group, is_silent=True)
                group = []
            group.append(pair)
        if group:
            self._take_in(group, is_silent=True)
        self.num_passes = num_passes

    def _take_in(
        self, pairs: Sequence[tuple[_State, list[int]]], *, is_silent: bool
    ) -> DraftOutput:
        """Run and commit true rows; logits behind the last of each, unless silent."""
        segments, features = [], []
        for state, tokens in pairs:
            num_silent = len(tokens) if is_silent else len(tokens) - 1
            segments.append(Segment(state.row, tokens, range(len(tokens)), num_silent=num_silent))
            if state.waiting:
                features.append(torch.cat(state.waiting)[: len(tokens)])
        output = self._pass(segments, features, from_target=True)
        for state, tokens in pairs:  # not before: a pass that fails is tried again
            if state.waiting:
                state.take(len(tokens))
            self._cache.extend(state.row, len(tokens))
        return output

    def _grow(self, layers: Sequence[_Layers], min_score: float) -> None:
        """Layer by layer, until the trees have no nodes that are worth a pass.

        A pass is for all trees that grow on, so those must promise together as much as if every
        tree promised ``min_score``.
        """
        while True:
            frontiers = [layer.growth.frontier(min_score) for layer in layers]
            active = [
                (layer, nodes) for layer, nodes in zip(layers, frontiers, strict=True) if nodes
            ]
            promised = sum(
                max(layer.growth.tree.score[node] for node in nodes) for layer, nodes in active
            )
            if not active or promised < min_score * len(layers):
                return
            segments, features = [], []
            for layer, nodes in active:
                segments.append(layer.segment(nodes))
                parents = [layer.growth.tree.parent[node] for node in nodes]
                features += [layer.feature_of[parent] for parent in parents if self.captures]
            output = self._pass(segments, features, from_target=False)
            self._extend([layer for layer, _ in active], [nodes for _, nodes in active], output)

    def _extend(
        self, layers: Sequence[_Layers], nodes_of: Sequence[Sequence[int]], output: DraftOutput
    ) -> None:
        """Hand each tree its rows of a pass."""
        logits_RW = output.logits_RW.numpy()
        first = 0
        for layer, nodes in zip(layers, nodes_of, strict=True):
            rows = range(first, first + len(nodes))
            first += len(nodes)
            if output.feature_RD is not None:
                pieces = output.feature_RD[rows.start : rows.stop].split(1)
                layer.feature_of.update(zip(nodes, pieces, strict=True))
            layer.growth.extend(nodes, list(logits_RW[rows.start : rows.stop]))

    def _pass(
        self, segments: Sequence[Segment], features: Sequence[Tensor], *, from_target: bool
    ) -> DraftOutput:
        """One pass; ``features`` are the rows' states, in pieces ``[T, X]``."""
        self.num_passes += 1
        feature_RX = torch.cat(list(features)) if features else torch.empty(0, 0)
        return self.module.forward(segments, feature_RX, self._cache, from_target=from_target)


def drafted_slots(config: SpeculationConfig) -> int:
    """Slots that the drafted rows of one request take in the module's cache, at most."""
    assert config.dynamic_tree_max_topK is not None
    return config.dynamic_tree_max_topK * (config.max_draft_len - 1)
