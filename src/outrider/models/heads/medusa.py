"""MEDUSA heads: each guesses one token further ahead, all from the same state.

Owns their arithmetic (Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with
multiple decoding heads"): residual blocks ``x + silu(linear(x))`` on the target's final, normed
state, then an output head. Heads do not see each other's tokens. Driven by
:mod:`outrider.drafters.medusa`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.heads.config import MedusaConfig
from outrider.models.linear import ExactLinear


class MedusaHeads:
    """All MEDUSA heads of a target, in the target's precision.

    Args:
        config: number of heads and blocks.
        weights: named as in :class:`~outrider.models.heads.config.MedusaConfig`.
        target: lends its output head where the heads have none of their own.
    """

    captures = (FINAL_STATE,)

    def __init__(
        self, config: MedusaConfig, weights: Mapping[str, Tensor], target: Decoder
    ) -> None:
        self.config = config

        def linear(name: str, *, has_bias: bool) -> ExactLinear:
            weight = weights[f"{name}.weight"].to(target.dtype, copy=True)
            bias = weights[f"{name}.bias"].to(target.dtype, copy=True) if has_bias else None
            return ExactLinear(weight, bias, None)

        self._blocks = [
            [linear(f"heads.{i}.blocks.{j}", has_bias=True) for j in range(config.num_layers)]
            for i in range(config.num_heads)
        ]
        self._output = [
            linear(f"heads.{i}.lm_head", has_bias=False) if config.has_own_head else target.head
            for i in range(config.num_heads)
        ]

    def forward(self, state_RD: Tensor, num_heads: int) -> list[Tensor]:
        """Float32 logits ``[R, V]`` of the first ``num_heads`` heads, given final normed states."""
        with torch.inference_mode():
            logits = []
            pairs = zip(self._blocks[:num_heads], self._output[:num_heads], strict=True)
            for blocks, output in pairs:
                x_RD = state_RD
                for block in blocks:
                    x_RD = x_RD + F.silu(block(x_RD))
                logits.append(output(x_RD).float())
            return logits
