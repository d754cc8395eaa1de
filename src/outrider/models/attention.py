"""Attention over the committed prefix and each node's ancestors, in float64, rounded once.

Owns masks, rotary positions and the order-independence that exactness rests on: sums over keys are
accumulated in float64 and rounded once to the compute dtype, so neither the number of rows, nor
the slots the keys lie in, nor masked siblings between them can change a bit (the chance that two
float64 summation orders straddle a bfloat16 rounding boundary is about 1e-13 per element).

Called by :mod:`outrider.models.layers` once per layer; :func:`reference_attention` is the plain
twin that the tests hold it against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.architecture import RopeConfig

# float32 keeps 24 bits, too near to float64's 53 for one rounding to hide the summation order
# (a chance of about 1e-4 per row of the embedded model). Shortened to 20 bits first, the chance
# falls to about 1e-5. Fewer bits would lower it further, but cost parity: the embedded model's
# logits differ from transformers' float32 by at most 1.6e-4 with 20 bits, 3.1e-4 with 18, 1.2e-4
# with 24.
SHORTENED_BITS = 20
TABLE_BLOCK = 1024  # positions by which the rotary table grows
_SPLITTER = float(2 ** (53 - SHORTENED_BITS) + 1)


def attention(
    query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, bias_B1TS: Tensor | None
) -> Tensor:
    """Softmax attention ``[B, H, T, K]`` in float64; ``bias`` is 0 where visible, else -inf."""
    if query_BHTK.shape[2] == 1:
        return _attend_one_row(query_BHTK, key_BGSK.double(), value_BGSK.double(), bias_B1TS)
    return F.scaled_dot_product_attention(
        query_BHTK,
        key_BGSK.double(),
        value_BGSK.double(),
        attn_mask=bias_B1TS,
        enable_gqa=query_BHTK.shape[1] != key_BGSK.shape[1],
    )


def _attend_one_row(
    query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, bias_B1TS: Tensor | None
) -> Tensor:
    """One row per request: the heads that share keys become the rows of plain products.

    Half the time of the fused kernel, which cuts so little work into blocks (33 against 59 us at
    200 slots of the embedded model, two threads).
    """
    num_requests, num_heads, _, head_dim = query_BHTK.shape
    num_groups = key_BGSK.shape[1]
    grouped = query_BHTK.reshape(num_requests, num_groups, num_heads // num_groups, head_dim)
    scores = torch.matmul(grouped * (1 / math.sqrt(head_dim)), key_BGSK.transpose(-1, -2))
    if bias_B1TS is not None:
        scores += bias_B1TS
    return torch.matmul(scores.softmax(-1), value_BGSK).reshape(query_BHTK.shape)


def reference_attention(
    query_BHTK: Tensor, key_BGSK: Tensor, value_BGSK: Tensor, bias_B1TS: Tensor | None
) -> Tensor:
    """The same by its definition: softmax(q k / sqrt(K) + bias) v, one einsum per line."""
    group = query_BHTK.shape[1] // key_BGSK.shape[1]
    key_BHSK = key_BGSK.double().repeat_interleave(group, dim=1)
    value_BHSK = value_BGSK.double().repeat_interleave(group, dim=1)
    scores_BHTS = torch.einsum("bhtk,bhsk->bhts", query_BHTK, key_BHSK)
    scores_BHTS = scores_BHTS / math.sqrt(query_BHTK.shape[-1])
    if bias_B1TS is not None:
        scores_BHTS = scores_BHTS + bias_B1TS
    return torch.einsum("bhts,bhsk->bhtk", scores_BHTS.softmax(-1), value_BHSK)


def shorten(x: Tensor) -> Tensor:
    """Round float64 to ``SHORTENED_BITS`` of mantissa (Veltkamp's splitting)."""
    scaled = x * _SPLITTER
    return scaled - (scaled - x)


def visibility_bias(
    ends: Sequence[int],
    counts: Sequence[int],
    ancestor_masks: Sequence[Tensor | None],
    depths: Sequence[Sequence[int]],
    window: int | None = None,
) -> Tensor | None:
    """Additive mask ``[B, 1, T, S]`` (float64): each row sees the prefix and its ancestors.

    ``ends[b]`` is request b's number of slots; the last ``counts[b]`` hold this pass' rows.
    ``ancestor_masks[b]`` is bool ``[T_b, P_b + T_b]``, None for a chain; its first ``P_b`` columns
    are rows of the same tree that earlier passes wrote. ``depths[b]`` are the ``P_b + T_b`` rows'
    distances from the first position behind the prefix. With ``window``, only the latest
    ``window`` positions (the row's own included) are visible. Returns None where every row sees
    every slot.
    """
    if len(ends) == 1 and counts[0] == len(depths[0]) == 1 and window is None:
        return None
    shape = len(ends), max(counts), max(ends)
    bias_BTS = torch.full(shape, -math.inf, dtype=torch.float64)
    for bias_TS, end, count, mask, depth in zip(
        bias_BTS, ends, counts, ancestor_masks, depths, strict=True
    ):
        prefix = end - len(depth)
        bias_TS[:count, :prefix] = 0.0
        tree_TT = bias_TS[:count, prefix:end]
        if mask is None:  # a chain: each row sees all rows before it
            above = torch.full(tree_TT.shape, -math.inf, dtype=torch.float64)
            tree_TT.copy_(above.triu(1 + len(depth) - count))
        else:
            tree_TT.masked_fill_(mask, 0.0)
        if window is not None:
            tree_S = prefix + torch.tensor(depth)
            key_S = torch.cat([torch.arange(prefix), tree_S])
            is_past = tree_S[-count:].unsqueeze(1) - key_S >= window
            bias_TS[:count, :end].masked_fill_(is_past, -math.inf)
        bias_TS[count:, 0] = 0.0  # padding rows look at something, so that no NaN is made
    return bias_BTS.unsqueeze(1)


class Rotary:
    """Rotary positions of one model: ``rotation(position_R)`` as complex numbers.

    Frequencies follow Hugging Face's definitions (``modeling_rope_utils``): float32 inverse
    frequencies and float32 angles, as the models were trained; cosine and sine in float64. They
    come from a table that grows by whole blocks, so a position's value never depends on which
    others are asked for.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._inverse_frequency = inverse_frequencies(config, head_dim)
        self._scale = attention_scale(config)
        self._table_PC = self._block(0)

    def rotation(self, position_R: Tensor) -> Tensor:
        """Complex128 ``[R, 1, K / 2]``, to be multiplied with interleaved pairs."""
        table_PC, last = self._table_PC, int(position_R.max())
        while last >= len(table_PC):
            table_PC = torch.cat([table_PC, self._block(len(table_PC))])
        self._table_PC = table_PC  # in one piece: engines in several threads share the model
        return table_PC[position_R].unsqueeze(1)

    def _block(self, start: int) -> Tensor:
        position_P = torch.arange(start, start + TABLE_BLOCK).float()
        angle_PC = torch.outer(position_P, self._inverse_frequency).double()
        return torch.polar(torch.full_like(angle_PC, self._scale), angle_PC)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Float32 ``[K / 2]`` of angular frequency per position, after the configured scaling."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (config.theta**exponent)
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(base, config)
    if config.kind == "yarn":
        return _yarn_frequencies(base, config, head_dim)
    return base


def _llama3_frequencies(base: Tensor, config: RopeConfig) -> Tensor:
    """Long waves divided by ``factor``, short ones kept, a smooth blend between (Llama 3.1)."""
    longest = config.original_max_position / config.low_freq_factor
    shortest = config.original_max_position / config.high_freq_factor
    wavelength = 2 * math.pi / base
    scaled = torch.where(wavelength > longest, base / config.factor, base)
    blend = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    smooth = (1 - blend) * scaled / config.factor + blend * scaled
    is_between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(is_between, smooth, scaled)


def _yarn_frequencies(base: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Interpolated and original frequencies blended by a ramp over dimensions (YaRN)."""

    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as in the reference
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return base / config.factor * ramp + base * (1 - ramp)


def attention_scale(config: RopeConfig) -> float:
    """Factor on cosine and sine; 1 except for YaRN (0.1 ln(factor) + 1, or as configured)."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * scale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)
