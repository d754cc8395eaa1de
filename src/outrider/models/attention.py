"""What each row of a pass sees and where it stands: the kernel's view of prefixes and trees.

Owns the visible keys of every row (the committed prefix, then the row's own ancestors, in the order
of their positions), how a pass is cut into pieces of work, and rotary positions.

:mod:`outrider.models.layers` plans a pass with it; :mod:`outrider.models.kernels.attention`
computes. :func:`reference_attention` is that kernel's plain twin, which the tests hold it against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.models.architecture import RopeConfig

TABLE_BLOCK = 1024  # positions by which the rotary table grows
MAX_ITEM_ROWS = 16  # rows of one piece of work, whose scores lie in the processor's cache
MAX_ITEM_SCORES = 2**16


@dataclass(frozen=True, slots=True)
class Sight:
    """What each of a pass' rows sees, and the pieces of work to compute it in.

    Row r sees the slots ``low_R[r] .. high_R[r]`` and, behind them, ``tail_slots[tail_R[r] :
    tail_R[r + 1]]``: the whole of a chain, or a tree's prefix and the node's ancestors with
    itself. ``item_I4`` holds (first row, rows, group, end of the slots they see), in an order that
    gives threads equal shares.
    """

    low_R: np.ndarray
    high_R: np.ndarray
    tail_R: np.ndarray
    tail_slots: np.ndarray
    item_I4: np.ndarray

    @property
    def seen(self) -> tuple[np.ndarray, ...]:
        """As the kernel takes it."""
        return self.low_R, self.high_R, self.tail_R, self.tail_slots

    def visible(self, row: int) -> np.ndarray:
        """The slots a row sees, in the order of their positions."""
        span = np.arange(self.low_R[row], self.high_R[row])
        return np.concatenate([span, self.tail_slots[self.tail_R[row] : self.tail_R[row + 1]]])


def plan_sight(
    ends: Sequence[int],
    counts: Sequence[int],
    ancestor_masks: Sequence[Tensor | None],
    depths: Sequence[Sequence[int]],
    *,
    num_groups: int,
    heads_per_group: int,
    num_threads: int,
    window: int | None = None,
) -> Sight:
    """What the packed rows of some segments see.

    ``ends[b]`` is segment b's number of slots; the last ``counts[b]`` hold this pass' rows.
    ``ancestor_masks[b]`` is bool ``[T_b, P_b + T_b]``, None for a chain; its first ``P_b`` columns
    are rows of the same tree that earlier passes wrote. ``depths[b]`` are the ``P_b + T_b`` rows'
    distances from the first position behind the prefix. With ``window``, only the latest
    ``window`` positions (the row's own included) are visible.
    """
    lows, highs, tails, tail_counts = [], [], [], []
    pieces: list[tuple[int, int, int]] = []
    first = 0
    for end, count, mask, depth in zip(ends, counts, ancestor_masks, depths, strict=True):
        prefix = end - len(depth)
        if mask is None:
            high_T = np.arange(end - count, end) + 1
            tail, tail_count_T = np.empty(0, np.int64), np.zeros(count, np.int64)
            low_T = np.zeros(count, np.int64) if window is None else np.maximum(high_T - window, 0)
        else:
            high_T = np.full(count, prefix)
            low_T = np.zeros(count, np.int64)
            is_seen = mask.numpy()
            if window is not None:
                depth_P = np.array(depth)
                oldest_T = depth_P[-count:] + 1 - window
                is_seen = is_seen & (depth_P >= oldest_T[:, None])
                low_T = np.clip(prefix + oldest_T, 0, prefix)
            tail, tail_count_T = prefix + np.nonzero(is_seen)[1], is_seen.sum(1)
        lows.append(low_T)
        highs.append(high_T)
        tails.append(tail)
        tail_counts.append(tail_count_T)
        most = MAX_ITEM_SCORES // (heads_per_group * end)
        rows = max(1, min(MAX_ITEM_ROWS, most, -(-count // num_threads)))
        for start in range(0, count, rows):
            size = min(rows, count - start)
            last = end if mask is not None else end - count + start + size
            pieces.append((first + start, size, last))
        first += count
    if num_threads > 1:  # the largest first, dealt out: a thread takes consecutive pieces
        pieces.sort(key=lambda piece: -piece[1] * piece[2])
        dealt = [(first, size, g, end) for first, size, end in pieces for g in range(num_groups)]
        items = [item for thread in range(num_threads) for item in dealt[thread::num_threads]]
    else:
        items = [(first, size, g, end) for first, size, end in pieces for g in range(num_groups)]
    return Sight(
        low_R=np.concatenate(lows),
        high_R=np.concatenate(highs),
        tail_R=np.concatenate([[0], *tail_counts]).cumsum(),
        tail_slots=np.concatenate(tails),
        item_I4=np.array(items),
    )


def reference_attention(query_HK: Tensor, key_GSK: Tensor, value_GSK: Tensor) -> Tensor:
    """One row by the definition, in float64: softmax(q k / sqrt(K)) v over the keys it sees."""
    group = query_HK.shape[0] // key_GSK.shape[0]
    key_HSK = key_GSK.double().repeat_interleave(group, dim=0)
    value_HSK = value_GSK.double().repeat_interleave(group, dim=0)
    scores_HS = torch.einsum("hk,hsk->hs", query_HK.double(), key_HSK)
    weights_HS = (scores_HS / math.sqrt(query_HK.shape[-1])).softmax(-1)
    return torch.einsum("hs,hsk->hk", weights_HS, value_HSK)


class Rotary:
    """Rotary positions of one model.

    Frequencies follow Hugging Face's definitions (``modeling_rope_utils``): float32 inverse
    frequencies and float32 angles, as the models were trained; cosine and sine are rounded to
    float32 once. They come from a table that grows by whole blocks, so a position's value never
    depends on which others are asked for.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._inverse_frequency = inverse_frequencies(config, head_dim)
        self._scale = attention_scale(config)
        self._table_2PC = self._block(0)

    def rotation(self, position_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of the rows' angles, each ``[R * K / 2]``."""
        table_2PC, last = self._table_2PC, int(position_R.max())
        while last >= table_2PC.shape[1]:
            table_2PC = np.concatenate([table_2PC, self._block(table_2PC.shape[1])], axis=1)
        self._table_2PC = table_2PC  # in one piece: engines in several threads share the model
        cosine_RC, sine_RC = table_2PC[:, position_R]
        return cosine_RC.reshape(-1), sine_RC.reshape(-1)

    def _block(self, start: int) -> np.ndarray:
        position_P = torch.arange(start, start + TABLE_BLOCK).float()
        angle_PC = torch.outer(position_P, self._inverse_frequency).double()
        return (self._scale * torch.stack([angle_PC.cos(), angle_PC.sin()])).float().numpy()


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
