"""``config.json`` of a Hugging Face folder, translated into our one decoder description.

Owns the fields, their defaults per architecture and their ranges, as transformers reads them; of
both spellings of the rope settings. Nothing in the file is ever run: ``auto_map`` is not looked at.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import UnsupportedModelError
from outrider.models.architecture import ARCHITECTURES, DecoderConfig, RopeConfig
from outrider.models.loading.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    at_path,
)

_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mimo": "MiMoForCausalLM",
}
# MiMo is Qwen2 but for its multi-token-prediction modules, which are a draft head.
_QWEN2 = ("Qwen2ForCausalLM", "MiMoForCausalLM")
# Where transformers' defaults differ between the families.
_MAX_POSITION = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 4096 * 32,
}
_TIED = ("SmolLM3ForCausalLM",)
_THETA = {"SmolLM3ForCausalLM": 2_000_000.0}
_HEAD_DIM = {"Qwen3ForCausalLM": 128}
_MISTRAL_WINDOW = 4096


def parse_config(fields: Fields) -> DecoderConfig:
    """Translate a ``config.json``.

    Raises:
        CheckpointError: a field is missing, of the wrong type or out of range; names it.
        UnsupportedModelError: an architecture, rope scaling or quantisation that is not ours.
    """
    with at_path(fields.path):
        architecture = _architecture(fields)
        if "quantization_config" in fields:
            method = fields.sub("quantization_config").raw("quant_method", "unknown")
            raise UnsupportedModelError(
                f"quantised weights ({method!r}) are not supported; use the original weights or "
                "a GGUF file"
            )
        return _config(fields, architecture)


def _architecture(fields: Fields) -> str:
    listed = fields.raw("architectures", None)
    if isinstance(listed, list) and listed and isinstance(listed[0], str):
        name = listed[0]
    else:
        model_type = fields.text("model_type")
        name = _BY_MODEL_TYPE.get(model_type, model_type)
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _config(fields: Fields, architecture: str) -> DecoderConfig:
    hidden_size = fields.whole("hidden_size", 1, MAX_WIDTH)
    num_layers = fields.whole("num_hidden_layers", 1, MAX_LAYERS)
    num_heads = fields.whole("num_attention_heads", 1, MAX_HEADS)
    head_dim = fields.whole("head_dim", 1, MAX_WIDTH, _HEAD_DIM.get(architecture))
    if head_dim is None:
        head_dim = hidden_size // num_heads
        if head_dim * num_heads != hidden_size:
            raise fields.error(
                "hidden_size", f"is {hidden_size}, not a multiple of {num_heads} attention heads"
            )
    max_position = fields.whole(
        "max_position_embeddings", 1, MAX_POSITION, _MAX_POSITION.get(architecture, 32768)
    )
    attention_bias = fields.flag("attention_bias", False)
    is_qwen2, is_mistral = architecture in _QWEN2, architecture == "MistralForCausalLM"
    has_mlp_bias = architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM")
    no_rope = _no_rope_layers(fields, num_layers) if architecture == "SmolLM3ForCausalLM" else ()
    window, sliding_layers = _sliding(fields, architecture, num_layers, no_rope)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.whole("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.whole("num_key_value_heads", 1, MAX_HEADS, num_heads),
        head_dim=head_dim,
        mlp_size=fields.whole("intermediate_size", 1, MAX_WIDTH),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=_rope(fields, architecture, max_position),
        tied_embeddings=fields.flag("tie_word_embeddings", architecture in _TIED),
        attention_bias=is_qwen2 or (attention_bias and not is_mistral),
        attention_out_bias=attention_bias and not (is_qwen2 or is_mistral),
        mlp_bias=has_mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        no_rope_layers=no_rope,
        sliding_window=window,
        sliding_layers=sliding_layers,
        hidden_act=fields.text("hidden_act", "silu"),
    )


def _no_rope_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """SmolLM3: a 0 in ``no_rope_layers`` means no rotation; else every nth layer has none."""
    listed = fields.raw("no_rope_layers", None)
    if listed is None:
        every = fields.whole("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return tuple(range(every - 1, num_layers, every))
    if not isinstance(listed, list) or len(listed) < num_layers or set(listed) - {0, 1}:
        raise fields.error("no_rope_layers", f"is not a list of 0 and 1 for {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not listed[layer])


def _sliding(
    fields: Fields, architecture: str, num_layers: int, no_rope: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers it holds for; Mistral's holds for all of them."""
    if architecture == "LlamaForCausalLM":
        return None, ()
    if architecture == "MistralForCausalLM":
        absent = None if fields.states("sliding_window") else _MISTRAL_WINDOW
        window = fields.whole("sliding_window", 1, MAX_POSITION, absent)
        return window, tuple(range(num_layers)) if window else ()
    if not fields.flag("use_sliding_window", False):
        return None, ()
    window = fields.whole("sliding_window", 1, MAX_POSITION, None)
    kinds = fields.raw("layer_types", None)
    if kinds is not None:
        allowed = ("full_attention", "sliding_attention")
        sound = isinstance(kinds, list) and len(kinds) == num_layers
        if not sound or any(kind not in allowed for kind in kinds):
            raise fields.error("layer_types", f"is not one of {allowed} for {num_layers} layers")
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    elif architecture == "SmolLM3ForCausalLM":
        layers = no_rope
    else:
        first = fields.whole("max_window_layers", 0, MAX_LAYERS, 28)
        layers = tuple(range(min(first, num_layers), num_layers))
    return (window, layers) if window and layers else (None, ())


def _rope(fields: Fields, architecture: str, max_position: int) -> RopeConfig:
    """Rope settings: ``rope_scaling`` beside ``rope_theta``, or both in ``rope_parameters``."""
    scaling = fields.sub("rope_scaling")
    if not scaling.values():
        scaling = fields.sub("rope_parameters")
    if nested := [key for key, value in scaling.values().items() if isinstance(value, dict)]:
        raise UnsupportedModelError(f"rope settings per layer type ({nested[0]}) are not supported")
    theta = scaling.positive("rope_theta", None)
    if theta is None:
        theta = fields.positive("rope_theta", _THETA.get(architecture, 10000.0))
    partial = scaling.positive(
        "partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0)
    )
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; allowed: 1")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        return RopeConfig(theta=theta, kind=kind)  # refuses it by name
    settings: dict[str, Any] = {}
    if kind != "linear":
        name = "original_max_position_embeddings"  # of two places, the outer one counts
        original = scaling.whole(name, 1, MAX_POSITION, max_position)
        settings["original_max_position"] = fields.whole(name, 1, MAX_POSITION, original)
    if kind == "yarn":
        ratio = max_position / settings["original_max_position"]
        settings["factor"] = scaling.positive("factor", ratio)
        settings["beta_fast"] = scaling.positive("beta_fast", 32.0)
        settings["beta_slow"] = scaling.positive("beta_slow", 1.0)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            settings[name] = scaling.positive(name, None)
        settings["truncate"] = scaling.flag("truncate", True)
    else:
        settings["factor"] = scaling.positive("factor")
    if kind == "llama3":
        settings["low_freq_factor"] = scaling.positive("low_freq_factor")
        settings["high_freq_factor"] = scaling.positive("high_freq_factor")
        if settings["low_freq_factor"] >= settings["high_freq_factor"]:
            raise scaling.error("low_freq_factor", "is not below high_freq_factor")
    return RopeConfig(theta=theta, kind=kind, **settings)
