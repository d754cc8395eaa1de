"""The multi-token-prediction module: one decoder layer behind the target's last.

Owns the module's arithmetic (DeepSeek-V3, section 2.2; Qwen and MiMo differ in the order of the
concatenation). Row t joins the state at position t with the embedding of token t + 1 and predicts
token t + 2::

    x = layer(fc(cat[norm(embedding), norm(state)]))
    logits = lm_head(norm(x));  the state fed back is norm(x)

The target's state is the one behind its final norm (MiMo: before it), and the one fed back is
behind the module's own: a state before that norm makes all positions but the first collapse. Driven
by
:mod:`outrider.drafters.autoregressive`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.heads.base import DraftOutput, Embedding, pad_rows
from outrider.models.heads.config import MtpConfig
from outrider.models.layers import LayerStack, Segment, loud_rows
from outrider.models.norm import RMSNorm


class MtpHead:
    """A multi-token-prediction module beside its target, in the target's precision.

    Args:
        config: order and sizes.
        weights: named as in :class:`~outrider.models.heads.config.MtpConfig`.
        target: lends its embedding and output head where the module has none of its own.
    """

    token_shift = 1

    def __init__(self, config: MtpConfig, weights: Mapping[str, Tensor], target: Decoder) -> None:
        self.config = config
        raw, normed = target.config.num_layers, FINAL_STATE
        self.captures = (raw if config.reads_raw_state else normed,)
        dtype, eps = target.dtype, config.layers.norm_eps
        self._stack = LayerStack(config.layers, weights, dtype=dtype, policies=None)

        def need(name: str) -> Tensor:
            return weights[name].to(dtype, copy=True)

        self._fc = self._stack.linear(need("fc.weight"))
        self._embed_norm = RMSNorm(need("embed_norm.weight"), eps)
        self._hidden_norm = RMSNorm(need("hidden_norm.weight"), eps)
        self._embed = Embedding(need("embed.weight") if config.has_own_embedding else None, target)
        self._head = (
            self._stack.linear(need("lm_head.weight")) if config.has_own_head else target.head
        )

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """The module's own keys and values."""
        return self._stack.new_cache(max_batch_size=max_batch_size, num_slots=num_slots)

    def forward(
        self,
        segments: Sequence[Segment],
        feature_RX: Tensor,
        cache: KVCache,
        *,
        from_target: bool,  # noqa: ARG002 - both kinds of state are normed and of one width
    ) -> DraftOutput:
        """Run the rows; ``feature_RX`` are the target's final states, or fed-back ones.

        Keys and values land behind each prefix, uncommitted.
        """
        with torch.inference_mode():
            stack = self._stack
            plan = stack.plan(segments, cache)
            state_RD = self._hidden_norm(pad_rows(feature_RX, stack.min_rows))
            parts = [self._embed_norm(self._embed(segments, stack.min_rows)), state_RD]
            if self.config.order == "hidden_first":
                parts.reverse()
            x_RD = self._fc(torch.cat(parts, dim=1))
            for index in range(self.config.layers.num_layers):
                x_RD = stack.run(index, x_RD, plan, cache)
            rows = loud_rows(segments)
            if not rows:
                return DraftOutput(x_RD.new_empty(0, self.config.layers.vocab_size), None)
            normed_RD = stack.norm(x_RD[rows])
            return DraftOutput(self._head(normed_RD).float(), normed_RD)
