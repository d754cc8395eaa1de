"""The recipe for MEDUSA-1 heads: the target stays as it is, each head looks one token further.

Owns the heads' arithmetic in training (Cai et al. 2024, section 2.2.1); the serving twin is
:mod:`outrider.models.heads.medusa`. Heads end in the target's output head: what they learn is to
move the state, and a head is D x D numbers, not V x D. The objective's vocabulary only says which
tokens they are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.models.heads.config import MedusaConfig
from outrider.training.packing import Batch
from outrider.training.recipes.base import Objective, Recipe, StepResults, TargetEnds

AHEAD = 2  # the target itself predicts the next token


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions:
    """What MEDUSA heads are made of; there are as many as the objective has step weights.

    Raises:
        ParameterError: ``num_layers``, the residual blocks of a head, is below 1.
    """

    num_layers: int = 1

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ParameterError(f"num_layers: {self.num_layers} is below 1; 1 is usual")


class MedusaHead(nn.Module):
    """Residual blocks ``x + silu(linear(x))`` that begin as zero, so that a head begins as x."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_RD: Tensor) -> Tensor:
        """Moved states."""
        for block in self.blocks:
            x_RD = x_RD + F.silu(block(x_RD))
        return x_RD


class MedusaRecipe(Recipe):
    """MEDUSA heads in training, one per step weight.

    Args:
        target: what is drafted for.
        objective: what is minimised.
        options: the heads'.
    """

    def __init__(self, target: TargetEnds, objective: Objective, options: MedusaOptions) -> None:
        super().__init__(target, objective, ahead=AHEAD)
        self.options = options
        size = target.config.hidden_size
        self.heads = nn.ModuleList(
            MedusaHead(size, options.num_layers) for _ in range(objective.num_steps)
        )
        self.to(target.embedding_VD.device)

    def losses(self, batch: Batch) -> StepResults:
        """All heads over the batch's final states."""
        rows = [self.is_scored(batch, step).nonzero().squeeze(1) for step in range(self.num_steps)]
        pairs = zip(self.heads, rows, strict=True)
        dtype = torch.promote_types(batch.final_PD.dtype, torch.float32)
        outputs = [head(batch.final_PD[row_R].to(dtype)) for head, row_R in pairs]
        return self.score(batch, outputs, rows)

    def head_config(self) -> MedusaConfig:
        """The heads, in front of the target's output head."""
        return MedusaConfig(
            hidden_size=self.target_config.hidden_size,
            vocab_size=self.target_config.vocab_size,
            num_heads=self.num_steps,
            num_layers=self.options.num_layers,
            has_own_head=False,
        )
