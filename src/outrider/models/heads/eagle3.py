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

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.heads.base import DraftOutput, Embedding, pad_rows
from outrider.models.heads.config import Eagle3Config
from outrider.models.layers import LayerStack, Segment, loud_rows
from outrider.models.norm import RMSNorm


class Eagle3Head:
    """An EAGLE-3 head beside its target, in the target's precision.

    Args:
        config: options and sizes.
        weights: named as in :class:`~outrider.models.heads.config.Eagle3Config`.
        target: lends its embedding and output head where the head has none of its own.
    """

    token_shift = 1

    def __init__(
        self, config: Eagle3Config, weights: Mapping[str, Tensor], target: Decoder
    ) -> None:
        self.config = config
        self.captures = config.capture_layers
        self._target = target
        dtype, eps = target.dtype, config.layers.norm_eps
        self._stack = LayerStack(config.layers, weights, dtype=dtype, policies=None)

        def need(name: str) -> Tensor:
            return weights[name].to(dtype, copy=True)

        self._fc = self._stack.linear(need("fc.weight"))
        self._hidden_norm = RMSNorm(need("layers.0.hidden_norm.weight"), eps)
        self._state_norms: list[RMSNorm] = []
        if config.norm_before_fc:
            self._state_norms = [RMSNorm(need("input_norm.weight"), eps)]
        if config.fc_norm:
            self._state_norms = [
                RMSNorm(need(f"fc_norm.{i}.weight"), eps) for i in range(len(self.captures))
            ]
        self._embed = Embedding(need("embed.weight") if config.has_own_embedding else None, target)
        self._head = (
            self._stack.linear(need("lm_head.weight")) if config.has_own_head else target.head
        )

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """The head's own keys and values."""
        return self._stack.new_cache(max_batch_size=max_batch_size, num_slots=num_slots)

    def forward(
        self,
        segments: Sequence[Segment],
        feature_RX: Tensor,
        cache: KVCache,
        *,
        from_target: bool,
    ) -> DraftOutput:
        """Run the rows; ``feature_RX`` are captured states side by side, or fed-back ones.

        Keys and values land behind each prefix, uncommitted.
        """
        with torch.inference_mode():
            stack, config = self._stack, self.config
            plan = stack.plan(segments, cache)
            fused_RD = self._fuse(feature_RX) if from_target else feature_RX
            fused_RD = pad_rows(fused_RD, stack.min_rows)
            normed_RD = self._hidden_norm(fused_RD)
            embedded_RD = stack.attn_norm(0, self._embed(segments, stack.min_rows))
            residual_RD = normed_RD.contiguous() if config.norm_before_residual else fused_RD
            joined_RX = torch.cat([embedded_RD, normed_RD], dim=1)
            x_RD = stack.mlp(0, stack.attend(0, joined_RX, residual_RD, plan, cache))
            for index in range(1, config.layers.num_layers):
                x_RD = stack.run(index, x_RD, plan, cache)
            rows = loud_rows(segments)
            if not rows:
                return DraftOutput(x_RD.new_empty(0, config.draft_vocab_size), None)
            x_RD = x_RD[rows]
            normed_RD = stack.norm(x_RD)
            logits_RW = self._head(normed_RD).float()
            return DraftOutput(logits_RW, normed_RD if config.norm_output else x_RD)

    def _fuse(self, state_RX: Tensor) -> Tensor:
        """The target's states side by side, through their norms and ``fc``."""
        if self.config.norm_before_fc:
            state_RX = self._state_norms[0](state_RX)
        elif self.config.fc_norm:
            parts = state_RX.chunk(len(self.captures), dim=1)
            pairs = zip(self._state_norms, parts, strict=True)
            state_RX = torch.cat([norm(part.contiguous()) for norm, part in pairs], dim=1)
        return self._fc(state_RX)
