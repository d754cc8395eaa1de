"""One request's draft tree while it grows, layer by layer, under either acceptance rule.

Owns which children a node gets, what they score, which nodes grow on, and which are kept in the
end. Driven by :mod:`outrider.drafters.autoregressive`, which runs the draft module in between;
knows no module and no cache.

With ``k`` children per node, a layer offers ``k * k`` candidates, of which the best ``k`` grow on
(EAGLE-2, Li et al. 2024). All candidates stay until the end, when the best ``max_nodes`` of them
are kept::

    layer 1   the root's best k                         rank: sum of log-probabilities
    layer 2   k x k children, the best k of them grow   along the path
    ...
    kept      the best max_nodes of all; ties go to the earlier node

A rank falls along a path and parents come before children, so what is kept is closed under
parents: it is the best tree of its size.

Under the ``rejection`` rule a chain's tokens are drawn, and a tree's inner nodes have one drawn
child, a leaf, beside their best ``k - 1``. Ranks and scores of drawn nodes do not depend on what
was drawn (:mod:`outrider.rejection` says why they must not).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from outrider.config import SpeculationConfig
from outrider.drafters.base import DraftRequest
from outrider.drafters.calibration import ChanceTable, NoiseWeight, largest, odds_class
from outrider.draws import Draws, draw_child
from outrider.sampling import DraftView
from outrider.tree import DraftTree
from outrider.vocabulary import DraftVocabulary
from outrider.warping import Row

Choice: TypeAlias = tuple[int, float]
"""A draft id and its log-probability."""

_DRAWN_PRIOR = 0.6  # of a drawn draft's being accepted, before any was
_MIN_SCORE = 1e-30  # where the product of many small chances stays, short of 0


@dataclass(frozen=True, slots=True)
class Shape:
    """How far a tree may grow: children per node, nodes in all, depth."""

    num_children: int
    max_nodes: int
    max_depth: int

    @classmethod
    def of(cls, config: SpeculationConfig) -> Shape:
        """The shape that a configuration asks for."""
        assert config.dynamic_tree_max_topK is not None
        assert config.max_total_draft_tokens is not None
        return cls(
            config.dynamic_tree_max_topK, config.max_total_draft_tokens, config.max_draft_len
        )

    def within(self, max_depth: int) -> Shape:
        """The same, no deeper than this."""
        return replace(self, max_depth=min(self.max_depth, max_depth))


@dataclass(slots=True)
class Experience:
    """What one drafter has learnt over all its requests."""

    chances: ChanceTable
    noise_weight: NoiseWeight

    @classmethod
    def none(cls) -> Experience:
        """Nothing yet."""
        return cls(ChanceTable(), NoiseWeight())


class _Guess(NamedTuple):
    """A child before it is in the tree; ``chance`` is that of its being right."""

    token: int
    log_prob: float
    kind: Hashable
    chance: float


class Growth:
    """A request's candidates in one step.

    Args:
        request: whose tokens, parameters and noise.
        shape: bounds; ``max_depth`` is this step's.
        vocabulary: the drafter's; None where it is the target's own.
        experience: read here, extended by :meth:`learn`.
    """

    def __init__(
        self,
        request: DraftRequest,
        shape: Shape,
        vocabulary: DraftVocabulary | None,
        experience: Experience,
    ) -> None:
        sampler, num_tokens = request.sampler, len(request.token_ids)
        self.tree = DraftTree.root(request.token_ids[-1])
        self.shape = shape
        self._view: DraftView = sampler.draft_view(request.token_ids, vocabulary)
        self._vocabulary = vocabulary
        self._experience = experience
        self._temperature = sampler.params.temperature
        # What a probability says of a fixed guess: with the noise in it more than without.
        self._rule = (sampler.params.is_greedy, sampler.params.uses_rejection)
        self._draws: Draws | None = None
        if sampler.params.uses_rejection:
            self._draws = Draws(sampler.seed, sampler.params.choice, num_tokens)
        self._rank = [0.0]
        self._kind: list[Hashable] = [None]
        self._root_row: tuple[Row, Row] | None = None
        self._newest = [0]

    def frontier(self, min_score: float) -> list[int]:
        """The nodes of the newest layer that grow on, in node order; none at the end.

        A tree's drawn nodes are leaves; a chain's one drawn node grows on.
        """
        tree, is_chain = self.tree, self.shape.num_children == 1
        inner = [node for node in self._newest if is_chain or node not in tree.drawn]
        if not inner or tree.depth[inner[0]] >= self.shape.max_depth:
            return []
        best = sorted(inner, key=lambda node: (-self._rank[node], node))[: self.shape.num_children]
        pays = any(tree.score[node] >= min_score for node in best)
        return sorted(best) if pays else []

    def extend(self, nodes: Sequence[int], logits: Sequence[Row]) -> None:
        """Add the children of these nodes, given the draft logits ``[W]`` after each."""
        first = len(self.tree)
        for node, logits_W in zip(nodes, logits, strict=True):
            if self._draws is None:
                path = self.tree.path_tokens(node)
                self.add_fixed(node, self.choices(self.tree.depth[node], path, logits_W))
            else:
                self._add_drawn(node, logits_W, self._draws)
        self._newest = list(range(first, len(self.tree)))

    def kept(self) -> DraftTree:
        """The best nodes of all layers."""
        self.tree.is_finite = self._view.is_finite
        return self.tree.best(self.shape.max_nodes, self.shape.max_depth, rank=self._rank)

    def learn(self, verified: DraftTree, emitted: Sequence[int]) -> None:
        """Count which candidates were right, along the emitted tokens.

        Drawn ones count only where they are in the tree that was ``verified``: being accepted takes
        less luck than being what the target draws by itself.
        """
        children = self.tree.children()
        tried = {tuple(verified.path_tokens(node)) for node in verified.drawn}
        node = 0
        for depth, token in enumerate(emitted):
            for drafted, child in children[node].items():
                if child not in self.tree.drawn or (*emitted[:depth], drafted) in tried:
                    self._experience.chances.record(self._kind[child], drafted == token)
            if token not in children[node]:
                break
            node = children[node][token]
        if self._root_row is not None and emitted:
            pick = emitted[0]
            if self._vocabulary is not None:
                pick = int(self._vocabulary.place_V[pick])
            if pick >= 0:
                self._experience.noise_weight.record(
                    self._temperature, *self._root_row, pick, self.shape.num_children
                )

    def choices(self, depth: int, path: Sequence[int], logits_W: Row) -> list[Choice]:
        """The best children of a node at ``depth``, after ``path``.

        Under the ``coupled`` rule the logits are shifted by a share of the target's own noise.
        """
        row = self._view.warp(logits_W, path)
        noise_W = self._view.noise(depth) if self._draws is None else None
        if noise_W is not None:
            if depth == 0:
                self._root_row = row, noise_W
            weight = self._experience.noise_weight.at(self._temperature)
            row = np.add(row, np.float32(weight) * noise_W, dtype=np.float32)
        chosen = largest(row, self.shape.num_children)
        if not chosen:
            return []
        highest = row[chosen[0]]
        with np.errstate(over="ignore"):  # towards minus infinity, as it should
            total = float(np.exp(row - highest).sum(dtype=np.float64))
        log_total = float(highest) + math.log(total)
        return [(index, float(row[index]) - log_total) for index in chosen]

    def add_fixed(self, node: int, choices: Sequence[Choice]) -> list[int]:
        """Add these children below a node, best first; returns their indices."""
        children = []
        for place, (index, log_prob) in enumerate(choices):
            token = index if self._vocabulary is None else int(self._vocabulary.ids_W[index])
            at_most_0 = min(0.0, log_prob)  # rounding may lift it above
            probability = math.exp(at_most_0)
            kind = (self._rule, min(place, 2), odds_class(probability))
            chance = self._experience.chances.chance(kind, probability)
            children.append(self._add(node, _Guess(token, at_most_0, kind, chance)))
        return children

    def rank(self, node: int) -> float:
        """The log-probability of a node's path."""
        return self._rank[node]

    def _add_drawn(self, node: int, logits_W: Row, draws: Draws) -> None:
        """A drawn child beside ``k - 1`` fixed ones; in a chain the drawn one alone."""
        depth = self.tree.depth[node]
        probs_W = self._view.probs(logits_W, self.tree.path_tokens(node))
        fixed: Sequence[int] = []
        if self.shape.num_children > 1:
            row = np.where(probs_W > 0, probs_W, np.float32(-np.inf))
            fixed = largest(row, self.shape.num_children - 1)
        drawn = draw_child(self._view, probs_W, fixed, depth, draws, self._vocabulary)
        self.add_fixed(node, [(index, math.log(float(probs_W[index]))) for index in fixed])
        if drawn is None:
            return
        token, law_V = drawn
        if not fixed:  # a chain: nothing here may depend on what was drawn, at this node or above
            kind = ("drawn", depth)
            chance = self._experience.chances.chance(kind, _DRAWN_PRIOR)
            self._add(node, _Guess(token, -1.0, kind, chance), law_V)
            return
        left = max(1e-9, 1.0 - float(probs_W[fixed].sum(dtype=np.float64)))
        kind = ("drawn beside", odds_class(left))
        chance = self._experience.chances.chance(kind, _DRAWN_PRIOR * left)
        self._add(node, _Guess(token, math.log(left), kind, chance), law_V)

    def _add(self, node: int, guess: _Guess, law_V: Row | None = None) -> int:
        self._rank.append(self._rank[node] + guess.log_prob)
        self._kind.append(guess.kind)
        score = max(_MIN_SCORE, self.tree.score[node] * guess.chance)
        return self.tree.add(node, guess.token, score, law_V)
