"""Putting into a head what it takes from its target, for engines that do not share it.

Owns the answer to "what is missing for a checkpoint that stands alone", per family. The rows and
tables come from the target's files, in the head's own precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import reduce

import torch
from torch import Tensor

from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import (
    Eagle3Config,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    SharedEndsConfig,
)


def completed(
    config: HeadConfig | DecoderConfig,
    weights: Mapping[str, Tensor],
    target: DecoderConfig,
    target_weights: Mapping[str, Tensor],
    *,
    with_embedding: bool = True,
) -> tuple[HeadConfig | DecoderConfig, dict[str, Tensor]]:
    """A head or draft model with an embedding and an output head of its own, where it uses them.

    EAGLE-3 gets the output rows of its draft vocabulary, MEDUSA an output head for each head.

    Args:
        config: what it is; one that shares nothing is handed back as it is.
        weights: its weights.
        target: what it drafts for.
        target_weights: the target's weights under our names; only the ends are read.
        with_embedding: False leaves a head's embedding to the target, as most published ones do.
    """
    whole = dict(weights)
    kinds = {tensor.dtype for tensor in whole.values() if tensor.is_floating_point()}
    dtype = reduce(torch.promote_types, kinds)
    output = "embed.weight" if target.tied_embeddings else "lm_head.weight"

    def end(name: str) -> Tensor:
        return target_weights[name].to(dtype)

    if isinstance(config, SharedEndsConfig):
        whole["embed.weight"] = end("embed.weight")
        if not config.tied_embeddings:
            whole["lm_head.weight"] = end(output)
        return DecoderConfig(**{f.name: getattr(config, f.name) for f in fields(config)}), whole
    if isinstance(config, DecoderConfig):
        return config, whole
    if isinstance(config, Eagle3Config | MtpConfig) and with_embedding:
        if not config.has_own_embedding:
            whole["embed.weight"] = end("embed.weight")
        config = replace(config, has_own_embedding=True)
    if not config.has_own_head:
        head_VD = end(output)
        if isinstance(config, MedusaConfig):
            whole |= {f"heads.{i}.lm_head.weight": head_VD for i in range(config.num_heads)}
        elif isinstance(config, Eagle3Config) and config.is_reduced:
            whole["lm_head.weight"] = head_VD[torch.arange(len(whole["d2t"])) + whole["d2t"]]
        else:
            whole["lm_head.weight"] = head_VD
        config = replace(config, has_own_head=True)
    return config, whole
