"""What is trained: one file per kind of drafter, each a module and what one batch's loss is.

Owns which options stand for which recipe, and how far ahead each looks unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from outrider.config import Method
from outrider.errors import ParameterError
from outrider.training.recipes.base import (
    Objective,
    Recipe,
    StepResults,
    TargetEnds,
    decaying_weights,
    predicted_acceptance,
)
from outrider.training.recipes.draft import DraftOptions, DraftRecipe, default_layers
from outrider.training.recipes.eagle3 import Eagle3Options, Eagle3Recipe
from outrider.training.recipes.medusa import MedusaOptions, MedusaRecipe
from outrider.training.recipes.mtp import MtpOptions, MtpRecipe

__all__ = [
    "DraftOptions",
    "Eagle3Options",
    "MedusaOptions",
    "MtpOptions",
    "Objective",
    "Options",
    "Recipe",
    "StepResults",
    "TargetEnds",
    "create_recipe",
    "default_layers",
    "predicted_acceptance",
    "step_weights",
]

Options: TypeAlias = Eagle3Options | MtpOptions | MedusaOptions | DraftOptions


@dataclass(frozen=True, slots=True)
class _Steps:
    num_steps: int
    decay: float
    is_normalised: bool = False


_STEPS = {
    Method.EAGLE3: _Steps(5, 0.8),  # Li et al. 2025 train 7 for trees of that depth
    Method.MTP: _Steps(3, 0.6, is_normalised=True),  # FastMTP: .51, .31, .18
    Method.MEDUSA: _Steps(4, 0.8),  # Cai et al. 2024, section 2.2.1
    Method.DRAFT: _Steps(1, 1.0),
}


def step_weights(
    method: Method, num_steps: int | None = None, decay: float | None = None
) -> tuple[float, ...]:
    """The published step weights of a method, or of as many steps and such a decay as asked for.

    Raises:
        ParameterError: a method that is not trained, or steps or a decay out of range.
    """
    if method not in _STEPS:
        raise ParameterError(
            f"method: {method} is not trained; allowed: {', '.join(sorted(_STEPS))}"
        )
    usual = _STEPS[method]
    return decaying_weights(
        usual.num_steps if num_steps is None else num_steps,
        usual.decay if decay is None else decay,
        normalised=usual.is_normalised,
    )


def create_recipe(
    options: Options,
    target: TargetEnds,
    weights: Mapping[str, Tensor],
    objective: Objective,
    *,
    seed: int,
) -> Recipe:
    """The recipe that these options belong to.

    ``weights`` are the target's, read one by one and not kept; ``seed`` is of what is drawn.
    """
    if isinstance(options, Eagle3Options):
        return Eagle3Recipe(target, weights, objective, options, seed=seed)
    if isinstance(options, MtpOptions):
        return MtpRecipe(target, weights, objective, options, seed=seed)
    if isinstance(options, MedusaOptions):
        return MedusaRecipe(target, objective, options)
    return DraftRecipe(target, weights, objective, options)
