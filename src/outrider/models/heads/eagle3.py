"""The EAGLE-3 head: one decoder layer that reads three of the target's states at once.

Owns the head's arithmetic, as published (Li et al. 2025, "EAGLE-3: Scaling up inference
acceleration of large language models via training-time test"), with the options of EAGLE-3.1 and
``speculators``. Row t joins the target's states at position t with the embedding of token t + 1,
stands at rotary position t, and predicts token t + 2::

    g = fc(states)                                    target rows; a drafted row's g is the
    h = layer(cat[norm(embedding), norm(g)]) + g      output of the row before it, unfused
    logits = lm_head(norm(h));  h is fed back, before that norm

Driven by :mod:`outrider.drafters.autoregressive`; ``tests/parity`` holds it against a reference
written from the definitions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.heads.base import LayeredHead
from outrider.models.heads.config import Eagle3Config
from outrider.models.layers import Pass
from outrider.models.norm import RMSNorm


class Eagle3Head(LayeredHead):
    """An EAGLE-3 head beside its target.

    Args:
        config: options and sizes.
        weights: named as in :class:`~outrider.models.heads.config.Eagle3Config`.
        target: lends its embedding and output head where the head has none of its own.
    """

    def __init__(
        self, config: Eagle3Config, weights: Mapping[str, Tensor], target: Decoder
    ) -> None:
        super().__init__(config, weights, target, feeds_back_normed=config.norm_output)
        self.config = config
        self.captures = config.capture_layers
        self._hidden_norm = self._norm(weights["layers.0.hidden_norm.weight"])
        self._state_norms: list[RMSNorm] = []
        if config.norm_before_fc:
            self._state_norms = [self._norm(weights["input_norm.weight"])]
        if config.fc_norm:
            self._state_norms = [
                self._norm(weights[f"fc_norm.{i}.weight"]) for i in range(len(self.captures))
            ]

    def _run(
        self,
        embedded_RD: Tensor,
        feature_RX: Tensor,
        plan: Pass,
        cache: KVCache,
        *,
        from_target: bool,
    ) -> Tensor:
        stack, config = self._stack, self.config
        fused_RD = self._fuse(feature_RX) if from_target else feature_RX
        normed_RD = self._hidden_norm(fused_RD)
        residual_RD = normed_RD.contiguous() if config.norm_before_residual else fused_RD
        joined_RX = torch.cat([stack.attn_norm(0, embedded_RD), normed_RD], dim=1)
        x_RD = stack.mlp(0, stack.attend(0, joined_RX, residual_RD, plan, cache))
        for index in range(1, config.layers.num_layers):
            x_RD = stack.run(index, x_RD, plan, cache)
        return x_RD

    def _fuse(self, state_RX: Tensor) -> Tensor:
        """The target's states side by side, through their norms and ``fc``."""
        if self.config.norm_before_fc:
            state_RX = self._state_norms[0](state_RX)
        elif self.config.fc_norm:
            parts = state_RX.chunk(len(self.captures), dim=1)
            pairs = zip(self._state_norms, parts, strict=True)
            state_RX = torch.cat([norm(part.contiguous()) for norm, part in pairs], dim=1)
        return self._fc(state_RX)
