"""Drafting with a whole smaller model of the same tokeniser.

Owns the fit between the two: which of their tokens are the same. The model itself is a
:class:`~outrider.models.decoder.Decoder` like the target, without its exactness; the tree growth is
:mod:`outrider.drafters.autoregressive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.kv_cache import KVCache
from outrider.models.decoder import Decoder
from outrider.models.heads.base import DraftOutput
from outrider.models.layers import Segment
from outrider.vocabulary import DraftVocabulary


class DraftModel:
    """A decoder as a draft module: rows are tokens, there are no features.

    Args:
        decoder: the draft model.
        target_size: the target's vocabulary. Published vocabularies are padded to various sizes
            behind the tokeniser's own tokens; only ids that both have are drafted, and one that
            the draft model lacks is read as token 0.
    """

    captures: tuple[int, ...] = ()
    token_shift = 0

    def __init__(self, decoder: Decoder, target_size: int) -> None:
        self._decoder = decoder
        self._size = min(decoder.config.vocab_size, target_size)
        self.vocabulary = (
            DraftVocabulary.first(self._size, target_size) if self._size < target_size else None
        )

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """The draft model's own keys and values."""
        return self._decoder.new_cache(max_batch_size=max_batch_size, num_slots=num_slots)

    def forward(
        self,
        segments: Sequence[Segment],
        feature_RX: Tensor,  # noqa: ARG002 - a whole model reads tokens only
        cache: KVCache,
        *,
        from_target: bool,  # noqa: ARG002 - true and drafted rows are computed alike
    ) -> DraftOutput:
        """Run the rows; keys and values land behind each prefix, uncommitted."""
        if self.vocabulary is not None:
            segments = [
                replace(segment, tokens=[t if t < self._size else 0 for t in segment.tokens])
                for segment in segments
            ]
        logits_RV = self._decoder.forward(segments, cache).logits_RV
        return DraftOutput(logits_RV[:, : self._size], None)
