"""What :mod:`toy` needs more for the ``rejection`` rule: exact draws, laws, and drafters that draw.

The production step, :mod:`outrider.rejection` and ``draw_child`` run as they are, on rows of
fractions instead of floats. Every draft, coin and residual draw is asked of the :class:`World`,
which follows each outcome with its exact probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from outrider import rejection, step
from outrider.budget import Budget
from outrider.config import SamplingParams
from outrider.costs import CostTable
from outrider.draws import draw_child
from outrider.noise import Purpose
from outrider.tree import DraftTree
from outrider.types import Verdict
from outrider.vocabulary import DraftVocabulary
from tests.exactness import toy
from tests.exactness.race import Weights, World
from tests.exactness.toy import Answer, ExactSampler, Setup, ToyRequest, exact_weights
from tests.exactness.toy_drafters import Guess, Shape, ToyDrafter, blind, chain


@dataclass(frozen=True)
class ExactDraws:
    """Stands in for ``Draws``: the same keys, over the draws of a :class:`World`."""

    world: World
    seed: int
    choice: int
    origin: int

    def draft(self, position: int, probs: NDArray[Any]) -> int:
        return self.world.winner(self.key(Purpose.DRAFT, position), whole(probs))

    def coin(self, position: int) -> Any:
        return ExactCoin(self.world, self.key(Purpose.COIN, position))

    def residual(self, position: int, weights: NDArray[Any]) -> int:
        return self.world.winner(self.key(Purpose.RESIDUAL, position), whole(weights))

    def key(self, purpose: Purpose, position: int) -> tuple[int, ...]:
        return purpose, self.seed, self.choice, position, self.origin


@dataclass(frozen=True)
class ExactCoin:
    """A uniform number that is only ever compared: below t with probability t."""

    world: World
    key: tuple[int, ...]

    def __lt__(self, threshold: Fraction | int) -> bool:
        chance = min(Fraction(threshold), Fraction(1))
        weights = (chance.numerator, chance.denominator - chance.numerator)
        return self.world.winner(self.key, weights) == 0


def whole(weights: Iterable[Fraction | int]) -> Weights:
    """The same proportions in whole numbers."""
    shares = [Fraction(weight) for weight in weights]
    scale = math.lcm(*(share.denominator for share in shares))
    return tuple(int(share * scale) for share in shares)


def fractions(weights: Sequence[int]) -> NDArray[Any]:
    """Probabilities in these proportions; all 0 if there is nothing."""
    return np.array([Fraction(weight, sum(weights) or 1) for weight in weights], dtype=object)


class LawSampler(ExactSampler):
    """Gives laws in fractions, to the rule and to drafters."""

    @property
    def seed(self) -> int | None:
        return self.params.seed

    def laws(
        self, logits_NV: torch.Tensor, token_ids: Sequence[int], tree: DraftTree
    ) -> Sequence[Any]:
        weights = [
            self.weights(logits_NV[node].tolist(), list(token_ids), tree, node)
            for node in range(len(tree))
        ]
        return [fractions(law) if any(law) else None for law in weights]

    def draft_view(self, token_ids: Sequence[int], vocabulary: DraftVocabulary | None) -> ExactView:
        return ExactView(self.params, self.eos_ids, tuple(token_ids), vocabulary)


@dataclass(frozen=True)
class ExactView:
    """Stands in for ``DraftView``: the draft's law under the request's parameters."""

    params: SamplingParams
    eos_ids: frozenset[int]
    token_ids: tuple[int, ...]
    vocabulary: DraftVocabulary | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def probs(self, logits_W: NDArray[Any], path: Sequence[int]) -> NDArray[Any]:
        if self.vocabulary is not None:
            # Of tokens that the draft lacks, something must be said; it is cut off again.
            logits_W = self.vocabulary.scatter(logits_W, logits_W.min())
        prefix = [*self.token_ids, *path]
        weights = exact_weights(logits_W.tolist(), prefix, self.params, eos_ids=self.eos_ids)
        known = range(len(weights)) if self.vocabulary is None else self.vocabulary.ids_W
        return fractions([weights[token] for token in known])


@dataclass
class DrawingDrafter(ToyDrafter):
    """Trees of fixed and drawn children from the toy's draft model; scores know depths only.

    A node of depth d has its ``fixed[d]`` likeliest tokens as children, and one that is drawn
    from the rest if ``draws``. Drawn nodes have children too if ``grows_drawn``, unless they are
    less likely than ``stops_below``. ``sizes`` collects how many nodes were verified in a step.
    """

    shape: Shape = field(default=chain(0))
    guess: Guess = field(default=blind)
    fixed: tuple[int, ...] = (0,)
    draws: bool = True
    grows_drawn: bool = False
    stops_below: Fraction = Fraction(0)
    vocabulary: DraftVocabulary | None = None
    sizes: set[int] = field(default_factory=set)

    def observe(self, requests: Any, trees: Any, verdicts: Sequence[Verdict], hidden: Any) -> None:
        self.sizes.update(verdict.num_drafted for verdict in verdicts)
        super().observe(requests, trees, verdicts, hidden)

    def _tree(self, request: ToyRequest, max_depth: int) -> DraftTree:
        tree = DraftTree.root(request.token_ids[-1])
        leaves: set[int] = set()
        node = 0
        while node < len(tree):
            if node not in leaves and tree.depth[node] < min(len(self.fixed), max_depth):
                leaves |= self._grow(request, tree, node)
            node += 1
        return tree.best(len(tree) if self.max_nodes is None else self.max_nodes, max_depth)

    def _grow(self, request: ToyRequest, tree: DraftTree, node: int) -> set[int]:
        """Add a node's children; returns those that stay leaves."""
        probs_W = self.probs(request, tree.path_tokens(node))
        ranked = sorted(range(len(probs_W)), key=lambda place: (-probs_W[place], place))
        fixed_W = ranked[: self.fixed[tree.depth[node]]]
        ids = range(len(probs_W)) if self.vocabulary is None else self.vocabulary.ids_W
        for place in fixed_W:
            tree.add(node, int(ids[place]), tree.score[node] / 2)
        drawn = self.draw(request, probs_W, fixed_W, tree, node) if self.draws else None
        if drawn is None:
            return set()
        token, law_V = drawn
        child = tree.add(node, token, self.score(tree, node), law_V)
        return set() if self.grows_drawn and law_V[token] >= self.stops_below else {child}

    def probs(self, request: ToyRequest, path: Sequence[int]) -> NDArray[Any]:
        """The draft's law of a child, warped as the request's parameters say."""
        view = request.sampler.draft_view(request.token_ids, self.vocabulary)
        logits_V = np.array(request.target.draft().logits([*request.token_ids, *path]))
        logits_W = logits_V if self.vocabulary is None else logits_V[self.vocabulary.ids_W]
        return view.probs(logits_W, path)

    def draw(
        self,
        request: ToyRequest,
        probs_W: NDArray[Any],
        fixed_W: Sequence[int],
        tree: DraftTree,
        node: int,
    ) -> tuple[int, NDArray[Any]] | None:
        """A drawn child and the law it was drawn from."""
        view = request.sampler.draft_view(request.token_ids, self.vocabulary)
        # The step's own name for them, so that one patch reaches both.
        draws = step.Draws(request.sampler.seed, request.params.choice, len(request.token_ids))
        return draw_child(view, probs_W, fixed_W, tree.depth[node], draws, self.vocabulary)

    def score(self, tree: DraftTree, node: int) -> float:
        """Of a drawn child."""
        return tree.score[node] / 2


def drawn_chain(length: int, **changes: Any) -> DrawingDrafter:
    """Each node drawn, given the one before."""
    return DrawingDrafter(fixed=(0,) * length, grows_drawn=True, **changes)


def drawn_leaves(*num_fixed: int, **changes: Any) -> DrawingDrafter:
    """Greedy multi-draft: a tree of fixed nodes with one drawn leaf below each inner one."""
    return DrawingDrafter(fixed=num_fixed, **changes)


class Untaught(Budget):
    """Asks always: what the toy's passes take on the clock says nothing about its table."""

    def min_score(self, contexts: Any) -> float:
        return 0.0

    def observe(self, *step: Any) -> None:
        pass


@dataclass(frozen=True)
class RejectionSetup(Setup):
    """A :class:`toy.Setup` under the ``rejection`` rule; ``patches`` replace parts of the rule.

    ``costs`` lets the budget choose among the drafted nodes.
    """

    sampler: type[ExactSampler] = LawSampler
    draws: type[ExactDraws] = ExactDraws
    uses_blocks: bool = True
    costs: CostTable | None = None
    patches: dict[str, Any] = field(default_factory=dict)

    def run(self, world: World | None = None) -> tuple[Answer, ...]:
        assert self.params.uses_rejection
        advance = partial(step.speculative_step, uses_blocks=self.uses_blocks)
        budget = partial(Untaught, self.costs)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(step, "speculative_step", advance))
            stack.enter_context(
                mock.patch.object(toy, "Budget", lambda _, max_rows: budget(max_rows=max_rows))
            )
            if world is not None:
                draws = partial(self.draws, world)
                stack.enter_context(mock.patch.object(step, "Draws", draws))
            for name, part in self.patches.items():
                module = step if name == "verify" else rejection
                stack.enter_context(mock.patch.object(module, name, part, create=True))
            return super().run(world)

    def run_one(self, choice: int) -> Answer:
        (answer,) = replace(self, choices=(choice,)).run()
        return answer
