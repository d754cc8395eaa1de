"""Rejection sampling that is wrong on purpose, one mistake each, most of them once shipped.

Each replaces one part of a :class:`rejection_toy.RejectionSetup`; the check of the law must see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider import rejection
from outrider.noise import Purpose
from outrider.tree import DraftTree
from outrider.types import Verdict
from tests.exactness.rejection_toy import DrawingDrafter, ExactDraws
from tests.exactness.toy import ToyRequest

Drawn = tuple[int, NDArray[Any]] | None

# --- drafters -----------------------------------------------------------------------------------


class ClaimsToHaveDrawn(DrawingDrafter):
    """The likeliest token, judged as if it had been drawn."""

    def draw(self, request: ToyRequest, probs_W, fixed_W, tree, node) -> Drawn:
        return int(probs_W.argmax()), probs_W


class KeepsFixedMass(DrawingDrafter):
    """Draws beside the fixed children, but says the draft's whole law was drawn from."""

    def draw(self, request: ToyRequest, probs_W, fixed_W, tree, node) -> Drawn:
        drawn = super().draw(request, probs_W, fixed_W, tree, node)
        return None if drawn is None else (drawn[0], probs_W)


class DropsUnlikelyDrafts(DrawingDrafter):
    """A drawn child does not join the tree if it is too unlikely."""

    def draw(self, request: ToyRequest, probs_W, fixed_W, tree, node) -> Drawn:
        drawn = super().draw(request, probs_W, fixed_W, tree, node)
        return None if drawn is None or drawn[1][drawn[0]] < Fraction(1, 4) else drawn


class StaleTemperature(DrawingDrafter):
    """Draws at temperature 1, and hands over the law of the request's temperature."""

    def draw(self, request: ToyRequest, probs_W, fixed_W, tree, node) -> Drawn:
        with_other = _Warmed(request)
        stale_W = self.probs(with_other, tree.path_tokens(node))  # type: ignore[arg-type]
        drawn = super().draw(request, stale_W, fixed_W, tree, node)
        return None if drawn is None else (drawn[0], probs_W)


class _Warmed:
    """A request at temperature 1."""

    def __init__(self, request: ToyRequest) -> None:
        params = replace(request.params, temperature=1.0)
        self.target = request.target
        self.token_ids = request.token_ids
        self.sampler: Any = replace(request.sampler, params=params)  # type: ignore[type-var]


class DraftIdsForTargetIds(DrawingDrafter):
    """Forgets to translate the draft's ids."""

    def draw(self, request: ToyRequest, probs_W, fixed_W, tree, node) -> Drawn:
        drawn = super().draw(request, probs_W, fixed_W, tree, node)
        assert self.vocabulary is not None
        return None if drawn is None else (int(self.vocabulary.place_V[drawn[0]]), drawn[1])


class UnfilteredDraft(DrawingDrafter):
    """Not wrong: drafts from all tokens, whatever the request's filters say."""

    def probs(self, request: ToyRequest, path: Sequence[int]) -> NDArray[Any]:
        params = replace(request.params, top_k=0, top_p=1.0, min_p=0.0)
        sampler: Any = replace(request.sampler, params=params)  # type: ignore[type-var]
        view = sampler.draft_view(request.token_ids, self.vocabulary)
        return view.probs(np.array(request.target.draft().logits([*view.token_ids, *path])), path)


@dataclass
class TellingScores(DrawingDrafter):
    """What is drafted below a drawn token has a score that tells the token's value."""

    def score(self, tree: DraftTree, node: int) -> float:
        return tree.score[node] / (2 if node == 0 else 1 if tree.token[node] == 0 else 10)


# --- draws --------------------------------------------------------------------------------------


class DraftNoiseForResidual(ExactDraws):
    """What is emitted after a rejection comes from the noise that drew the draft."""

    def residual(self, position: int, weights: NDArray[Any]) -> int:
        return self.draft(position, weights)


class NotRenormalised(ExactDraws):
    """Looks up a share of 1 in the residual's running sum; beyond its end is the last token."""

    def residual(self, position: int, weights: NDArray[Any]) -> int:
        rest = max(1 - sum(weights), 0)
        return super().residual(position, np.array([*weights[:-1], weights[-1] + rest]))


class OriginLeftOut(ExactDraws):
    """The same draws for a position in whatever step."""

    def key(self, purpose: Purpose, position: int) -> tuple[int, ...]:
        return super().key(purpose, position)[:-1]


class EightSidedCoin(ExactDraws):
    """Not wrong where odds are whole eighths; but such a coin is 0 often enough to notice."""

    def coin(self, position: int) -> Fraction:
        return Fraction(self.world.winner(self.key(Purpose.COIN, position), (1,) * 8), 8)


# --- the rule -----------------------------------------------------------------------------------


def settle_at_or_below(
    target_V: NDArray[Any], drafted: int, draft_V: NDArray[Any], draws: Any, position: int
) -> int:
    """Accepts at equality too: a coin of 0 takes what the target never says."""
    if draws.coin(position) <= min(target_V[drafted] / draft_V[drafted], Fraction(7, 8)):
        return drafted
    return draws.residual(position, rejection.leftover(target_V, draft_V))


def whole_target(target_V: NDArray[Any], draft_V: NDArray[Any], carried: Any = 1) -> NDArray[Any]:
    """After a rejection, draws from the target's law instead of from what the draft left."""
    return target_V


_leftover = rejection.leftover


def leftover_not_carried(
    target_V: NDArray[Any], draft_V: NDArray[Any], carried: Any = 1
) -> NDArray[Any]:
    """After part of a block, forgets the odds of the part."""
    return _leftover(target_V, draft_V)


def carried_as_own_chance(carried: Any, target_V: Any, draft_V: Any) -> Any:
    """Every node of a block gets the last one's chance."""
    return carried


def not_cut_off(limit: Any, product: Any) -> Any:
    """Odds above 1 make up for later ones below."""
    return product


_own_chance = rejection._own_chance


def own_chance_cut_off(carried: Any, target_V: Any, draft_V: Any) -> Any:
    """Not wrong: cuts off here what :func:`not_cut_off` left."""
    return _own_chance(carried if carried < 1 else 1, target_V, draft_V)


def siblings_keep_their_mass(
    tree: DraftTree, laws: Sequence[NDArray[Any]], draws: Any, *, num_tokens: int, uses_blocks: bool
) -> Verdict:
    """Tries fixed children one by one, and then draws from the whole law, the rejected included."""
    path: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        position = num_tokens + tree.depth[node]
        for place, (token, child) in enumerate(tree.children()[node].items()):
            if draws.coin(position + 1000 * place) < laws[node][token]:
                tokens.append(token)
                path.append(child)
                node = child
                break
        else:
            tokens.append(draws.residual(position, laws[node]))
            return Verdict(tuple(path), tuple(tokens), tree.num_drafted)
