"""An architecture in words: the lines about a decoder that ``inspect`` shows.

Owns the wording, for a whole model as for a head's own layers. Used by
:mod:`outrider.commands.inspection` and :mod:`outrider.commands.head_inspection`.
"""

from __future__ import annotations

from outrider.models.architecture import DecoderConfig, RopeConfig


def size_line(config: DecoderConfig) -> str:
    """Hidden and MLP size."""
    return f"{config.hidden_size:,} / {config.mlp_size:,}"


def attention_line(config: DecoderConfig) -> str:
    """Heads and their dimension."""
    return (
        f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of "
        f"{config.head_dim}"
    )


def rope_line(rope: RopeConfig) -> str:
    """The rotary embedding in one line, with the fields its kind uses."""
    fields = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
        "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position", "attention_factor"),
    }[rope.kind]
    values = [f"{name} {getattr(rope, name)}" for name in fields]
    return ", ".join([f"{rope.kind}, theta {rope.theta:,.0f}", *values])


def extras_line(config: DecoderConfig) -> str:
    """The options beyond the plain Llama layer that are in use; a dash for none."""
    options = {
        "attention bias": config.attention_bias,
        "attention output bias": config.attention_out_bias,
        "MLP bias": config.mlp_bias,
        "per-head query and key norms": config.qk_norm,
        f"{len(config.no_rope_layers)} layers without rotation": bool(config.no_rope_layers),
        f"sliding window of {config.sliding_window} in {len(config.sliding_layers)} layers": bool(
            config.sliding_layers
        ),
    }
    return ", ".join(name for name, used in options.items() if used) or "-"
