"""A decoder layer of the Llama family that can be trained, over packed rows.

Owns the arithmetic that :mod:`outrider.models.layers` computes for serving, here with autograd and
for whole sequences at once: parameters carry the names of :mod:`outrider.models.architecture`, so
that what is trained is what is served. Masters are float32; under autocast the products run in
bfloat16, norms and the residual stream stay as they are. Runs on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.architecture import DecoderConfig
from outrider.models.attention import attention_scale, inverse_frequencies

INIT_STD = 0.02  # of random linears, as in Llama and its relatives
# Of what is added to a layer that begins as the target's: enough to learn from, too little to
# drown what it hands through.
SMALL_STD = 0.002


class Norm(nn.Module):
    """RMSNorm with a weight (Zhang, Sennrich 2019), in the weight's precision."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_RD: Tensor) -> Tensor:
        """Normalised rows."""
        return F.rms_norm(x_RD.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Rotation:
    """Cosine and sine of packed rows' positions; of the target's frequencies."""

    def __init__(self, config: DecoderConfig, position_R: Tensor) -> None:
        frequency = inverse_frequencies(config.rope, config.head_dim).to(position_R.device)
        angle_R1C = torch.outer(position_R.float(), frequency).unsqueeze(1)
        scale = attention_scale(config.rope)
        self._cos_R1C, self._sin_R1C = angle_R1C.cos() * scale, angle_R1C.sin() * scale

    def __call__(self, heads_RHK: Tensor) -> Tensor:
        """Rotated heads, in half-split order."""
        first, second = heads_RHK.chunk(2, dim=-1)
        cos, sin = self._cos_R1C, self._sin_R1C
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TrainableLayer(nn.Module):
    """One decoder layer.

    Args:
        config: sizes and options, which are those of all layers.
        inputs: width of what q, k and v read; the hidden size unless given.
        has_rope: whether queries and keys are rotated.
        window: how many latest positions a row sees, its own included; None for all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        inputs: int | None = None,
        has_rope: bool = True,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._has_rope = has_rope
        self._window = window
        hidden, mlp = config.hidden_size, config.mlp_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        width, has_bias = inputs or hidden, config.attention_bias
        self.attn_norm = Norm(hidden, config.norm_eps)
        self.mlp_norm = Norm(hidden, config.norm_eps)
        self.q = nn.Linear(width, queries, bias=has_bias)
        self.k = nn.Linear(width, keys, bias=has_bias)
        self.v = nn.Linear(width, keys, bias=has_bias)
        self.o = nn.Linear(queries, hidden, bias=config.attention_out_bias)
        self.gate = nn.Linear(hidden, mlp, bias=config.mlp_bias)
        self.up = nn.Linear(hidden, mlp, bias=config.mlp_bias)
        self.down = nn.Linear(mlp, hidden, bias=config.mlp_bias)
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def project(self, normed_RX: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[R, H, K]``, keys and values ``[R, G, K]``, of one type, rotated."""
        size = (-1, self.config.head_dim)
        query_RHK = self.q(normed_RX).unflatten(-1, size)
        key_RGK = self.k(normed_RX).unflatten(-1, size)
        value_RGK = self.v(normed_RX).unflatten(-1, size)
        if self.q_norm is not None and self.k_norm is not None:
            query_RHK, key_RGK = self.q_norm(query_RHK), self.k_norm(key_RGK)
        if self._has_rope:
            query_RHK, key_RGK = rotation(query_RHK), rotation(key_RGK)
        return query_RHK.to(value_RGK.dtype), key_RGK.to(value_RGK.dtype), value_RGK

    def finish(self, heads_RHK: Tensor, residual_RD: Tensor) -> Tensor:
        """What follows attention: its output added to the residual, then the MLP."""
        x_RD = residual_RD + self.o(heads_RHK.flatten(1))
        normed_RD = self.mlp_norm(x_RD)
        return x_RD + self.down(F.silu(self.gate(normed_RD)) * self.up(normed_RD))

    def forward(self, x_RD: Tensor, rotation: Rotation, counts: Sequence[int]) -> Tensor:
        """The whole layer over sequences of ``counts`` rows."""
        query_RHK, key_RGK, value_RGK = self.project(self.attn_norm(x_RD), rotation)
        heads_RHK = causal_attention(query_RHK, key_RGK, value_RGK, counts, self._window)
        return self.finish(heads_RHK, x_RD)


def causal_attention(
    query_RHK: Tensor,
    key_RGK: Tensor,
    value_RGK: Tensor,
    counts: Sequence[int],
    window: int | None = None,
) -> Tensor:
    """Attention ``[R, H, K]`` of each row to the rows of its sequence up to itself."""
    counts = list(counts)
    parts = zip(
        query_RHK.split(counts), key_RGK.split(counts), value_RGK.split(counts), strict=True
    )
    outputs = [_one_sequence(*part, window) for part in parts if len(part[0])]
    return torch.cat(outputs) if outputs else query_RHK


def _one_sequence(
    query_THK: Tensor, key_TGK: Tensor, value_TGK: Tensor, window: int | None
) -> Tensor:
    length = len(query_THK)
    mask_TT = None
    if window is not None and length > window:
        mask_TT = torch.ones(length, length, dtype=torch.bool, device=query_THK.device)
        mask_TT = mask_TT.tril().triu(1 - window)
    out_HTK = F.scaled_dot_product_attention(
        query_THK.transpose(0, 1).unsqueeze(0),
        key_TGK.transpose(0, 1).unsqueeze(0),
        value_TGK.transpose(0, 1).unsqueeze(0),
        attn_mask=mask_TT,
        is_causal=mask_TT is None,
        enable_gqa=query_THK.shape[1] != key_TGK.shape[1],
    )
    return out_HTK[0].transpose(0, 1)


def randomise(module: nn.Module, *, std: float, seed: int) -> None:
    """Draw every linear of a module anew; biases become 0, norms stay 1."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            drawn = torch.randn(part.weight.shape, generator=generator) * std
            part.weight.data.copy_(drawn)
            if part.bias is not None:
                part.bias.data.zero_()


def copy_layer(
    layer: TrainableLayer, weights: Mapping[str, Tensor], index: int, *, mlp_rows: Tensor | None
) -> None:
    """Give a layer the weights of the target's layer ``index``.

    Where q, k and v read more than the target's, its weights become their last columns and the
    others are left. ``mlp_rows`` are the MLP's units to keep; None for all.
    """
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            key = f"layers.{index}.{name}"
            if key not in weights:
                continue  # a norm that only the head has
            source = weights[key].to(parameter)
            if mlp_rows is not None and name.split(".")[0] in ("gate", "up"):
                source = source[mlp_rows]
            elif mlp_rows is not None and name == "down.weight":
                source = source[:, mlp_rows]
            parameter[..., parameter.shape[-1] - source.shape[-1] :].copy_(source)
