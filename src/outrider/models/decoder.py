"""The target's forward pass: token ids in, float32 logits out.

Owns embedding and output head around a :class:`~outrider.models.layers.LayerStack`. A pass takes
one segment per request (a chunk of a prompt, or a draft tree with its root), writes the segment's
keys and values behind the request's committed prefix, and returns logits and, where asked, hidden
states. ``step`` and the engine's prefill call it; it knows neither requests nor drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.architecture import DecoderConfig
from outrider.models.layers import LayerStack, Segment, embed_rows, loud_rows, padded_places
from outrider.models.linear import ExactLinear, RowPolicy

FINAL_STATE = -1
"""Asks ``forward`` for the state behind the final norm, which the output head reads."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a pass returns, rows in segment order.

    ``logits_RV`` is float32, without the silent rows; ``hidden_RC`` holds the captured states of
    all rows side by side, in the order asked; ``counts`` splits those back into segments.
    """

    logits_RV: Tensor
    hidden_RC: Tensor | None
    counts: tuple[int, ...]


class Decoder:
    """A decoder of the Llama family on the CPU.

    Args:
        config: the architecture.
        weights: tensors named as in :mod:`outrider.models.architecture`; read one by one, so a
            lazy mapping keeps the peak low.
        dtype: ``torch.bfloat16`` or ``torch.float32``.
        policies: row ranges by linear shape, from :func:`outrider.models.exactness.row_policies`;
            None for a draft model, whose rows need not be exact.
        on_layer: called after each loaded layer with the fraction done.
        ends: another decoder, whose embedding and output head are used in place of own ones;
            ``weights`` then hold neither. Sizes and dtype are the same.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        policies: Mapping[tuple[int, int, bool], RowPolicy] | None,
        on_layer: Callable[[float], None] | None = None,
        ends: Decoder | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.policies = dict(policies or {})
        self._stack = LayerStack(config, weights, dtype=dtype, policies=policies, on_layer=on_layer)
        self._embedding, self._head = (
            self._load_ends(weights) if ends is None else (ends._embedding, ends._head)
        )

    def _load_ends(self, weights: Mapping[str, Tensor]) -> tuple[Tensor, ExactLinear]:
        """Embedding and output head; of tied ones the head is a second, packed copy."""
        # Copies: a lazy mapping's tensors may be views of the file, which may change or go away.
        embedding_VD = weights["embed.weight"].to(self.dtype, copy=True).contiguous()
        head_VD = embedding_VD
        if not self.config.tied_embeddings:
            head_VD = weights["lm_head.weight"].to(self.dtype, copy=True)
        return embedding_VD, self._stack.linear(head_VD)

    def forward(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        *,
        capture: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run the segments; keys and values land behind each prefix, uncommitted.

        ``capture`` lists layer indices: ``i`` is the residual state that enters layer i (Hugging
        Face's ``hidden_states[i]``), ``num_layers`` the one that leaves the last layer,
        ``FINAL_STATE`` that one behind the final norm.
        """
        with torch.inference_mode():
            stack = self._stack
            plan = stack.plan(segments, cache)
            x_RD = self.embed(segments, stack.padded(plan.num_rows))
            captured = {}
            for index in range(self.config.num_layers):
                if index in capture:
                    captured[index] = x_RD[: plan.num_rows]
                x_RD = stack.run(index, x_RD, plan, cache)
            captured[self.config.num_layers] = x_RD[: plan.num_rows]
            if FINAL_STATE in capture:
                captured[FINAL_STATE] = stack.norm(x_RD)[: plan.num_rows]
            hidden_RC = torch.cat([captured[i] for i in capture], dim=1) if capture else None
            return ForwardOutput(self._logits(x_RD, segments), hidden_RC, plan.slots.counts)

    def embed(self, segments: Sequence[Segment], num_rows: int = 0) -> Tensor:
        """Embeddings of the packed rows, padded with token 0 to ``num_rows``."""
        return embed_rows(segments, self._embedding, num_rows)

    def head(self, normed_RD: Tensor) -> Tensor:
        """The output head alone, in the compute dtype; exact for rows padded as a pass' are."""
        return self._head(normed_RD)

    def head_rows(self, ids_W: Tensor) -> Tensor:
        """The output head's rows ``[W, D]`` of these tokens, a copy in the compute dtype.

        Takes the memory of the whole head for a moment where it is not tied to the embedding.
        """
        if self.config.tied_embeddings:
            return self._embedding[ids_W]
        return self._head.rows(ids_W)

    def _logits(self, x_RD: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Float32 logits of the rows that are not silent, padded for the product in between."""
        rows = loud_rows(segments)
        if not rows:
            return torch.empty(0, self.config.vocab_size)
        if len(rows) < sum(len(segment.tokens) for segment in segments):
            x_RD = x_RD[torch.tensor(padded_places(rows, self._stack))]
        return self._head(self._stack.norm(x_RD))[: len(rows)].float()

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """A cache of this model's shape in its compute dtype."""
        return self._stack.new_cache(max_batch_size=max_batch_size, num_slots=num_slots)
