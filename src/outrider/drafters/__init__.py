"""Drafting methods: one file each behind one contract, and the table that builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from outrider.config import Method, SpeculationConfig
from outrider.drafters.autoregressive import AutoregressiveDrafter, DraftModule, drafted_slots
from outrider.drafters.base import Drafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.config import (
    Eagle3Config,
    MedusaConfig,
    MtpConfig,
    SharedEndsConfig,
)
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.heads.mtp import MtpHead
from outrider.vocabulary import DraftVocabulary

__all__ = ["DraftSource", "Drafter", "create_drafter", "drafted_slots"]

SourceConfig: TypeAlias = Eagle3Config | MtpConfig | MedusaConfig | DecoderConfig


@dataclass(frozen=True, slots=True)
class DraftSource:
    """What a drafter is built from: a head's or a draft model's description and its weights."""

    config: SourceConfig
    weights: Mapping[str, Tensor]


def create_drafter(
    speculation: SpeculationConfig,
    *,
    source: DraftSource | None = None,
    target: Decoder | None = None,
    max_batch_size: int = 1,
    max_model_len: int = 0,
) -> Drafter | None:
    """The drafter of a configuration; None for plain decoding.

    ``source`` and ``target`` are needed by the methods that read a checkpoint, and the sizes by
    those that keep a cache.
    """
    if speculation.method is Method.OFF:
        return None
    if speculation.method is Method.NGRAM:
        return NgramDrafter(speculation)
    assert source is not None, "the caller opened what the method reads"
    assert target is not None
    drafter: Drafter
    if isinstance(source.config, MedusaConfig):
        drafter = MedusaDrafter(MedusaHeads(source.config, source.weights, target), speculation)
    else:
        module, vocabulary = _module(source, target)
        drafter = AutoregressiveDrafter(
            module,
            speculation,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            vocabulary=vocabulary,
        )
    if speculation.with_ngram:
        drafter = CombinedDrafter(drafter, NgramDrafter(speculation), speculation.num_draft_tokens)
    return drafter


def _module(source: DraftSource, target: Decoder) -> tuple[DraftModule, DraftVocabulary | None]:
    """The module and its vocabulary, None where that is the target's own."""
    config, weights = source.config, source.weights
    if isinstance(config, Eagle3Config):
        vocabulary = None
        if config.is_reduced:
            vocabulary = DraftVocabulary.from_offsets(
                weights["d2t"].numpy(), target.config.vocab_size
            )
        return Eagle3Head(config, weights, target), vocabulary
    if isinstance(config, MtpConfig):
        return MtpHead(config, weights, target), None
    assert isinstance(config, DecoderConfig)
    ends = target if isinstance(config, SharedEndsConfig) else None
    decoder = Decoder(config, weights, dtype=target.dtype, policies=None, ends=ends)
    model = DraftModel(decoder, target.config.vocab_size)
    return model, model.vocabulary
