"""Multi-token-prediction modules: DeepSeek's and GLM's, Qwen's, MiMo's.

They come inside a target's checkpoint, or alone in a folder under the same names.

==================  =====================  =======================  ==========================
here                DeepSeek, GLM          Qwen                     MiMo
==================  =====================  =======================  ==========================
where               ``model.layers.{n}.``  ``mtp.``                 ``model.mtp_layers.{i}.``
``embed_norm``      ``enorm``              ``pre_fc_norm_embedding``  ``token_layernorm``
``hidden_norm``     ``hnorm``              ``pre_fc_norm_hidden``   ``hidden_layernorm``
``fc``              ``eh_proj``            ``fc``                   ``input_proj``
``norm``            ``shared_head.norm``   ``norm``                 ``final_layernorm``
``layers.0.*``      beside them            ``layers.{i}.*``         beside them
``fc`` reads first  embedding              embedding                state (before the target's norm)
==================  =====================  =======================  ==========================

``n`` is the target's number of layers. ``embed_tokens`` and ``shared_head.head`` are copies of the
target's where a checkpoint stores them; they are loaded as the module's own. A module is run again
for every further token, so only the first of several is used. The modules of DeepSeek-V3 (MLA,
experts), GLM-4.5 (experts) and Qwen3-Next (gated attention, experts) need layers that our decoder
does not have: they are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outrider.config import Method
from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import MtpConfig
from outrider.models.loading.cache import cache_root
from outrider.models.loading.fields import MAX_LAYERS
from outrider.models.loading.hashing import joint_sha256
from outrider.models.loading.heads.eagle3_config import OURS
from outrider.models.loading.heads.loaded import LoadedHead
from outrider.models.loading.heads.source import HeadSource
from outrider.models.loading.hub import display_name
from outrider.models.loading.huggingface import HARMLESS, LAYER_PARTS, mtp_prefixes
from outrider.models.loading.safetensors_file import StoredTensor


@dataclass(frozen=True, slots=True)
class Family:
    """How one family spells a module.

    ``where`` matches what all its tensors begin with, ``place`` is that of the first module of a
    target with ``num_layers``.
    """

    name: str
    where: re.Pattern[str]
    place: str
    names: Mapping[str, str]
    layer: str = ""
    is_hidden_first: bool = False
    reads_raw_state: bool = False

    def parts(self) -> dict[str, str]:
        """Our names by the family's, both without ``.weight`` and below the module's place."""
        layer = {self.layer + part: f"layers.0.{ours}" for part, ours in LAYER_PARTS.items()}
        return {**self.names, **_SHARED, **layer}


_SHARED = {"embed_tokens": "embed", "shared_head.head": "lm_head", "lm_head": "lm_head"}
FAMILIES = (
    Family(
        "DeepSeek",
        re.compile(r"model\.layers\.(\d{1,6})\."),
        "model.layers.{num_layers}.",
        {
            "enorm": "embed_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "fc",
            "shared_head.norm": "norm",
        },
    ),
    Family(
        "Qwen",
        re.compile(r"mtp\.()"),
        "mtp.",
        {
            "pre_fc_norm_embedding": "embed_norm",
            "pre_fc_norm_hidden": "hidden_norm",
            "fc": "fc",
            "norm": "norm",
        },
        layer="layers.0.",
    ),
    Family(
        "MiMo",
        re.compile(r"model\.mtp_layers\.(\d{1,6})\."),
        "model.mtp_layers.0.",
        {
            "token_layernorm": "embed_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "fc",
            "final_layernorm": "norm",
        },
        is_hidden_first=True,
        reads_raw_state=True,
    ),
)
_LATER_LAYER = re.compile(r"layers\.([1-9]\d*)\.")
# Families whose RMSNorm multiplies by 1 + weight; decided by config.json's model_type.
_ADDS_ONE = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_FOREIGN = {
    re.compile(r".*mlp\.(gate|shared_expert_gate|shared_experts?|experts)\."): "experts (MoE)",
    re.compile(r".*self_attn\.(q_a|q_b|kv_a|kv_b)_"): "multi-head latent attention (MLA)",
    re.compile(r".*linear_attn\."): "linear attention",
}


def has_mtp(path: Path) -> bool:
    """Whether the checkpoint at ``path`` holds a multi-token-prediction module; reads headers only.

    Raises:
        CheckpointError: no weights, or damaged ones.
    """
    if path.is_file() and path.suffix.lower() != ".safetensors":
        return False
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return False
    source = HeadSource.open(path)
    with source.opened:
        return bool(_modules(source, 0)[1])


def load_mtp(target_path: Path, target: DecoderConfig) -> LoadedHead:
    """Read the multi-token-prediction module of the target's own checkpoint.

    Args:
        target_path: the target's folder, or its ``.safetensors`` file.
        target: the target.

    Raises:
        CheckpointError: there is none, or its tensors do not fit; names them.
        UnsupportedModelError: a module with experts, MLA or gated attention.
    """
    source = HeadSource.open(target_path)
    try:
        return load_mtp_source(source, target)
    except BaseException:
        source.opened.close()
        raise


def is_mtp(source: HeadSource, target: DecoderConfig) -> bool:
    """Whether an opened checkpoint holds a module."""
    return bool(_modules(source, target.num_layers)[1])


def load_mtp_source(source: HeadSource, target: DecoderConfig) -> LoadedHead:
    """Read the module of an opened checkpoint; see :func:`load_mtp`."""
    family, modules = _modules(source, target.num_layers)
    if not modules:
        raise CheckpointError(
            f"{source.path}: holds no multi-token-prediction module; looked for mtp.*, "
            f"model.mtp_layers.* and model.layers.{target.num_layers}.eh_proj"
        )
    first = {name: tensor for name, tensor in modules[0].items() if not _later(name)}
    num_modules = len(modules) + len({_later(name) for name in modules[0]} - {None})
    _refuse_foreign(source.path, first)
    found, unexpected = _sort(family, first)
    _refuse_gate(source.path, found, target)
    adds_one = source.fields.text("model_type", "") in _ADDS_ONE
    config = MtpConfig(
        layers=module_layers(target),
        order="hidden_first" if family.is_hidden_first else "embedding_first",
        reads_raw_state=family.reads_raw_state,
        has_own_embedding="embed.weight" in found,
        has_own_head="lm_head.weight" in found,
    )
    readers: dict[str, Callable[[], Tensor]] = {
        name: partial(_plus_one, tensor)
        for name, tensor in found.items()
        if adds_one and name.endswith("norm.weight")
    }
    weights = source.lazy_weights(
        config.weight_shapes(), found, unexpected=unexpected, readers=readers
    )
    try:
        return LoadedHead(
            method=Method.MTP,
            config=config,
            weights=weights,
            name=f"{display_name(source.path)} (MTP)",
            weights_hash=_hash(source, found.values()),
            source_bytes=sum(tensor.num_bytes for tensor in found.values()),
            layout=f"MTP ({family.name})",
            conventions=_conventions(source, config, num_modules, adds_one),
            recorded_acceptance=source.fields.sub(OURS).positive("recorded_acceptance", None),
        )
    except BaseException:
        weights.close()
        raise


def module_layers(target: DecoderConfig) -> DecoderConfig:
    """The decoder layer of a module beside this target: the target's sizes, full attention."""
    return replace(
        target,
        num_layers=1,
        tied_embeddings=False,
        no_rope_layers=(),
        sliding_window=None,
        sliding_layers=(),
    )


def _modules(source: HeadSource, num_layers: int) -> tuple[Family, list[dict[str, StoredTensor]]]:
    """The family, and each module's tensors by their names below the module's place."""
    places = mtp_prefixes(source.tensors, num_layers)
    for family in FAMILIES:
        modules: dict[int, dict[str, StoredTensor]] = {}
        for name, tensor in source.tensors.items():
            if name.startswith(places) and (match := family.where.match(name)):
                modules.setdefault(int(match[1] or 0), {})[name[match.end() :]] = tensor
        if modules:
            return family, [modules[index] for index in sorted(modules)]
    return FAMILIES[0], []


def _later(name: str) -> str | None:
    """The layer of a second or later module of the Qwen family, whose modules share the rest."""
    match = _LATER_LAYER.match(name)
    return match[1] if match else None


def _sort(
    family: Family, module: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors under our names, and the file's names of those that have none."""
    names = family.parts()
    found: dict[str, StoredTensor] = {}
    unexpected = []
    for name, tensor in module.items():
        part, _, kind = name.rpartition(".")
        if part in names and kind in ("weight", "bias") and f"{names[part]}.{kind}" not in found:
            found[f"{names[part]}.{kind}"] = tensor
        elif not HARMLESS.fullmatch(tensor.name):
            unexpected.append(tensor.name)
    return found, unexpected


def _refuse_foreign(path: Path, module: Mapping[str, StoredTensor]) -> None:
    for name, tensor in module.items():
        for pattern, what in _FOREIGN.items():
            if pattern.match(name):
                raise UnsupportedModelError(
                    f"{path}: the multi-token-prediction module uses {what} (tensor "
                    f"{tensor.name}); supported: dense layers with grouped-query attention"
                )


def _refuse_gate(path: Path, found: Mapping[str, StoredTensor], target: DecoderConfig) -> None:
    query = found.get("layers.0.q.weight")
    if query is not None and query.shape[:1] == (2 * target.num_heads * target.head_dim,):
        raise UnsupportedModelError(
            f"{path}: the multi-token-prediction module uses gated attention ({query.name} has two "
            "rows per query dimension); supported: dense layers with grouped-query attention"
        )


def _hash(source: HeadSource, tensors: Iterable[StoredTensor]) -> str:
    """Over config.json and the files that the module is in, not over the whole target."""
    used = {source.fields.path, *(tensor.path for tensor in tensors)}
    return joint_sha256([file for file in source.hashed_files if file in used], cache_root())


def _plus_one(tensor: StoredTensor) -> Tensor:
    return 1 + tensor.read().to(torch.float32)


def _conventions(
    source: HeadSource, config: MtpConfig, num_modules: int, adds_one: bool
) -> tuple[str, ...]:
    first = "the embedding" if config.order == "embedding_first" else "the state"
    notes = [f"fc reads {first} first"]
    if config.reads_raw_state:
        notes.append("the target's state is read before its final norm, as vLLM does for MiMo")
    if adds_one:
        kind = source.fields.text("model_type")
        notes.append(f"norms multiply by 1 + weight (model_type {kind}); the 1 is added on reading")
    if num_modules > 1:
        notes.append(f"{num_modules} modules stored; the first is used for every step")
    stated = source.fields.whole("num_nextn_predict_layers", 0, MAX_LAYERS, num_modules)
    if stated != num_modules:
        notes.append(f"config.json says {stated} modules, the tensors hold {num_modules}")
    own = [
        what
        for what, is_own in (
            ("embedding", config.has_own_embedding),
            ("output head", config.has_own_head),
        )
        if is_own
    ]
    if own:
        notes.append(f"brings its own {' and '.join(own)}")
    return tuple(notes)
