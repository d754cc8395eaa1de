"""The recipe for a draft model: some of the target's layers, distilled from the whole.

Owns the choice of layers and the model's arithmetic in training; served as any draft model, by
:mod:`outrider.drafters.draft_model`. Embedding and output head are the target's and stay as they
are, which for a small target is most of its weights. The objective's vocabulary only says which
tokens the model is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import SharedEndsConfig
from outrider.training.packing import Batch
from outrider.training.recipes.base import (
    Objective,
    Recipe,
    StepResults,
    TargetEnds,
    count_unbroken,
)
from outrider.training.recipes.layers import Norm, Rotation, TrainableLayer, copy_layer

AHEAD = 1
CHAIN_DEPTH = 5  # how far the counts of unbroken chains go


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """What a draft model is made of.

    Attributes:
        layers: the target's layers it begins as, ascending; see :func:`default_layers`.
        mlp_size: units of each MLP to keep, those with the largest weights; None for all.
    """

    layers: tuple[int, ...]
    mlp_size: int | None = None


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The first layer, which reads embeddings, and the last, which the output head reads."""
    return tuple(sorted({0, num_layers - 1}))


class DraftRecipe(Recipe):
    """A draft model in training; reads tokens only.

    Args:
        target: what is drafted for.
        weights: the target's, to begin from.
        objective: what is minimised; one step, since the model feeds nothing back but tokens.
        options: the model's.

    Raises:
        ParameterError: more than one step weight, layers that are not the target's, or more MLP
            units than it has.
    """

    def __init__(
        self,
        target: TargetEnds,
        weights: Mapping[str, Tensor],
        objective: Objective,
        options: DraftOptions,
    ) -> None:
        if objective.num_steps != 1:
            raise ParameterError(
                f"step_weights: {objective.num_steps} of them; a draft model is trained on one step"
            )
        check_fit(options, target.config)
        super().__init__(target, objective, ahead=AHEAD)
        config, layers = target.config, options.layers
        self._config = replace(
            config,
            num_layers=len(layers),
            mlp_size=options.mlp_size or config.mlp_size,
            no_rope_layers=_places(layers, config.no_rope_layers),
            sliding_layers=_places(layers, config.sliding_layers),
        )
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList()
        for index in layers:
            window = config.sliding_window if index in config.sliding_layers else None
            has_rope = index not in config.no_rope_layers
            layer = TrainableLayer(self._config, has_rope=has_rope, window=window)
            mlp_rows = _largest_units(weights, index, self._config.mlp_size)
            copy_layer(layer, weights, index, mlp_rows=mlp_rows)
            self.layers.append(layer)
        with torch.no_grad():
            self.norm.weight.copy_(weights["norm.weight"])
        self.to(target.embedding_VD.device)

    def losses(self, batch: Batch) -> StepResults:
        """One causal pass over the batch; ``tested_S`` and ``joint_S`` go ``CHAIN_DEPTH`` deep."""
        output_PD = self.run(batch)
        row_R = self.is_scored(batch, 0).nonzero().squeeze(1)
        return self.score(batch, [output_PD[row_R]], [row_R])

    def run(self, batch: Batch) -> Tensor:
        """What the output head reads, ``[P, D]``."""
        rotation = Rotation(self._config, batch.position_P)
        x_PD = self.embed(batch.token_P)
        for layer in self.layers:
            x_PD = layer(x_PD, rotation, batch.lengths)
        return self.norm(x_PD)

    def head_config(self) -> SharedEndsConfig:
        """The model, between the target's embedding and output head."""
        return SharedEndsConfig.of(self._config)

    def count_chains(
        self, batch: Batch, is_tested_SP: Tensor, is_hit_SP: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A chain runs along its sequence: depth k of the one at row t is row t + k's only step."""
        is_there_KP = torch.stack(
            [batch.has_ahead(k, only_response=False) for k in range(CHAIN_DEPTH)]
        )

        def along(is_true_P: Tensor) -> Tensor:
            return torch.stack([is_true_P.roll(-k) for k in range(CHAIN_DEPTH)]) & is_there_KP

        return count_unbroken(along(is_tested_SP[0])), count_unbroken(along(is_hit_SP[0]))


def check_fit(options: DraftOptions, config: DecoderConfig) -> None:
    """Refuse what the target does not have.

    Raises:
        ParameterError: layers that are not the target's, or more MLP units than it has.
    """
    layers = options.layers
    is_choice = bool(layers) and list(layers) == sorted(set(layers))
    if not is_choice or layers[0] < 0 or layers[-1] >= config.num_layers:
        raise ParameterError(
            f"layers: {list(layers)}; allowed: distinct, ascending ones out of 0 .. "
            f"{config.num_layers - 1}"
        )
    if options.mlp_size is not None and not 0 < options.mlp_size <= config.mlp_size:
        raise ParameterError(
            f"mlp_size: {options.mlp_size}; allowed: 1 .. {config.mlp_size}, the target's"
        )


def _places(layers: tuple[int, ...], special: tuple[int, ...]) -> tuple[int, ...]:
    """Where the chosen layers that are among ``special`` come to stand."""
    return tuple(place for place, index in enumerate(layers) if index in special)


def _largest_units(weights: Mapping[str, Tensor], index: int, size: int) -> Tensor | None:
    """The MLP units whose weights are largest, ascending; None where all are kept.

    A unit is a row of gate and up and a column of down; what it adds to the stream scales with the
    product of up's and down's norms, how often it is open with gate's.
    """
    gate, up, down = (weights[f"layers.{index}.{name}.weight"] for name in ("gate", "up", "down"))
    if size == len(up):
        return None
    norms = gate.float().norm(dim=1) * up.float().norm(dim=1) * down.float().norm(dim=0)
    return norms.topk(size).indices.sort().values
