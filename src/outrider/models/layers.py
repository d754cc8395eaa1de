"""A stack of decoder layers: packed rows of any mix of prefixes and trees, exact row by row.

Owns the layers' arithmetic: norms, attention over the cache, MLP. The target
(:mod:`outrider.models.decoder`) is one stack between an embedding and an output head; draft heads
(:mod:`outrider.models.heads`) are short stacks behind another input.

Rows are packed: linears see all segments' rows in one block, attention sees each with its own
keys. Every operation is independent of the other rows, bit for bit: linears run inside their
probed row range (:mod:`~outrider.models.linear`), the rest goes row by row through one fixed
sequence of float32 operations (:mod:`~outrider.models.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kv_cache import KVCache, StepSlots, flat
from outrider.models.architecture import DecoderConfig
from outrider.models.attention import Rotary, Sight, plan_sight
from outrider.models.kernels.attention import attend, attend_in_threads
from outrider.models.kernels.compiler import use_threads
from outrider.models.kernels.mlp import swiglu as swiglu_kernel
from outrider.models.kernels.mlp import swiglu_in_threads
from outrider.models.linear import MIN_ROWS, ExactLinear, RowPolicy
from outrider.models.norm import RMSNorm

FINE_ROWS = 32  # up to here rows are padded to a multiple of 4, above of 16

_NOTHING = np.empty(0, np.float32)


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
    qk_norms: tuple[np.ndarray, np.ndarray]
    has_rope: bool
    is_sliding: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """What all layers of one pass share: places, sights and buffers that each layer writes anew.

    ``heads_RD`` and ``normed_RD`` are padded as all rows of a pass are. ``attend`` is the
    kernel that suits the amount of work.
    """

    slots: StepSlots
    num_rows: int
    rotation: tuple[np.ndarray, np.ndarray]
    sight: Sight
    sliding_sight: Sight | None
    attend: Callable[..., None]
    query_R: np.ndarray
    heads_RD: Tensor
    normed_RD: Tensor


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
        self._min_rows = MIN_ROWS[0]
        if policies is not None:
            self._min_rows = max(policy.min_rows for policy in policies.values())

    def plan(self, segments: Sequence[Segment], cache: KVCache) -> Pass:
        """Slots, positions and masks of a pass over these segments."""
        counts = [len(segment.tokens) for segment in segments]
        slots = cache.begin(
            [segment.cache_row for segment in segments],
            counts,
            [segment.num_earlier for segment in segments],
        )
        position_R = np.array(
            [
                start - segment.num_earlier + depth
                for start, segment in zip(slots.starts, segments, strict=True)
                for depth in segment.depths[segment.num_earlier :]
            ]
        )
        config = self.config
        ends, num_rows = slots.live_lens, sum(counts)
        pairs = sum(n * end for n, end in zip(counts, ends, strict=True))
        num_threads = use_threads(0.1 * pairs * config.num_heads * config.head_dim)

        def sight(window: int | None = None) -> Sight:
            return plan_sight(
                ends,
                counts,
                [segment.ancestor_mask_TT for segment in segments],
                [segment.depths for segment in segments],
                num_groups=config.num_kv_heads,
                heads_per_group=config.num_heads // config.num_kv_heads,
                num_threads=num_threads,
                window=window,
            )

        heads_size = config.num_heads * config.head_dim
        padded_rows = self.padded(num_rows)
        return Pass(
            slots=slots,
            num_rows=num_rows,
            rotation=self._rotary.rotation(position_R),
            sight=sight(),
            sliding_sight=sight(config.sliding_window) if config.sliding_layers else None,
            attend=attend if num_threads == 1 else attend_in_threads,
            query_R=np.empty(num_rows * heads_size, np.float32),
            heads_RD=torch.zeros(padded_rows, heads_size, dtype=self.dtype),
            normed_RD=torch.empty(padded_rows, config.hidden_size, dtype=self.dtype),
        )

    def padded(self, num_rows: int) -> int:
        """How many rows products of so many rows are computed with.

        At least as many as exactness asks for; and of few sizes, since oneDNN compiles a product
        anew for each (about 1 ms) and keeps the result (0.6 MB).
        """
        step = 4 if num_rows <= FINE_ROWS else 16
        return max(self._min_rows, -(-num_rows // step) * step)

    def run(self, index: int, x_RD: Tensor, plan: Pass, cache: KVCache) -> Tensor:
        """One whole layer on the residual stream."""
        normed_RD = self._layers[index].attn_norm(x_RD, plan.normed_RD)
        return self.mlp(index, self.attend(index, normed_RD, x_RD, plan, cache))

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
        layer, config = self._layers[index], self.config
        sight = plan.sliding_sight if layer.is_sliding else plan.sight
        assert sight is not None
        keys, values = cache.layer(index)
        sizes = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            cache.value_width,
            cache.num_blocks,
        )
        plan.attend(
            flat(layer.qkv(normed_RD)),
            plan.rotation if layer.has_rope else (_NOTHING, _NOTHING),
            layer.qk_norms,
            np.float32(config.norm_eps),
            keys,
            values,
            sizes,
            plan.slots.row_R,
            plan.slots.slot_R,
            sight.seen,
            sight.item_I4,
            plan.query_R,
            flat(plan.heads_RD),
        )
        return layer.out(plan.heads_RD, residual_RD)

    def mlp(self, index: int, x_RD: Tensor) -> Tensor:
        """A layer's MLP behind its norm, added to its input."""
        layer = self._layers[index]
        normed_RD = layer.mlp_norm(x_RD)
        return layer.down(swiglu(layer.gate_up(normed_RD)), x_RD)

    def _load_layer(self, index: int, weights: Mapping[str, Tensor]) -> _Layer:
        config = self.config

        def get(name: str) -> Tensor | None:
            key = f"layers.{index}.{name}"
            return weights[key].to(self.dtype, copy=True) if key in self._names else None

        def need(name: str) -> Tensor:
            return weights[f"layers.{index}.{name}"].to(self.dtype, copy=True)

        def joined(names: Sequence[str], kind: str) -> Tensor:
            return torch.cat([need(f"{name}.{kind}") for name in names])

        def own_norm(name: str) -> np.ndarray:
            weight = get(name)
            return _NOTHING if weight is None else weight.float().numpy()

        return _Layer(
            attn_norm=RMSNorm(need("attn_norm.weight"), config.norm_eps),
            mlp_norm=RMSNorm(need("mlp_norm.weight"), config.norm_eps),
            qkv=self.linear(
                joined("qkv", "weight"), joined("qkv", "bias") if config.attention_bias else None
            ),
            out=self.linear(need("o.weight"), get("o.bias"), adds=True),
            gate_up=self.linear(
                joined(("gate", "up"), "weight"),
                joined(("gate", "up"), "bias") if config.mlp_bias else None,
            ),
            down=self.linear(need("down.weight"), get("down.bias"), adds=True),
            qk_norms=(own_norm("q_norm.weight"), own_norm("k_norm.weight")),
            has_rope=index not in config.no_rope_layers,
            is_sliding=index in config.sliding_layers,
        )


def embed_rows(segments: Sequence[Segment], table_VD: Tensor, num_rows: int) -> Tensor:
    """Embeddings of the packed rows, padded with token 0 to ``num_rows``."""
    tokens = [token for segment in segments for token in segment.tokens]
    tokens += [0] * (num_rows - len(tokens))
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


def padded_places(rows: list[int], stack: LayerStack) -> list[int]:
    """Rows for the output head, the last one repeated as often as the product is padded."""
    return rows + rows[-1:] * (stack.padded(len(rows)) - len(rows))


def swiglu(gate_up_RM: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate and up side by side (Shazeer 2020)."""
    size = gate_up_RM.shape[1] // 2
    out_RM = gate_up_RM.new_empty(gate_up_RM.shape[0], size)
    function = swiglu_kernel if use_threads(1.5 * out_RM.numel()) == 1 else swiglu_in_threads
    function(flat(gate_up_RM), size, flat(out_RM))
    return out_RM


def linear_shapes(config: DecoderConfig) -> list[tuple[int, int, bool]]:
    """Every product the decoder runs, as (out, in, has a fused residual)."""
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    hidden, mlp = config.hidden_size, config.mlp_size
    shapes = [
        (qkv, hidden, False),
        (hidden, heads, True),
        (2 * mlp, hidden, False),
        (hidden, mlp, True),
        (config.vocab_size, hidden, False),
    ]
    return list(dict.fromkeys(shapes))
