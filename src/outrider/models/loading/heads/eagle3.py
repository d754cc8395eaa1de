"""EAGLE-3 heads, in the layouts of SafeAILab, SpecForge, speculators and vLLM.

Owns the names of their tensors; what their config.json says is
:mod:`~outrider.models.loading.heads.eagle3_config`'s business. All layouts hold the same network:

=================================  ============================  ===============================
SafeAILab, SpecForge               speculators                   here
=================================  ============================  ===============================
``midlayer.*`` (or ``layers.0``)   ``layers.{i}.*``              ``layers.{i}.*``
``fc``, ``norm``, ``lm_head``      the same                      the same
``embed_tokens``                   the same                      ``embed``
``d2t``, ``t2d``                   the same                      ``d2t``; ``t2d`` is compared
``fc_norm.{i}``                    the same, or older            ``fc_norm.{i}``
                                   ``aux_norm_{low,mid,high}``
                                   ``input_norm``                ``input_norm``
=================================  ============================  ===============================

vLLM's and some of SpecForge's carry ``model.`` in front, and vLLM calls d2t
``draft_id_to_target_id``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from outrider.config import Method
from outrider.errors import UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.loading.heads.eagle3_config import read_config
from outrider.models.loading.heads.loaded import LoadedHead, loaded_head
from outrider.models.loading.heads.source import HeadSource
from outrider.models.loading.heads.vocabulary_map import check_map, offsets_reader
from outrider.models.loading.huggingface import HARMLESS, LAYER_PARTS
from outrider.models.loading.safetensors_file import StoredTensor

NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed.weight",
    "input_norm.weight": "input_norm.weight",
    "d2t": "d2t",
}
PARTS = {**LAYER_PARTS, "hidden_norm": "hidden_norm"}
_OTHER_NAMES = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
_LAYER = re.compile(r"(?:layers\.(0|[1-9]\d{0,5})|midlayer)\.([\w.]+)\.(weight|bias)")
_FC_NORM = re.compile(r"fc_norm\.(0|[1-9]\d{0,5})\.weight")
_MAPS = ("d2t", "t2d", "draft_id_to_target_id")
# Copies of the target's weights that a trainer left behind.
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 head's, complete or not."""
    return any(
        name.startswith("midlayer.") or name.endswith(".hidden_norm.weight") or name in _MAPS
        for name in map(plain, names)
    )


def plain(stored: str) -> str:
    """The file's name without the prefix that some layouts put in front."""
    return stored.removeprefix("model.")


def load_eagle3(source: HeadSource, target: DecoderConfig) -> LoadedHead:
    """Read an EAGLE-3 head.

    Raises:
        CheckpointError: contradictory settings, tensors that do not fit, or a wrong vocabulary map.
        UnsupportedModelError: a relative of EAGLE-3 that is another network.
    """
    stored: dict[str, StoredTensor] = {}
    twice = []
    for name, tensor in source.tensors.items():
        if stored.setdefault(plain(name), tensor) is not tensor:
            twice.append(name)
    if "mask_hidden" in stored:
        raise UnsupportedModelError(
            f"{source.path}: a P-EAGLE head (tensor mask_hidden); supported: EAGLE-3"
        )
    found, unexpected = _sort(stored)
    t2d = stored.get("t2d")
    settings = read_config(source.require_config(), found, target)
    config, conventions = settings.config, list(settings.conventions)
    copies = [name for name in _COPIES if name in stored]
    if copies:
        conventions.append(f"skipped copies of the target's weights: {', '.join(copies)}")
    d2t = found.pop("d2t", None)
    needed = config.weight_shapes()
    needed.pop("d2t", None)
    readers = {}
    if d2t is not None and config.is_reduced:
        readers["d2t"] = offsets_reader(d2t)
    weights = source.lazy_weights(needed, found, unexpected=[*unexpected, *twice], readers=readers)
    conventions += check_map(
        d2t,
        t2d,
        draft_size=config.draft_vocab_size,
        target_size=target.vocab_size,
        path=source.path,
    )
    return loaded_head(
        source,
        method=Method.EAGLE3,
        config=config,
        weights=weights,
        layout=_layout(source, stored),
        conventions=conventions,
        recorded_acceptance=settings.recorded_acceptance,
        trained_positions=settings.trained_positions,
    )


def _sort(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors under our names, and the file's names of those that have none."""
    found: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in stored.items():
        ours = _our_name(name)
        if ours is not None and ours not in found:
            found[ours] = tensor
        elif name != "t2d" and name not in _COPIES and not HARMLESS.fullmatch(name):
            unexpected.append(tensor.name)
    return found, unexpected


def _our_name(name: str) -> str | None:
    if name in NAMES or name in _OTHER_NAMES:
        return NAMES.get(name) or _OTHER_NAMES[name]
    if _FC_NORM.fullmatch(name):
        return name
    if (match := _LAYER.fullmatch(name)) and match[2] in PARTS:
        return f"layers.{match[1] or 0}.{PARTS[match[2]]}.{match[3]}"
    return None


def _layout(source: HeadSource, stored: Mapping[str, StoredTensor]) -> str:
    if "speculators_model_type" in source.fields:
        return "speculators"
    if any(name.startswith("model.") for name in source.tensors):
        return "vLLM"
    is_midlayer = any(name.startswith("midlayer.") for name in stored)
    return "SafeAILab" if is_midlayer and "eagle_config" not in source.fields else "SpecForge"
