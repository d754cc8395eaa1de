"""``config.json`` of decoder layers, as Hugging Face spells it: our one description, written back.

Owns the fields that :mod:`outrider.models.loading.hf_config` reads, in the other direction. Used by
the writers of heads and draft models.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError, ParameterError
from outrider.models.architecture import DecoderConfig, RopeConfig
from outrider.models.loading.fields import Fields
from outrider.models.loading.hf_config import parse_config

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "MiMoForCausalLM": "mimo",
}


def layer_fields(layers: DecoderConfig, model_type: str) -> dict[str, Any]:
    """The sizes of a head's own layers, whose embedding and output head are not tied."""
    return {
        "model_type": model_type,
        "vocab_size": layers.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.mlp_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": layers.hidden_act,
        "rms_norm_eps": layers.norm_eps,
        "max_position_embeddings": layers.max_position,
        "rope_theta": layers.rope.theta,
        "rope_scaling": _rope_scaling(layers.rope),
        "attention_bias": layers.attention_bias,
        "mlp_bias": layers.mlp_bias,
        "tie_word_embeddings": False,
    }


def decoder_fields(config: DecoderConfig) -> dict[str, Any]:
    """A whole decoder's config.json.

    Raises:
        ParameterError: the architecture has no fields for what ``config`` says.
    """
    values = {
        "architectures": [config.architecture],
        **layer_fields(config, _MODEL_TYPES[config.architecture]),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_out_bias,  # Qwen2 and MiMo have one on q, k, v anyway
        "sliding_window": config.sliding_window,
    }
    if config.architecture == "SmolLM3ForCausalLM":
        plain = config.no_rope_layers
        values["no_rope_layers"] = [int(i not in plain) for i in range(config.num_layers)]
    if config.sliding_layers and config.architecture != "MistralForCausalLM":
        values["use_sliding_window"] = True
        values["layer_types"] = [
            "sliding_attention" if i in config.sliding_layers else "full_attention"
            for i in range(config.num_layers)
        ]
    _check_read_back(values, config)
    return values


def _check_read_back(values: dict[str, Any], config: DecoderConfig) -> None:
    """What no field can say would be lost in silence."""
    try:
        read = parse_config(Fields(Path("config.json"), values))
    except OutriderError as error:
        raise ParameterError(f"{config.architecture} cannot be written: {error}") from None
    names = [field.name for field in fields(DecoderConfig)]
    lost = [name for name in names if getattr(read, name) != getattr(config, name)]
    if lost:
        raise ParameterError(
            f"config.json of {config.architecture} has no words for this {', '.join(lost)}"
        )


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Hugging Face's ``rope_scaling`` of a rope that is not plain."""
    if rope.kind == "default":
        return None
    used = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    yarn = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    settings = asdict(rope)
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    for name in used.get(rope.kind, (*yarn, "truncate")):
        if settings[name] is not None:
            scaling[name] = settings[name]
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return scaling
