"""One description of a decoder that every checkpoint format is translated into.

Owns the parameters that the Llama family varies and their consistency; knows no file format (that
is :mod:`outrider.models.loading`) and no computation (that is :mod:`outrider.models.layers`).

Weights, once loaded, carry these names whatever the file called them (``{i}`` is the layer)::

    embed.weight  norm.weight  lm_head.weight (absent when tied)
    layers.{i}.attn_norm.weight   layers.{i}.mlp_norm.weight
    layers.{i}.{q,k,v,o}.weight   layers.{i}.{q,k,v,o}.bias        (biases where declared)
    layers.{i}.{gate,up,down}.weight  layers.{i}.{gate,up,down}.bias
    layers.{i}.{q_norm,k_norm}.weight                              (Qwen3: per-head RMSNorm)

with Hugging Face's orientation ``[out, in]`` and half-split RoPE order (GGUF's interleaved q and k
rows are permuted back on loading).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import UnsupportedModelError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "MiMoForCausalLM",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; field names are Hugging Face's ``rope_scaling``.

    ``kind`` is ``default``, ``linear``, ``llama3`` or ``yarn``. Dimensions ``2i`` rotate by
    ``position * theta ** (-2i / head_dim)`` before scaling.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        allowed = ("default", "linear", "llama3", "yarn")
        if self.kind not in allowed:
            raise UnsupportedModelError(
                f"rope_scaling type {self.kind!r} is not supported; supported: {', '.join(allowed)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder of the Llama family.

    ``no_rope_layers`` lists layers without rotation (SmolLM3); ``sliding_window`` is the number
    of latest tokens (itself included) a layer in ``sliding_layers`` may look at.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        if self.hidden_act not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"hidden_act {self.hidden_act!r} is not supported; supported: silu"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim {self.head_dim} is odd; RoPE needs pairs")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight that must be present, with its shape."""
        hidden, mlp = self.hidden_size, self.mlp_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (self.vocab_size, hidden),
            "norm.weight": (hidden,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            shapes[at + "attn_norm.weight"] = (hidden,)
            shapes[at + "mlp_norm.weight"] = (hidden,)
            linears = {
                "q": (queries, hidden, self.attention_bias),
                "k": (keys, hidden, self.attention_bias),
                "v": (keys, hidden, self.attention_bias),
                "o": (hidden, queries, self.attention_out_bias),
                "gate": (mlp, hidden, self.mlp_bias),
                "up": (mlp, hidden, self.mlp_bias),
                "down": (hidden, mlp, self.mlp_bias),
            }
            for name, (rows, columns, has_bias) in linears.items():
                shapes[f"{at}{name}.weight"] = (rows, columns)
                if has_bias:
                    shapes[f"{at}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[at + "q_norm.weight"] = (self.head_dim,)
                shapes[at + "k_norm.weight"] = (self.head_dim,)
        return shapes
