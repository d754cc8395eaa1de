"""MTP modules and MEDUSA heads as they are published: the files to write.

Owns the translation back of what :mod:`~outrider.models.loading.heads.mtp` and
:mod:`~outrider.models.loading.heads.medusa` read. A module is written alone, as its target's
checkpoint would hold it: the same names and the target's config.json, so that copying the tensors
over makes it the target's own. What is the target's is stored only where the config says that the
head has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import MedusaConfig, MtpConfig
from outrider.models.loading.heads.eagle3_config import OURS
from outrider.models.loading.heads.folder import HeadFiles
from outrider.models.loading.heads.hf_fields import decoder_fields
from outrider.models.loading.heads.mtp import FAMILIES, Family, module_layers

_MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"


def mtp_files(
    module: MtpConfig,
    weights: Mapping[str, Tensor],
    *,
    target_name: str,
    target: DecoderConfig,
    recorded_acceptance: float | None = None,
) -> HeadFiles:
    """One module: ``config.json`` and ``model.safetensors``.

    Under Qwen's names; DeepSeek's where it brings an embedding or an output head, which only theirs
    do; MiMo's where the state comes first.

    Args:
        module: what the module is.
        weights: under the names of :class:`~outrider.models.heads.config.MtpConfig`, all of them.
        target_name: the model that it drafts for.
        target: that model.
        recorded_acceptance: its measured acceptance length.

    Raises:
        ParameterError: no family has such a module.
    """
    family = _family(module)
    if replace(module.layers, tied_embeddings=False) != module_layers(target):
        raise ParameterError(
            "the module's layer is not one of its target's, as every published layout takes for "
            f"granted: {module.layers}"
        )
    place = family.place.format(num_layers=target.num_layers)
    # Of two spellings of the output head, the family's published one comes first.
    theirs = {ours: part for part, ours in reversed(family.parts().items())}
    tensors = {}
    for name in module.weight_shapes():
        part, _, kind = name.rpartition(".")
        tensors[f"{place}{theirs[part]}.{kind}"] = weights[name]
    config = {
        **decoder_fields(target),
        "num_nextn_predict_layers": 1,
        "base_model_name_or_path": target_name,
        **_stored(weights["fc.weight"], recorded_acceptance),
    }
    return HeadFiles(config=config, tensors=tensors)


def medusa_files(
    heads: MedusaConfig,
    weights: Mapping[str, Tensor],
    *,
    target_name: str,
    recorded_acceptance: float | None = None,
) -> HeadFiles:
    """``config.json`` and ``medusa_lm_head.safetensors``.

    Heads that use the target's output head are the residual blocks alone, as MEDUSA's first
    releases are.

    Args:
        heads: what the heads are.
        weights: under the names of :class:`~outrider.models.heads.config.MedusaConfig`, all of
            them.
        target_name: the model that they draft for.
        recorded_acceptance: their measured acceptance length.
    """
    tensors = {}
    for name in heads.weight_shapes():
        _, head, part = name.split(".", 2)
        if part == "lm_head.weight":
            tensors[f"{head}.{heads.num_layers}.weight"] = weights[name]
        else:
            _, block, kind = part.split(".")
            tensors[f"{head}.{block}.linear.{kind}"] = weights[name]
    config = {
        "base_model_name_or_path": target_name,
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        **_stored(weights["heads.0.blocks.0.weight"], recorded_acceptance),
    }
    return HeadFiles(config=config, tensors=tensors, weights_name=_MEDUSA_WEIGHTS)


def _family(module: MtpConfig) -> Family:
    """Whose names say all that ``module`` is."""
    deepseek, *others = FAMILIES
    is_alone = not (module.has_own_embedding or module.has_own_head)
    order = (module.order == "hidden_first", module.reads_raw_state)
    for family in (*others, deepseek) if is_alone else (deepseek, *others):
        if order == (family.is_hidden_first, family.reads_raw_state):
            return family
    state = "before" if module.reads_raw_state else "behind"
    raise ParameterError(
        f"no published layout has a multi-token-prediction module of order {module.order} that "
        f"reads the state {state} the target's final norm; allowed: embedding_first behind it, "
        "hidden_first before it"
    )


def _stored(weight: Tensor, recorded_acceptance: float | None) -> dict[str, Any]:
    return {
        "torch_dtype": str(weight.dtype).removeprefix("torch."),
        OURS: {"recorded_acceptance": recorded_acceptance},
    }
