"""The draws of the ``rejection`` rule: drafts, coins and what is emitted instead.

Owns one step's random numbers for one request, each with a key of its own, and how a drafter draws
a child. Used by the drafters and by :mod:`outrider.rejection`; knows neither models nor trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.noise import Purpose, uniform
from outrider.sampling import DraftView
from outrider.vocabulary import DraftVocabulary


class Draws:
    """The random numbers of one request in one step; the same whenever they are asked for.

    Args:
        seed: the request's.
        choice: which of several answers to its prompt.
        origin: the request's tokens when the step began; a later step draws afresh.
    """

    def __init__(self, seed: int, choice: int, origin: int) -> None:
        self._seed = seed
        self._choice = choice
        self._origin = origin

    def draft(self, position: int, probs: NDArray[Any]) -> int:
        """An index drawn in these proportions: the draft for a position."""
        return index_at(self._uniform(Purpose.DRAFT, position), probs)

    def coin(self, position: int) -> float:
        """Uniform in [0, 1): decides on the draft for that position."""
        return self._uniform(Purpose.COIN, position)

    def residual(self, position: int, weights: NDArray[Any]) -> int:
        """An index drawn in these proportions: what stands there if no draft does."""
        return index_at(self._uniform(Purpose.RESIDUAL, position), weights)

    def _uniform(self, purpose: Purpose, position: int) -> float:
        return uniform(self._seed, self._choice, purpose, position, self._origin)


def index_at(share: float, weights: NDArray[Any]) -> int:
    """The index at which the running sum first exceeds ``share`` of the whole; never a weight 0.

    ``share`` is in [0, 1); the weights need not sum to 1, but their sum must be above 0.
    """
    mass = np.cumsum(weights, dtype=np.float64)
    assert mass[-1] > 0
    index = int(np.searchsorted(mass, share * mass[-1], side="right"))
    # A share just below 1 can round up to the whole, which nothing exceeds.
    return min(index, int(np.searchsorted(mass, mass[-1])))


def widened(row: NDArray[Any]) -> NDArray[Any]:
    """A fresh copy of a row: float32 as float64, a more exact type as it is."""
    return row.astype(np.promote_types(row.dtype, np.float64))


def draw_child(  # noqa: PLR0917 - node, law and randomness of one draw; no part makes a whole
    view: DraftView,
    probs_W: NDArray[Any],
    fixed_W: Sequence[int] | NDArray[np.int64],
    depth: int,
    draws: Draws,
    vocabulary: DraftVocabulary | None,
) -> tuple[int, NDArray[Any]] | None:
    """Draw one more child of a node at ``depth``, beside those that are fixed.

    ``probs_W`` is the view's law of the node, ``fixed_W`` the draft ids of the fixed children. The
    child comes from what is left of the law, normalised. Returns its token, in the target's ids,
    and the probabilities ``[V]`` it was drawn from, which belong into the tree with it. None where
    nothing is left; that does not depend on the value that would have been drawn.
    """
    left_W = widened(probs_W)
    left_W[fixed_W] = 0
    total = left_W.sum()
    if not total > 0:
        return None
    # Rounded first: what is drawn from is what the rule will see.
    law_W = (left_W / total).astype(probs_W.dtype)
    place = draws.draft(view.num_tokens + depth, law_W)
    if vocabulary is None:
        return place, law_W
    return int(vocabulary.ids_W[place]), vocabulary.scatter(law_W, 0)
