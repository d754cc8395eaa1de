"""A Hugging Face folder's weights, in one safetensors file or in shards.

Which files those are, :mod:`~outrider.models.loading.weight_files` says. Weights come out under the
names of :mod:`outrider.models.architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from outrider.models.architecture import DecoderConfig
from outrider.models.loading.fields import Fields, read_json
from outrider.models.loading.safetensors_file import open_tensors
from outrider.models.loading.weights import LazyWeights, check_weights

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
# Modules of one decoder layer, by Hugging Face's name below "layers.{i}.".
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    **{f"self_attn.{part}_proj": part for part in "qkvo"},
    **{f"self_attn.{part}_norm": f"{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.([\w.]+)\.(weight|bias)")
# Buffers that old exports saved along; they follow from the config.
HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.attn\.masked_bias")
# Where a checkpoint keeps multi-token-prediction modules: Qwen, MiMo; DeepSeek and GLM append them
# to the layers, where these modules tell them from a layer that the config does not declare.
_MTP_PREFIXES = ("mtp.", "model.mtp_layers.")
_MTP_LAYER = re.compile(r"(model\.layers\.(0|[1-9]\d{0,5})\.)(?:eh_proj|enorm|hnorm)\.weight")


def open_weights(files: Iterable[Path], config: DecoderConfig, folder: Path) -> LazyWeights:
    """Open the files and check every tensor's name and shape against ``config``.

    Multi-token-prediction modules are left to :mod:`outrider.models.loading.heads`.

    Raises:
        CheckpointError: a damaged file, or weights that do not fit; names file and tensors.
        UnsupportedModelError: weights stored in another type than F32, F16 or BF16.
    """
    readers: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    unexpected: list[str] = []
    with ExitStack() as opened:
        tensors = open_tensors(files, opened)
        skipped = mtp_prefixes(tensors, config.num_layers)
        for stored, tensor in tensors.items():
            if stored.startswith(skipped):
                continue
            name = _our_name(stored)
            if name is None or (name == "lm_head.weight" and config.tied_embeddings):
                if name is None and not HARMLESS.fullmatch(stored):
                    unexpected.append(stored)
                continue
            tensor.require_kind()
            shapes[name] = tensor.shape
            readers[name] = tensor.read
        check_weights(config.weight_shapes(), shapes, folder, unexpected=unexpected)
        return LazyWeights(folder, readers, opened.pop_all().close)
    raise AssertionError("unreachable: the stack swallows no exception")


def mtp_prefixes(names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Where tensors of multi-token-prediction modules begin; ``num_layers`` is the target's."""
    layers = {
        match[1]
        for name in names
        if (match := _MTP_LAYER.fullmatch(name)) and int(match[2]) >= num_layers
    }
    return (*_MTP_PREFIXES, *sorted(layers, key=lambda prefix: (len(prefix), prefix)))


def _our_name(stored: str) -> str | None:
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    if (match := _LAYER.fullmatch(stored)) and match[2] in LAYER_PARTS:
        return f"layers.{match[1]}.{LAYER_PARTS[match[2]]}.{match[3]}"
    return None


def read_config_fields(folder: Path) -> Fields:
    """The parsed ``config.json`` of ``folder``.

    Raises:
        CheckpointError: missing or damaged.
    """
    path = folder / "config.json"
    return Fields(path, read_json(path))
