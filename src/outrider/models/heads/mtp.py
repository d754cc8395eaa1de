"""The multi-token-prediction module: one decoder layer behind the target's last.

Owns the module's arithmetic (DeepSeek-V3, section 2.2; Qwen and MiMo differ in the order of the
concatenation). Row t joins the state at position t with the embedding of token t + 1 and predicts
token t + 2::

    x = layer(fc(cat[norm(embedding), norm(state)]))
    logits = lm_head(norm(x));  the state fed back is norm(x)

The target's state is the one behind its final norm (MiMo: before it), and the one fed back is
behind the module's own: a state before that norm makes all positions but the first collapse.
Driven by :mod:`outrider.drafters.autoregressive`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.heads.base import LayeredHead
from outrider.models.heads.config import MtpConfig
from outrider.models.layers import Pass


class MtpHead(LayeredHead):
    """A multi-token-prediction module beside its target.

    Args:
        config: order and sizes.
        weights: named as in :class:`~outrider.models.heads.config.MtpConfig`.
        target: lends its embedding and output head where the module has none of its own.
    """

    def __init__(self, config: MtpConfig, weights: Mapping[str, Tensor], target: Decoder) -> None:
        super().__init__(config, weights, target, feeds_back_normed=True)
        self.config = config
        raw, normed = target.config.num_layers, FINAL_STATE
        self.captures = (raw if config.reads_raw_state else normed,)
        self._embed_norm = self._norm(weights["embed_norm.weight"])
        self._hidden_norm = self._norm(weights["hidden_norm.weight"])

    def _run(
        self,
        embedded_RD: Tensor,
        feature_RX: Tensor,
        plan: Pass,
        cache: KVCache,
        *,
        from_target: bool,  # noqa: ARG002 - both kinds of state are of one width, and normed here
    ) -> Tensor:
        state_RD = self._hidden_norm(feature_RX)
        parts = [self._embed_norm(embedded_RD), state_RD]
        if self.config.order == "hidden_first":
            parts.reverse()
        x_RD = self._fc(torch.cat(parts, dim=1))
        for index in range(self.config.layers.num_layers):
            x_RD = self._stack.run(index, x_RD, plan, cache)
        return x_RD
