"""A stack of decoder layers: packed rows of any mix of prefixes and trees, exact row by row.

Owns the layers' arithmetic: norms, attention over the cache, MLP. The target
(:mod:`outrider.models.decoder`) is one stack between an embedding and an output head; draft heads
(:mod:`outrider.models.heads`) are short stacks behind another input.

Rows are packed: linears see all segments' rows in one block, attention sees them padded per
request. Every operation is independent of the other rows, bit for bit: linears run inside their
probed row range (:mod:`~outrider.models.linear`), attention sums in float64
(:mod:`~outrider.models.attention`), the rest is per row or element by element on widths that are
multiples of the vector size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kv_cache import KVCache, StepSlots
from outrider.models.architecture import DecoderConfig
from outrider.models.attention import Rotary, attention, shorten, visibility_bias
from outrider.models.linear import MIN_ROWS, ExactLinear, RowPolicy
from outrider.models.norm import RMSNorm

# torch computes exp with another routine in the last, partial vector of what one thread gets.
# Widths that are a multiple of VECTOR_WIDTH have no such tail in a tensor, and blocks of at most
# SERIAL_ELEMENTS are not split between threads (at::internal::GRAIN_SIZE), so none inside either.
VECTOR_WIDTH = 64
SERIAL_ELEMENTS = 32768

SIMILAR_LENGTH = 0.7  # requests at least this fraction of the longest attend in one padded block
BLOCK_BYTES = 2**22  # of one block's keys and values in float64: more falls out of the caches


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a pass: its tokens behind the committed prefix.

    ``depths`` are distances from the first position behind the prefix (0, 1, 2, ... for a chain);
    ``ancestor_mask_TT`` (bool ``[T, T]``) is None for a chain. The first ``num_silent`` rows get no
    logits: they are prompt tokens whose successors are known.

    A tree may be written over several passes, as drafters grow it: ``depths`` and the mask's
    columns then begin with the ``num_earlier`` rows that earlier passes wrote.
    """

    cache_row: int
    tokens: Sequence[int]
    depths: Sequence[int]
    ancestor_mask_TT: Tensor | None = None
    num_silent: int = 0

    @property
    def num_earlier(self) -> int:
        """Rows of the same tree that earlier passes wrote behind the prefix."""
        return len(self.depths) - len(self.tokens)


@dataclass(slots=True)
class _Layer:
    attn_norm: RMSNorm
    mlp_norm: RMSNorm
    qkv: ExactLinear
    out: ExactLinear
    gate_up: ExactLinear
    down: ExactLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    has_rope: bool
    is_sliding: bool


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests of about the same length, whose attention is one padded block.

    ``row_R`` are their packed rows, ``request_R`` and ``place_R`` where each goes in the block; all
    three are None for a pass of one request, whose rows lie as they are. ``wide_2BGSK`` holds the
    keys and values that a layer reads in float64; each layer writes it anew, so that none pays for
    fresh memory, and what is behind a shorter request's end stays zero.
    """

    requests: tuple[int, ...]
    width: int
    bias: Tensor | None
    sliding_bias: Tensor | None
    wide_2BGSK: Tensor
    row_R: Tensor | None = None
    request_R: Tensor | None = None
    place_R: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers of one pass share.

    ``heads_RD`` takes attention's output, padded to the linears' least row count; layers reuse it.
    """

    slots: StepSlots
    num_rows: int
    rotation_R1C: Tensor
    groups: tuple[_Group, ...]
    heads_RD: Tensor


class LayerStack:
    """Decoder layers of the Llama family and the norm behind them, on the CPU.

    Args:
        config: the layers' sizes and options; its vocabulary is not looked at.
        weights: tensors named as in :mod:`outrider.models.architecture`; read one by one, so a
            lazy mapping keeps the peak low. A layer's q, k and v may take any number of inputs.
        dtype: ``torch.bfloat16`` or ``torch.float32``.
        policies: row ranges by linear shape (out, in, adds); None where rows need not be exact.
        on_layer: called after each loaded layer with the fraction done.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        policies: Mapping[tuple[int, int, bool], RowPolicy] | None,
        on_layer: Callable[[float], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._policies = policies
        self._rotary = Rotary(config.rope, config.head_dim)
        self._names = frozenset(config.weight_shapes())
        self.norm = RMSNorm(weights["norm.weight"].to(dtype), config.norm_eps)
        self._layers: list[_Layer] = []
        for index in range(config.num_layers):
            self._layers.append(self._load_layer(index, weights))
            if on_layer is not None:
                on_layer((index + 1) / config.num_layers)
        self.min_rows = MIN_ROWS[0]
        if policies is not None:
            self.min_rows = max(policy.min_rows for policy in policies.values())

    def plan(self, segments: Sequence[Segment], cache: KVCache) -> Pass:
        """Slots, positions and masks of a pass over these segments."""
        counts = [len(segment.tokens) for segment in segments]
        slots = cache.begin(
            [segment.cache_row for segment in segments],
            counts,
            [segment.num_earlier for segment in segments],
        )
        position_R = torch.tensor(
            [
                start - segment.num_earlier + depth
                for start, segment in zip(slots.starts, segments, strict=True)
                for depth in segment.depths[segment.num_earlier :]
            ]
        )
        slot_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * torch.float64.itemsize
        groups = similar_requests(slots.live_lens, BLOCK_BYTES // slot_bytes)
        return Pass(
            slots=slots,
            num_rows=sum(counts),
            rotation_R1C=self._rotary.rotation(position_R),
            groups=tuple(self._group(requests, segments, slots) for requests in groups),
            heads_RD=torch.zeros(
                max(sum(counts), self.min_rows),
                self.config.num_heads * self.config.head_dim,
                dtype=self.dtype,
            ),
        )

    def _group(
        self, requests: Sequence[int], segments: Sequence[Segment], slots: StepSlots
    ) -> _Group:
        """Masks, buffers and places of some of a pass' requests."""
        config = self.config
        ends = [slots.live_lens[b] for b in requests]
        counts = [slots.counts[b] for b in requests]
        masks = [segments[b].ancestor_mask_TT for b in requests]
        depths = [segments[b].depths for b in requests]
        window = config.sliding_window if config.sliding_layers else None
        row_R = request_R = place_R = None
        if len(segments) > 1:
            first = [sum(slots.counts[:b]) for b in requests]
            places = [(first[j] + t, j, t) for j, count in enumerate(counts) for t in range(count)]
            row_R, request_R, place_R = torch.tensor(places).unbind(1)
        shape = (2, len(requests), config.num_kv_heads, max(ends), config.head_dim)
        return _Group(
            requests=tuple(requests),
            width=max(counts),
            bias=visibility_bias(ends, counts, masks, depths),
            sliding_bias=visibility_bias(ends, counts, masks, depths, window) if window else None,
            wide_2BGSK=torch.zeros(shape, dtype=torch.float64),
            row_R=row_R,
            request_R=request_R,
            place_R=place_R,
        )

    def run(self, index: int, x_RD: Tensor, plan: Pass, cache: KVCache) -> Tensor:
        """One whole layer on the residual stream."""
        x_RD = self.attend(index, self._layers[index].attn_norm(x_RD), x_RD, plan, cache)
        return self.mlp(index, x_RD)

    def attn_norm(self, index: int, x_RD: Tensor) -> Tensor:
        """The norm in front of a layer's attention."""
        return self._layers[index].attn_norm(x_RD)

    def linear(
        self, weight: Tensor, bias: Tensor | None = None, *, adds: bool = False
    ) -> ExactLinear:
        """A linear under the stack's row policies."""
        out_size, in_size = weight.shape
        if self._policies is None:
            return ExactLinear(weight, bias, None)
        return ExactLinear(weight, bias, self._policies[out_size, in_size, adds])

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """A cache of this stack's shape in its compute dtype."""
        return KVCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            max_batch_size=max_batch_size,
            num_slots=num_slots,
            dtype=self.dtype,
        )

    def attend(
        self, index: int, normed_RD: Tensor, residual_RD: Tensor, plan: Pass, cache: KVCache
    ) -> Tensor:
        """A layer's attention over ``normed``, added to ``residual``."""
        layer = self._layers[index]
        config, num_rows = self.config, plan.num_rows
        num_rotated = config.num_heads + config.num_kv_heads
        qkv_R = layer.qkv(normed_RD)
        heads_RHK = qkv_R[:num_rows].view(num_rows, -1, config.head_dim)
        rotated_RHK = heads_RHK[:, :num_rotated].double()
        if layer.q_norm is not None and layer.k_norm is not None:
            rotated_RHK = self._norm_heads(rotated_RHK, layer.q_norm, layer.k_norm)
        if layer.has_rope:
            pairs_RHC = torch.view_as_complex(rotated_RHK.view(num_rows, num_rotated, -1, 2))
            rotated_RHK = torch.view_as_real(pairs_RHC * plan.rotation_R1C).view_as(rotated_RHK)
        query_RHK = rotated_RHK[:, : config.num_heads]
        cache.write(
            index, plan.slots, rotated_RHK[:, config.num_heads :], heads_RHK[:, num_rotated:]
        )
        out_RHK = query_RHK
        if len(plan.groups) > 1:
            out_RHK = torch.empty_like(query_RHK)
        for group in plan.groups:
            for wide_2GSK, request in zip(group.wide_2BGSK.unbind(1), group.requests, strict=True):
                key_GSK, value_GSK = cache.read(index, plan.slots, request)
                length = key_GSK.shape[1]
                wide_2GSK[0, :, :length].copy_(key_GSK)
                wide_2GSK[1, :, :length].copy_(value_GSK)
            bias = group.sliding_bias if layer.is_sliding else group.bias
            attended_RHK = _attend_padded(query_RHK, group, bias)
            if len(plan.groups) > 1:
                out_RHK[group.row_R] = attended_RHK
            else:
                out_RHK = attended_RHK
        if self.dtype == torch.float32 and self._policies is not None:
            out_RHK = shorten(out_RHK)
        plan.heads_RD[:num_rows].view_as(query_RHK).copy_(out_RHK)  # rounds on the way
        return layer.out(plan.heads_RD, residual_RD)

    def mlp(self, index: int, x_RD: Tensor) -> Tensor:
        """A layer's MLP behind its norm, added to its input."""
        layer = self._layers[index]
        return layer.down(swiglu(layer.gate_up(layer.mlp_norm(x_RD))), x_RD)

    def _norm_heads(self, heads_RHK: Tensor, q_norm_K: Tensor, k_norm_K: Tensor) -> Tensor:
        """Per-head RMSNorm of queries and keys in float64 (Qwen3), before rotation."""
        mean_square = heads_RHK.square().mean(-1, keepdim=True)
        normed_RHK = heads_RHK * torch.rsqrt(mean_square + self.config.norm_eps)
        num_heads = self.config.num_heads
        return torch.cat(
            [normed_RHK[:, :num_heads] * q_norm_K, normed_RHK[:, num_heads:] * k_norm_K], dim=1
        )

    def _load_layer(self, index: int, weights: Mapping[str, Tensor]) -> _Layer:
        config = self.config

        def get(name: str) -> Tensor | None:
            key = f"layers.{index}.{name}"
            return weights[key].to(self.dtype, copy=True) if key in self._names else None

        def need(name: str) -> Tensor:
            return weights[f"layers.{index}.{name}"].to(self.dtype, copy=True)

        qkv_weight = torch.cat(
            [_interleave(need(f"{name}.weight"), config.head_dim) for name in "qk"]
            + [need("v.weight")]
        )
        qkv_bias = None
        if config.attention_bias:
            qkv_bias = torch.cat(
                [_interleave(need(f"{name}.bias"), config.head_dim) for name in "qk"]
                + [need("v.bias")]
            )
        padding = -config.mlp_size % VECTOR_WIDTH
        gate_up = torch.cat(
            [F.pad(need(f"{n}.weight"), (0, 0, 0, padding)) for n in ("gate", "up")]
        )
        gate_up_bias = None
        if config.mlp_bias:
            gate_up_bias = torch.cat(
                [F.pad(need(f"{n}.bias"), (0, padding)) for n in ("gate", "up")]
            )
        down = F.pad(need("down.weight"), (0, padding))
        q_norm, k_norm = get("q_norm.weight"), get("k_norm.weight")
        return _Layer(
            attn_norm=RMSNorm(need("attn_norm.weight"), config.norm_eps),
            mlp_norm=RMSNorm(need("mlp_norm.weight"), config.norm_eps),
            qkv=self.linear(qkv_weight, qkv_bias, adds=False),
            out=self.linear(need("o.weight"), get("o.bias"), adds=True),
            gate_up=self.linear(gate_up, gate_up_bias, adds=False),
            down=self.linear(down, get("down.bias"), adds=True),
            q_norm=None if q_norm is None else _interleave(q_norm, config.head_dim).double(),
            k_norm=None if k_norm is None else _interleave(k_norm, config.head_dim).double(),
            has_rope=index not in config.no_rope_layers,
            is_sliding=index in config.sliding_layers,
        )


def similar_requests(lengths: Sequence[int], max_slots: int) -> list[list[int]]:
    """Requests grouped so that padding to a group's longest adds little to the others.

    A group of several pads to ``max_slots`` slots in all at most.
    """
    longest_first = sorted(range(len(lengths)), key=lambda b: (-lengths[b], b))
    groups: list[list[int]] = []
    for b in longest_first:
        longest = lengths[groups[-1][0]] if groups else 0
        has_room = bool(groups) and longest * (len(groups[-1]) + 1) <= max_slots
        if has_room and lengths[b] >= SIMILAR_LENGTH * longest:
            groups[-1].append(b)
        else:
            groups.append([b])
    return [sorted(group) for group in groups]


def _attend_padded(query_RHK: Tensor, group: _Group, bias: Tensor | None) -> Tensor:
    """Unpack a group's rows into one padded block per request, attend, and pack again."""
    key_BGSK, value_BGSK = group.wide_2BGSK
    if group.row_R is None:
        query_BHTK = query_RHK.transpose(0, 1).unsqueeze(0)
        return attention(query_BHTK, key_BGSK, value_BGSK, bias)[0].transpose(0, 1)
    shape = len(group.requests), group.width, *query_RHK.shape[1:]
    query_BTHK = query_RHK.new_zeros(shape)
    query_BTHK[group.request_R, group.place_R] = query_RHK[group.row_R]
    out_BHTK = attention(query_BTHK.transpose(1, 2), key_BGSK, value_BGSK, bias)
    return out_BHTK.transpose(1, 2)[group.request_R, group.place_R]


def embed_rows(segments: Sequence[Segment], table_VD: Tensor, min_rows: int) -> Tensor:
    """Embeddings of the packed rows, padded with token 0 to at least ``min_rows``."""
    tokens = [token for segment in segments for token in segment.tokens]
    tokens += [0] * (min_rows - len(tokens))
    return F.embedding(torch.tensor(tokens), table_VD)


def loud_rows(segments: Sequence[Segment]) -> list[int]:
    """The packed rows that are not silent."""
    rows: list[int] = []
    first = 0
    for segment in segments:
        last = first + len(segment.tokens)
        rows += range(first + segment.num_silent, last)
        first = last
    return rows


def swiglu(gate_up_RM: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate and up side by side (Shazeer 2020).

    In blocks of rows that one thread computes whole; see ``SERIAL_ELEMENTS``.
    """
    gate, up = gate_up_RM.chunk(2, dim=-1)
    rows = max(1, SERIAL_ELEMENTS // gate.shape[1])
    if gate.shape[0] <= rows:
        return F.silu(gate).mul_(up)
    blocks = zip(gate.split(rows), up.split(rows), strict=True)
    return torch.cat([F.silu(gate).mul_(up) for gate, up in blocks])


def linear_shapes(config: DecoderConfig) -> list[tuple[int, int, bool]]:
    """Every product the decoder runs, as (out, in, has a fused residual)."""
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    mlp = config.mlp_size + (-config.mlp_size % VECTOR_WIDTH)
    hidden = config.hidden_size
    shapes = [
        (qkv, hidden, False),
        (hidden, heads, True),
        (2 * mlp, hidden, False),
        (hidden, mlp, True),
        (config.vocab_size, hidden, False),
    ]
    return list(dict.fromkeys(shapes))


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from half-split to pairs, so that rotation is one complex product.

    Rows ``(0, 1, .. | K/2, K/2 + 1, ..)`` become ``(0, K/2, 1, K/2 + 1, ..)``; queries and keys
    alike, so their products are unchanged.
    """
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()
