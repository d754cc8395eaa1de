"""The recipe for EAGLE-3 heads (Li et al. 2025), with the switches of EAGLE-3.1.

Owns what such a head reads and gives in training; the steps are
:mod:`outrider.training.recipes.recursion`, the serving twin is :mod:`outrider.models.heads.eagle3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import Eagle3Config
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
class Eagle3Options:
    """What an EAGLE-3 head is made of.

    Attributes:
        capture_layers: target layers whose input is read, ascending.
        fc_norm: one norm per captured state (EAGLE-3.1).
        norm_output: the state that is fed back is the normed one (EAGLE-3.1).
        norm_before_residual: the residual is the normed state.
        train_head: an output head of its own, which begins as the target's rows; else those rows
            stay as they are.
        init: ``target``: the layer begins as the target's last, behind an ``fc`` that hands the
            last captured state through; ``random``: both are drawn.

    Raises:
        ParameterError: an unknown ``init``.
    """

    capture_layers: tuple[int, ...]
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    train_head: bool = False
    init: Literal["target", "random"] = "target"

    def __post_init__(self) -> None:
        if self.init not in ("target", "random"):
            raise ParameterError(f"init: {self.init!r} is not one of target, random")


class Eagle3Layer(TrainableLayer):
    """A layer that reads the embedding beside the state, each behind its own norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, inputs=2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)


class Eagle3Recipe(Recipe):
    """An EAGLE-3 head in training; its vocabulary is the objective's.

    Args:
        target: what is drafted for.
        weights: the target's, to begin from.
        objective: what is minimised, with the draft vocabulary.
        options: the head's.
        seed: of what is drawn.
    """

    def __init__(
        self,
        target: TargetEnds,
        weights: Mapping[str, Tensor],
        objective: Objective,
        options: Eagle3Options,
        *,
        seed: int,
    ) -> None:
        super().__init__(target, objective, ahead=AHEAD, captures=options.capture_layers)
        self.options = options
        hidden, eps = target.config.hidden_size, target.config.norm_eps
        self._layer_config = replace(
            target.config, num_layers=1, no_rope_layers=(), sliding_window=None, sliding_layers=()
        )
        self.layers = nn.ModuleList([Eagle3Layer(self._layer_config)])
        num_states = len(options.capture_layers)
        self.fc = nn.Linear(num_states * hidden, hidden, bias=False)
        self.norm = Norm(hidden, eps)
        self.fc_norm: nn.ModuleList | None = None
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in range(num_states))
        self.lm_head: nn.Linear | None = None
        randomise(self, std=SMALL_STD if options.init == "target" else INIT_STD, seed=seed)
        if options.init == "target":
            self._begin_as_target(weights)
        if options.train_head:
            self.lm_head = nn.Linear(hidden, len(self.head_WD), bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(self.head_WD.float().clone())
        self.to(target.embedding_VD.device)

    @property
    def layer(self) -> Eagle3Layer:
        """The head's only layer."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def losses(self, batch: Batch) -> StepResults:
        """Training-time test over the batch; ``batch.states_PC`` holds the captured states."""
        only_response = self.objective.loss_on == "response"
        students, rows = scored_steps(self, batch, self.num_steps, only_response=only_response)
        output_head_WD = None if self.lm_head is None else self.lm_head.weight
        return self.score(batch, students, rows, output_head_WD=output_head_WD)

    def head_config(self) -> Eagle3Config:
        """The head; an output head that is not trained is the target's."""
        return Eagle3Config(
            layers=self._layer_config,
            target_hidden_size=self.target_config.hidden_size,
            capture_layers=self.captures,
            draft_vocab_size=len(self.head_WD),
            fc_norm=self.options.fc_norm,
            norm_before_residual=self.options.norm_before_residual,
            norm_output=self.options.norm_output,
            has_own_head=self.options.train_head,
        )

    def weights(self) -> dict[str, Tensor]:
        """See the base; with ``d2t`` where the vocabulary is reduced."""
        weights, vocabulary = super().weights(), self.objective.vocabulary
        if vocabulary is not None:
            weights["d2t"] = torch.tensor(vocabulary.ids_W) - torch.arange(vocabulary.size)
        return weights

    def read_target(self, batch: Batch, row_R: Tensor) -> Tensor:
        """Captured states through their norms and ``fc``."""
        assert batch.states_PC is not None
        state_RC = batch.states_PC[row_R].to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = state_RC.chunk(len(self.fc_norm), dim=1)
            pairs = zip(self.fc_norm, parts, strict=True)
            state_RC = torch.cat([norm(part) for norm, part in pairs], dim=1)
        return self.fc(state_RC).to(self.norm.weight.dtype)

    def join(self, embedded_RD: Tensor, feature_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Normed embedding and state side by side; the state, normed or not, is the residual."""
        layer = self.layer
        normed_RD = layer.hidden_norm(feature_RD)
        joined_RX = torch.cat([layer.attn_norm(embedded_RD), normed_RD], dim=1)
        return joined_RX, normed_RD if self.options.norm_before_residual else feature_RD

    def leave(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The normed output is read; it or the output itself is fed back."""
        normed_RD = self.norm(x_RD)
        return normed_RD, normed_RD if self.options.norm_output else x_RD

    def _begin_as_target(self, weights: Mapping[str, Tensor]) -> None:
        """The target's last layer and final norm; the last captured state passes ``fc``."""
        hidden, last = self.target_config.hidden_size, self.target_config.num_layers - 1
        copy_layer(self.layer, weights, last, mlp_rows=None)
        with torch.no_grad():
            # The layer's own norm stood before a state; the embedding's begins at 1.
            self.layer.hidden_norm.weight.copy_(weights[f"layers.{last}.attn_norm.weight"])
            self.layer.attn_norm.weight.fill_(1.0)
            self.norm.weight.copy_(weights["norm.weight"])
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
