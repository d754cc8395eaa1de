"""What a GGUF file of the Llama family means: its config and its weights under our names.

Sits between :mod:`.gguf_file`, which knows the container, and :mod:`outrider.models.loading`. What
llama.cpp's converter changed is changed back here: the row order of q and k, and Llama 3's rope
scaling, which it folds into a tensor of factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.architecture import DecoderConfig, RopeConfig
from outrider.models.loading.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_WIDTH,
    Fields,
    at_path,
)
from outrider.models.loading.gguf_file import GGUFFile
from outrider.models.loading.weights import LazyWeights, check_weights

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral is written as llama
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# The converter interleaves the two halves of each rotary pair for these.
_INTERLEAVED = ("llama", "smollm3")
_SMOLLM3_NO_ROPE_EVERY = 4  # llama.cpp hard-codes it; the file does not say

_GLOBAL_NAMES = {"token_embd": "embed", "output_norm": "norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
_GLOBAL = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_HARMLESS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")


def read_config(file: GGUFFile) -> DecoderConfig:
    """Translate the metadata.

    Raises:
        CheckpointError: a field is missing or out of range.
        UnsupportedModelError: another architecture, a split file, an adapter, an unknown scaling.
    """
    general = Fields(file.path, file.metadata)
    name = general.text("general.architecture")
    kind = general.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{file.path}: a GGUF {kind}, not a model")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if general.whole("split.count", 0, 2**16, 1) > 1:
        raise UnsupportedModelError(
            f"{file.path}: one part of a split GGUF; merge the parts first (gguf-split --merge)"
        )
    fields = Fields(file.path, file.metadata, f"{name}.")
    if fields.whole("expert_count", 0, 2**16, 0):
        raise UnsupportedModelError(f"{file.path}: a mixture of experts is not supported yet")
    with at_path(file.path):
        return _config(file, fields, name)


def _config(file: GGUFFile, fields: Fields, name: str) -> DecoderConfig:
    hidden_size = fields.whole("embedding_length", 1, MAX_WIDTH)
    num_layers = fields.whole("block_count", 1, MAX_LAYERS)
    num_heads = fields.whole("attention.head_count", 1, MAX_HEADS)
    head_dim = fields.whole("attention.key_length", 2, MAX_WIDTH, None)
    if head_dim is None:
        head_dim = hidden_size // num_heads
    for other in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(other, 1, MAX_WIDTH, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{name}.{other} {fields.raw(other)} differs from the head's {head_dim} "
                "dimensions; only full heads are supported"
            )
    max_position = fields.whole("context_length", 1, MAX_POSITION)
    window = fields.whole("attention.sliding_window", 0, MAX_POSITION, 0) if name == "llama" else 0
    every = _SMOLLM3_NO_ROPE_EVERY
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("tensor token_embd.weight is missing")
    return DecoderConfig(
        architecture=ARCHITECTURES[name],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.whole("attention.head_count_kv", 1, MAX_HEADS, num_heads),
        head_dim=head_dim,
        mlp_size=fields.whole("feed_forward_length", 1, MAX_WIDTH),
        norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        max_position=max_position,
        rope=_rope(file, fields, head_dim, max_position),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=name == "qwen3",
        no_rope_layers=(tuple(range(every - 1, num_layers, every)) if name == "smollm3" else ()),
        sliding_window=window or None,
        sliding_layers=tuple(range(num_layers)) if window else (),
    )


def _rope(file: GGUFFile, fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    theta = fields.positive("rope.freq_base", 10000.0)
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    original = fields.whole("rope.scaling.original_context_length", 1, MAX_POSITION, max_position)
    if _ROPE_FACTORS in file.tensors:
        if kind not in ("none", "linear") or factor != 1.0:
            raise UnsupportedModelError(f"rope scaling {kind!r} together with {_ROPE_FACTORS}")
        return _llama3_rope(file, theta, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta)
    if kind == "yarn":
        attention = fields.positive(
            "rope.scaling.attn_factor", fields.positive("rope.scaling.yarn_attn_factor", 1.0)
        )
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=fields.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.positive("rope.scaling.yarn_beta_slow", 1.0),
            # llama.cpp multiplies this with yarn's own factor; Hugging Face replaces it.
            attention_factor=(
                None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0)
            ),
        )
    return RopeConfig(theta=theta, kind=kind, factor=factor)


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """Recover Llama 3's scaling from the per-frequency divisors that llama.cpp stores.

    Only ratios of ``low_freq_factor``, ``high_freq_factor`` and the original length show in them,
    so any triple that gives the same divisors is the same rope.
    """
    if file.tensors[_ROPE_FACTORS].shape != (head_dim // 2,):
        raise CheckpointError(f"tensor {_ROPE_FACTORS} does not hold {head_dim // 2} numbers")
    divisors = file.read(_ROPE_FACTORS).double().numpy()
    if not np.isfinite(divisors).all() or divisors.min() < 0.999:
        raise CheckpointError(f"tensor {_ROPE_FACTORS} holds values below 1 or no numbers")
    if np.allclose(divisors, 1.0):
        return RopeConfig(theta=theta)
    factor = float(divisors.max())
    for low, high, original in _llama3_candidates(divisors, theta, head_dim):
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
        if np.allclose(llama3_divisors(rope, head_dim), divisors, rtol=1e-4):
            return rope
    raise UnsupportedModelError(f"tensor {_ROPE_FACTORS} is not Llama 3's rope scaling")


def _llama3_candidates(
    divisors: np.ndarray, theta: float, head_dim: int
) -> list[tuple[float, float, int]]:
    """Published values first, then a line through the divisors between the two plateaus."""
    original = 8192
    candidates = [(1.0, 4.0, original)]
    factor = divisors.max()
    between = (divisors > 1.001) & (divisors < factor * 0.999)
    if between.sum() >= 2:
        smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        rotations = original / _wavelengths(theta, head_dim)[between]
        slope, offset = np.polyfit(rotations, smooth, 1)
        if slope > 0:
            candidates.append((-offset / slope, (1 - offset) / slope, original))
    return candidates


def llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """What each rotary frequency is divided by under ``llama3`` scaling; ``[head_dim / 2]``."""
    rotations = rope.original_max_position / _wavelengths(rope.theta, head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)


def _wavelengths(theta: float, head_dim: int) -> np.ndarray:
    return 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)


def open_weights(file: GGUFFile, config: DecoderConfig) -> LazyWeights:
    """The weights under our names, checked against ``config``.

    Raises:
        CheckpointError: names every missing, unexpected and wrongly shaped tensor.
    """
    interleaved = file.metadata["general.architecture"] in _INTERLEAVED
    readers: dict[str, Callable[[], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    unexpected = []
    for stored, info in file.tensors.items():
        name = _our_name(stored)
        if name is None:
            if not _HARMLESS.fullmatch(stored):
                unexpected.append(stored)
            continue
        shapes[name] = info.shape
        readers[name] = partial(file.read, stored)
        if interleaved and (heads := _rotated_heads(name, config)):
            readers[name] = partial(_half_split, readers[name], heads)
    check_weights(config.weight_shapes(), shapes, file.path, unexpected=unexpected)
    return LazyWeights(file.path, readers, file.close)


def _our_name(stored: str) -> str | None:
    if match := _LAYER.fullmatch(stored):
        layer, part, kind = match.groups()
        return f"layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None
    if (match := _GLOBAL.fullmatch(stored)) and match[1] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[match[1]]}.{match[2]}"
    return None


def _rotated_heads(name: str, config: DecoderConfig) -> int:
    part = name.split(".")[-2]
    return {"q": config.num_heads, "k": config.num_kv_heads}.get(part, 0)


def _half_split(read: Callable[[], Tensor], num_heads: int) -> Tensor:
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, 2, ...)."""
    tensor = read()
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
