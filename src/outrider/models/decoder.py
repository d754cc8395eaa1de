"""The target's forward pass: packed rows of any mix of prefixes and trees, exact row by row.

Owns the layers' arithmetic. A pass takes one segment per request (a chunk of a prompt, or a draft
tree with its root), writes the segment's keys and values behind the request's committed prefix,
and returns float32 logits. ``step`` and the engine's prefill call it; it knows neither requests nor
drafters.

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
from outrider.models.linear import ExactLinear, RowPolicy
from outrider.models.norm import RMSNorm

# torch computes exp with another routine in the last, partial vector of what one thread gets.
# Widths that are a multiple of VECTOR_WIDTH have no such tail in a tensor, and blocks of at most
# SERIAL_ELEMENTS are not split between threads (at::internal::GRAIN_SIZE), so none inside either.
VECTOR_WIDTH = 64
SERIAL_ELEMENTS = 32768


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a pass: its tokens behind the committed prefix.

    ``depths`` are distances from the first token's position (0, 1, 2, ... for a chain);
    ``ancestor_mask_TT`` is None for a chain. The first ``num_silent`` rows get no logits: they are
    prompt tokens whose successors are known.
    """

    cache_row: int
    tokens: Sequence[int]
    depths: Sequence[int]
    ancestor_mask_TT: Tensor | None = None
    num_silent: int = 0


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a pass returns, rows in segment order.

    ``logits_RV`` is float32, without the silent rows; ``hidden_LRD`` stacks the captured residual
    states of all rows, one per asked layer index; ``counts`` splits those back into segments.
    """

    logits_RV: Tensor
    hidden_LRD: Tensor | None
    counts: tuple[int, ...]


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
class _Pass:
    """What all layers of one pass share."""

    slots: StepSlots
    num_rows: int
    rotation_R1C: Tensor
    bias: Tensor | None
    sliding_bias: Tensor | None
    request_R: Tensor | None
    place_R: Tensor | None
    heads_RD: Tensor  # attention's output, padded to the linears' least row count; reused by layers


class Decoder:
    """A decoder of the Llama family on the CPU.

    Args:
        config: the architecture.
        weights: tensors named as in :mod:`outrider.models.architecture`; read one by one, so a
            lazy mapping keeps the peak low.
        dtype: ``torch.bfloat16`` or ``torch.float32``.
        policies: row ranges by linear shape, from :func:`outrider.models.exactness.row_policies`.
        on_layer: called after each loaded layer with the fraction done.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        policies: Mapping[tuple[int, int, bool], RowPolicy],
        on_layer: Callable[[float], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.policies = dict(policies)
        self._rotary = Rotary(config.rope, config.head_dim)
        self._names = frozenset(config.weight_shapes())
        # Copies: a lazy mapping's tensors may be views of the file, which may change or go away.
        self._embedding = weights["embed.weight"].to(dtype, copy=True).contiguous()
        self._norm = RMSNorm(weights["norm.weight"].to(dtype), config.norm_eps)
        head = self._embedding
        if not config.tied_embeddings:
            head = weights["lm_head.weight"].to(dtype, copy=True)
        self._head = self._linear(head, None, adds=False)
        self._layers: list[_Layer] = []
        for index in range(config.num_layers):
            self._layers.append(self._load_layer(index, weights))
            if on_layer is not None:
                on_layer((index + 1) / config.num_layers)
        self._min_rows = max(policy.min_rows for policy in self.policies.values())

    def forward(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        *,
        capture: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run the segments; keys and values land behind each prefix, uncommitted.

        ``capture`` lists layer indices: ``i`` is the residual state that enters layer i (Hugging
        Face's ``hidden_states[i]``), ``num_layers`` the one that leaves the last layer.
        """
        with torch.inference_mode():
            plan = self._plan(segments, cache)
            x_RD = self._embed(segments)
            captured = {}
            for index, layer in enumerate(self._layers):
                if index in capture:
                    captured[index] = x_RD[: plan.num_rows].clone()
                x_RD = self._attend(index, layer, x_RD, plan, cache)
                x_RD = self._mlp(layer, x_RD)
            if len(self._layers) in capture:
                captured[len(self._layers)] = x_RD[: plan.num_rows].clone()
            hidden_LRD = torch.stack([captured[i] for i in capture]) if capture else None
            return ForwardOutput(self._logits(x_RD, segments), hidden_LRD, plan.slots.counts)

    def _logits(self, x_RD: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Float32 logits of the rows that are not silent, padded for the product in between."""
        rows, first = [], 0
        for segment in segments:
            last = first + len(segment.tokens)
            rows += range(first + segment.num_silent, last)
            first = last
        if not rows:
            return torch.empty(0, self.config.vocab_size)
        if len(rows) < first:
            padded = rows + rows[-1:] * (self._min_rows - len(rows))
            x_RD = x_RD[torch.tensor(padded)]
        return self._head(self._norm(x_RD))[: len(rows)].float()

    def new_cache(self, *, max_batch_size: int, num_slots: int) -> KVCache:
        """A cache of this model's shape in its compute dtype."""
        return KVCache(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            max_batch_size=max_batch_size,
            num_slots=num_slots,
            dtype=self.dtype,
        )

    def _plan(self, segments: Sequence[Segment], cache: KVCache) -> _Pass:
        counts = [len(segment.tokens) for segment in segments]
        slots = cache.begin([segment.cache_row for segment in segments], counts)
        masks = [segment.ancestor_mask_TT for segment in segments]
        depths = [segment.depths for segment in segments]
        position_R = torch.tensor(
            [
                start + depth
                for start, segment in zip(slots.starts, segments, strict=True)
                for depth in segment.depths
            ]
        )
        window = self.config.sliding_window if self.config.sliding_layers else None
        request_R = place_R = None
        if len(segments) > 1:
            place = [(b, t) for b, count in enumerate(counts) for t in range(count)]
            request_R, place_R = torch.tensor(place).unbind(1)
        return _Pass(
            slots=slots,
            num_rows=sum(counts),
            rotation_R1C=self._rotary.rotation(position_R),
            bias=visibility_bias(slots, masks, depths),
            sliding_bias=visibility_bias(slots, masks, depths, window) if window else None,
            request_R=request_R,
            place_R=place_R,
            heads_RD=torch.zeros(
                max(sum(counts), self._min_rows),
                self.config.num_heads * self.config.head_dim,
                dtype=self.dtype,
            ),
        )

    def _embed(self, segments: Sequence[Segment]) -> Tensor:
        """Embeddings of the packed rows, padded with token 0 to the linears' least row count."""
        tokens = [token for segment in segments for token in segment.tokens]
        tokens += [0] * (self._min_rows - len(tokens))
        return F.embedding(torch.tensor(tokens), self._embedding)

    def _attend(
        self, index: int, layer: _Layer, x_RD: Tensor, plan: _Pass, cache: KVCache
    ) -> Tensor:
        config, num_rows = self.config, plan.num_rows
        num_rotated = config.num_heads + config.num_kv_heads
        qkv_R = layer.qkv(layer.attn_norm(x_RD))
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
        key_BGSK, value_BGSK = cache.read(index, plan.slots)
        bias = plan.sliding_bias if layer.is_sliding else plan.bias
        out_RHK = self._attend_padded(query_RHK, key_BGSK, value_BGSK, bias, plan)
        if self.dtype == torch.float32:
            out_RHK = shorten(out_RHK)
        plan.heads_RD[:num_rows].view_as(query_RHK).copy_(out_RHK)  # rounds on the way
        return layer.out(plan.heads_RD, x_RD)

    def _attend_padded(
        self,
        query_RHK: Tensor,
        key_BGSK: Tensor,
        value_BGSK: Tensor,
        bias: Tensor | None,
        plan: _Pass,
    ) -> Tensor:
        """Unpack rows into one padded block per request, attend, and pack again."""
        if plan.request_R is None:
            query_BHTK = query_RHK.transpose(0, 1).unsqueeze(0)
            return attention(query_BHTK, key_BGSK, value_BGSK, bias)[0].transpose(0, 1)
        num_requests, width = len(plan.slots.rows), max(plan.slots.counts)
        query_BTHK = query_RHK.new_zeros(num_requests, width, *query_RHK.shape[1:])
        query_BTHK[plan.request_R, plan.place_R] = query_RHK
        out_BHTK = attention(query_BTHK.transpose(1, 2), key_BGSK, value_BGSK, bias)
        return out_BHTK.transpose(1, 2)[plan.request_R, plan.place_R]

    def _mlp(self, layer: _Layer, x_RD: Tensor) -> Tensor:
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
            qkv=self._linear(qkv_weight, qkv_bias, adds=False),
            out=self._linear(need("o.weight"), get("o.bias"), adds=True),
            gate_up=self._linear(gate_up, gate_up_bias, adds=False),
            down=self._linear(down, get("down.bias"), adds=True),
            q_norm=None if q_norm is None else _interleave(q_norm, config.head_dim).double(),
            k_norm=None if k_norm is None else _interleave(k_norm, config.head_dim).double(),
            has_rope=index not in config.no_rope_layers,
            is_sliding=index in config.sliding_layers,
        )

    def _linear(self, weight: Tensor, bias: Tensor | None, *, adds: bool) -> ExactLinear:
        out_size, in_size = weight.shape
        return ExactLinear(weight, bias, self.policies[out_size, in_size, adds])


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
