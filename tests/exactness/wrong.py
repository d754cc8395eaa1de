"""Engines that are wrong on purpose, one mistake each; the check of the law must see all of them.

Most of these have been shipped by somebody. Each replaces one part of a :class:`toy.Setup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch

from outrider.models.layers import Segment
from outrider.tree import DraftTree
from outrider.types import Verdict
from tests.exactness.race import Weights
from tests.exactness.toy import (
    TARGET,
    ExactSampler,
    ToyCache,
    ToyRequest,
    ToyTarget,
    exact_weights,
    powers_of_two,
)

# --- noise --------------------------------------------------------------------------------------


class NoiseKeyedByStep(ExactSampler):
    """All positions of a step share one vector."""

    def key(self, num_tokens: int, depth: int) -> tuple[int | None, ...]:
        return super().key(num_tokens, 0 * depth)


class DepthCountedTwice(ExactSampler):
    """A deep node's vector is used again for a later position."""

    def key(self, num_tokens: int, depth: int) -> tuple[int | None, ...]:
        return super().key(num_tokens, 2 * depth)


class ChoiceLeftOut(ExactSampler):
    """All answers to one prompt share their noise."""

    def key(self, num_tokens: int, depth: int) -> tuple[int | None, ...]:
        return self.params.seed, num_tokens + depth


class RedrawAfterRejection(ExactSampler):
    """Where the pick is no child, the correction is drawn afresh instead of being that pick."""

    def pick(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> int:
        pick = super().pick(logits, token_ids, tree, node)
        if not tree.children()[node] or pick in tree.children()[node]:
            return pick
        key = ("redrawn", *self.key(len(token_ids), tree.depth[node]))
        return self.world.winner(key, self.weights(logits, token_ids, tree, node))


class RatioTest(ExactSampler):
    """The classic rule for a chain that ``coupled`` drafts for ``TARGET`` with the shared noise.

    Accept the draft token with probability min(1, target / draft), else draw from the normalised
    max(target - draft, 0) (Leviathan et al. 2023, alg. 1). It needs *its own* noise for that draw:
    with it this is exact, which the tests use to show that the check does not merely recognise our
    own rule. ``wants_shared_residual`` draws from the noise that drew the draft.
    """

    wants_shared_residual = False

    def pick(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> int:
        children = tree.children()[node]
        if not children:
            return super().pick(logits, token_ids, tree, node)
        (drafted,) = children
        key = self.key(len(token_ids), tree.depth[node])
        target_probs = _normalised(self.weights(logits, token_ids, tree, node))
        prefix = [*token_ids, *tree.path_tokens(node)]
        draft_probs = _normalised(powers_of_two(TARGET.draft().logits(prefix)))
        ratio = min(Fraction(1), target_probs[drafted] / draft_probs[drafted])
        coin = (ratio.numerator, ratio.denominator - ratio.numerator)
        if self.world.winner(("coin", *key), coin) == 0:
            return drafted
        residual = [max(t - d, Fraction(0)) for t, d in zip(target_probs, draft_probs, strict=True)]
        residual_key = key if self.wants_shared_residual else ("residual", *key)
        return self.world.winner(residual_key, _whole(residual))


class SharedResidualNoise(RatioTest):
    """The residual draw reuses the noise that chose the rejected draft."""

    wants_shared_residual = True


def _normalised(weights: Weights) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


def _whole(probs: Sequence[Fraction]) -> Weights:
    """The same proportions in whole numbers."""
    scale = 1
    for prob in probs:
        scale *= prob.denominator
    return tuple(int(prob * scale) for prob in probs)


# --- rows, masks, positions, cache --------------------------------------------------------------


class RowOffByOne(ToyTarget):
    """A node is judged by the logits of the row before it; the root by its own."""

    def forward(
        self, segments: Sequence[Segment], cache: ToyCache, *, capture: Sequence[int] = ()
    ) -> SimpleNamespace:
        output = super().forward(segments, cache)
        logits_RV = output.logits_RV
        rows, first = [], 0
        for segment in segments:
            last = first + len(segment.tokens)
            rows += [logits_RV[first : first + 1], logits_RV[first : last - 1]]
            first = last
        output.logits_RV = torch.cat(rows)
        return output


class SiblingsSeeEachOther(ToyTarget):
    """A node attends to everything before it in the tree, not only to its ancestors."""

    def visible(self, segment: Segment, node: int) -> list[int]:
        return list(segment.tokens[: node + 1])


class PositionByIndex(ToyTarget):
    """A node stands at the position of its index in the tree, not of its depth."""

    def depth(self, segment: Segment, node: int) -> int:
        return node


class CommitsTheFirstNodes(ToyCache):
    """The cache keeps as many nodes as were accepted, but the first ones."""

    def commit(self, row: int, path: Sequence[int]) -> None:
        super().commit(row, range(1, 1 + len(path)))


# --- parameters ---------------------------------------------------------------------------------


class StaleTemperature(ExactSampler):
    """Nodes below the root are judged at temperature 1, at which they were drafted."""

    def weights(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> Weights:
        params = replace(self.params, temperature=1.0) if node else self.params
        prefix = [*token_ids, *tree.path_tokens(node)]
        return exact_weights(logits, prefix, params, eos_ids=self.eos_ids)


class PathLeftOut(ExactSampler):
    """Penalties and ``min_tokens`` see the tokens before the step only."""

    def weights(
        self,
        logits: Sequence[float],
        token_ids: Sequence[int],
        tree: DraftTree,
        node: int,
    ) -> Weights:
        return exact_weights(logits, token_ids, self.params, eos_ids=self.eos_ids)


class PenaltiesSeeTheWholeTree(ExactSampler):
    """Penalties count every drafted token, on the node's path or not."""

    def weights(
        self, logits: Sequence[float], token_ids: Sequence[int], tree: DraftTree, node: int
    ) -> Weights:
        prefix = [*token_ids, *tree.token[1:]] if node else token_ids
        return exact_weights(logits, prefix, self.params, eos_ids=self.eos_ids)


# --- the walk and the end -----------------------------------------------------------------------


def any_child(tree: DraftTree, choice_N: Sequence[int]) -> Verdict:
    """Accepts the first child for being a child."""
    path: list[int] = []
    node = 0
    while children := tree.children()[node]:
        node = next(iter(children.values()))
        path.append(node)
    tokens = [tree.token[n] for n in path]
    return Verdict(tuple(path), (*tokens, choice_N[node]), tree.num_drafted)


def bonus_from_the_draft(tree: DraftTree, choice_N: Sequence[int]) -> Verdict:
    """After a fully accepted path the drafter has the last word: it repeats its leaf's token."""
    path: list[int] = []
    node = 0
    while (child := tree.children()[node].get(choice_N[node])) is not None:
        path.append(child)
        node = child
    is_bonus = bool(path) and not tree.children()[node]
    last = tree.token[node] if is_bonus else choice_N[node]
    return Verdict(tuple(path), (*(tree.token[n] for n in path), last), tree.num_drafted)


class StopsAtStepEndsOnly(ToyRequest):
    """Looks for the end of the answer in the last token of each step."""

    def emit(self, verdict: Verdict) -> None:
        *accepted, last = verdict.tokens
        output: Any = self.output
        self.token_ids += accepted
        output.token_ids += accepted
        super().emit(replace(verdict, path=(), tokens=(last,)))
