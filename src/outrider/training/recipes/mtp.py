"""The recipe for multi-token-prediction modules: one layer, applied again and again.

Owns what such a module reads and gives in training (DeepSeek-V3, section 2.2; shared recursion as
in FastMTP); the steps are :mod:`outrider.training.recipes.recursion`, the serving twin is
:mod:`outrider.models.heads.mtp`. The module serves the whole of the target's vocabulary; the
objective's only says which tokens it is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.models.heads.config import MtpConfig
from outrider.training.packing import Batch
from outrider.training.recipes.base import Objective, Recipe, StepResults, TargetEnds
from outrider.training.recipes.layers import (
    INIT_STD,
    SMALL_STD,
    Norm,
    TrainableLayer,
    copy_layer,
    randomise,
)
from outrider.training.recipes.recursion import AHEAD, scored_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpOptions:
    """What a multi-token-prediction module is made of.

    Attributes:
        order: what comes first in the concatenation that ``fc`` reads.
        init: ``target``: the layer begins as the target's last, behind an ``fc`` that hands the
            state through; ``random``: both are drawn.

    Raises:
        ParameterError: an unknown ``order`` or ``init``.
    """

    order: Literal["embedding_first", "hidden_first"] = "embedding_first"
    init: Literal["target", "random"] = "target"

    def __post_init__(self) -> None:
        if self.order not in ("embedding_first", "hidden_first"):
            raise ParameterError(
                f"order: {self.order!r} is not one of embedding_first, hidden_first"
            )
        if self.init not in ("target", "random"):
            raise ParameterError(f"init: {self.init!r} is not one of target, random")


class MtpRecipe(Recipe):
    """A multi-token-prediction module in training.

    Args:
        target: what is drafted for.
        weights: the target's, to begin from.
        objective: what is minimised.
        options: the module's.
        seed: of what is drawn.
    """

    def __init__(
        self,
        target: TargetEnds,
        weights: Mapping[str, Tensor],
        objective: Objective,
        options: MtpOptions,
        *,
        seed: int,
    ) -> None:
        super().__init__(target, objective, ahead=AHEAD)
        self.options = options
        hidden, eps = target.config.hidden_size, target.config.norm_eps
        self._layer_config = replace(
            target.config, num_layers=1, no_rope_layers=(), sliding_window=None, sliding_layers=()
        )
        self.embed_norm, self.hidden_norm = Norm(hidden, eps), Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([TrainableLayer(self._layer_config)])
        self.norm = Norm(hidden, eps)
        randomise(self, std=SMALL_STD if options.init == "target" else INIT_STD, seed=seed)
        if options.init == "target":
            self._begin_as_target(weights)
        self.to(target.embedding_VD.device)

    @property
    def layer(self) -> TrainableLayer:
        """The module's only layer."""
        layer = self.layers[0]
        assert isinstance(layer, TrainableLayer)
        return layer

    def losses(self, batch: Batch) -> StepResults:
        """Training-time test over the batch."""
        only_response = self.objective.loss_on == "response"
        students, rows = scored_steps(self, batch, self.num_steps, only_response=only_response)
        return self.score(batch, students, rows)

    def head_config(self) -> MtpConfig:
        """The module, between the target's embedding and output head."""
        return MtpConfig(layers=self._layer_config, order=self.options.order)

    def read_target(self, batch: Batch, row_R: Tensor) -> Tensor:
        """The state behind the target's final norm."""
        return batch.final_PD[row_R].to(self.norm.weight.dtype)

    def join(self, embedded_RD: Tensor, feature_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Both normed and fused; that is what the layer reads and adds to."""
        parts = [self.embed_norm(embedded_RD), self.hidden_norm(feature_RD)]
        if self.options.order == "hidden_first":
            parts.reverse()
        x_RD = self.fc(torch.cat(parts, dim=1)).to(self.norm.weight.dtype)
        return self.layer.attn_norm(x_RD), x_RD

    def leave(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The normed output is read and fed back."""
        normed_RD = self.norm(x_RD)
        return normed_RD, normed_RD

    def _begin_as_target(self, weights: Mapping[str, Tensor]) -> None:
        """The target's last layer and final norm; the state passes ``fc`` as it is."""
        hidden = self.target_config.hidden_size
        copy_layer(self.layer, weights, self.target_config.num_layers - 1, mlp_rows=None)
        states = slice(0, hidden) if self.options.order == "hidden_first" else slice(hidden, None)
        with torch.no_grad():
            self.norm.weight.copy_(weights["norm.weight"])
            self.fc.weight[:, states] += torch.eye(hidden)
