"""What a draft module hands back, and what the heads with layers of their own have in common.

Shared by the heads beside this module; the draft model hands back the same. Knows no drafter and no
request. A
row stands for one drafted or known token; its *feature* is the state that the row is conditioned
on: the target's, where the target has computed it, else the module's own from the row before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.heads.config import Eagle3Config, MtpConfig
from outrider.models.layers import (
    LayerStack,
    Pass,
    Segment,
    embed_rows,
    loud_rows,
    padded_places,
)
from outrider.models.linear import ExactLinear
from outrider.models.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Rows that are not silent, in segment order.

    ``logits_RW`` is float32 over the draft vocabulary; ``feature_RD`` is what the children of a row
    are conditioned on, None for a module that reads tokens only.
    """

    logits_RW: Tensor
    feature_RD: Tensor | None


class LayeredHead:
    """What EAGLE-3 and MTP have in common: decoder layers between the ends of a target.

    Runs in the target's precision; embedding and output head are its own where the checkpoint holds
    them, else the target's; of a reduced vocabulary the head's rows are copied, so that no more
    than those are computed. Subclasses say what the layers read.
    """

    token_shift = 1

    def __init__(
        self,
        config: Eagle3Config | MtpConfig,
        weights: Mapping[str, Tensor],
        target: Decoder,
        *,
        feeds_back_normed: bool,
    ) -> None:
        self._draft_vocab_size = config.draft_vocab_size
        self._feeds_back_normed = feeds_back_normed
        self._stack = LayerStack(config.layers, weights, dtype=target.dtype, policies=None)
        self._embed: Callable[..., Tensor] = target.embed
        if config.has_own_embedding:
            table_VD = weights["embed.weight"].to(target.dtype, copy=True)
            self._embed = partial(embed_rows, table_VD=table_VD)
        self._head: Callable[[Tensor], Tensor] = target.head
        if config.has_own_head:
            self._head = self._linear(weights["lm_head.weight"])
        elif config.draft_vocab_size < config.layers.vocab_size:
            ids_W = torch.arange(config.draft_vocab_size) + weights["d2t"]
            self._head = self._stack.linear(target.head_rows(ids_W))
        self._fc = self._linear(weights["fc.weight"])

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
            stack = self._stack
            plan = stack.plan(segments, cache)
            num_rows = stack.padded(plan.num_rows)
            embedded_RD = self._embed(segments, num_rows=num_rows)
            feature_RX = pad_rows(feature_RX, num_rows)
            x_RD = self._run(embedded_RD, feature_RX, plan, cache, from_target=from_target)
            rows = loud_rows(segments)
            if not rows:
                return DraftOutput(x_RD.new_empty(0, self._draft_vocab_size), None)
            x_RD = x_RD[padded_places(rows, stack)]
            normed_RD = stack.norm(x_RD)
            logits_RW = self._head(normed_RD)[: len(rows)].float()
            state_RD = normed_RD if self._feeds_back_normed else x_RD
            return DraftOutput(logits_RW, state_RD[: len(rows)])

    def _run(
        self,
        embedded_RD: Tensor,
        feature_RX: Tensor,
        plan: Pass,
        cache: KVCache,
        *,
        from_target: bool,
    ) -> Tensor:
        """All layers; embeddings and features are padded alike."""
        raise NotImplementedError

    def _linear(self, weight: Tensor) -> ExactLinear:
        return self._stack.linear(weight.to(self._stack.dtype, copy=True))

    def _norm(self, weight: Tensor) -> RMSNorm:
        return RMSNorm(weight.to(self._stack.dtype, copy=True), self._stack.config.norm_eps)


def pad_rows(x_RD: Tensor, num_rows: int) -> Tensor:
    """Rows followed by zeros, as many as asked for in all."""
    missing = num_rows - x_RD.shape[0]
    return F.pad(x_RD, (0, 0, 0, missing)) if missing > 0 else x_RD
