"""Compiled kernels against their plain twins, and against other threads and neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.kv_cache import KVCache, StepSlots, flat
from outrider.models.attention import Sight, plan_sight, reference_attention
from outrider.models.exactness import chain_segment
from outrider.models.kernels import mlp
from outrider.models.kernels.attention import attend, attend_in_threads
from outrider.models.kernels.compiler import helper, kernel
from outrider.models.kernels.norm import rms_norm, rms_norm_in_threads
from outrider.models.kernels.vector import LANES, exp, load, store
from outrider.models.kernels.warmup import compile_kernels
from outrider.models.layers import swiglu
from outrider.tree import DraftTree
from tests.models import compute_threads, random_decoder

DTYPES = [torch.float32, torch.bfloat16]
NOTHING = np.empty(0, np.float32)
SHAPES = [(9, 3, 64), (4, 4, 32), (2, 1, 16), (6, 2, 80), (7, 1, 128), (4, 2, 8), (3, 3, 12)]
PREFIXES = (70, 0, 130)
"""Committed tokens of the pass' three requests: a tree, a chain, one row."""


@dataclass
class AttentionCase:
    """One layer's attention of three requests, of which the first has a tree."""

    heads: tuple[int, int, int]
    dtype: torch.dtype
    window: int | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        num_heads, num_groups, size = self.heads
        self.cache = KVCache(
            num_layers=1,
            num_kv_heads=num_groups,
            head_dim=size,
            max_batch_size=3,
            num_slots=150,
            dtype=self.dtype,
        )
        for row, prefix in enumerate(PREFIXES):
            self.cache.allocate()
            if prefix:
                slots = self.cache.begin([row], [prefix])
                key, value = torch.randn(2, prefix, num_groups, size, generator=generator)
                self.cache.write(0, slots, key, value)
                self.cache.extend(row, prefix)
        tree = DraftTree.root(3)
        for token, parent in enumerate((0, 0, 1, 2, 2, 3, 5, 1)):
            tree.add(parent, token, 0.5)
        counts = [len(tree), 5, 1]
        depths = [tree.depth, range(5), range(1)]
        masks = [tree.ancestor_mask(), None, None]
        self.slots: StepSlots = self.cache.begin([0, 1, 2], counts)
        self.sights = {
            threads: plan_sight(
                self.slots.live_lens,
                counts,
                masks,
                depths,
                num_groups=num_groups,
                heads_per_group=num_heads // num_groups,
                num_threads=threads,
                window=self.window,
            )
            for threads in (1, 2)
        }
        width = (num_heads + 2 * num_groups) * size
        self.qkv_RX = torch.randn(sum(counts), width, generator=generator).to(self.dtype)
        angle = torch.rand(sum(counts), size // 2, generator=generator) * 2 * math.pi
        self.rope = angle.cos().flatten().numpy(), angle.sin().flatten().numpy()

    def run(self, function, sight: Sight, *, rope=None, norms=(NOTHING, NOTHING)) -> torch.Tensor:
        num_heads, num_groups, size = self.heads
        rows = len(self.qkv_RX)
        out_RHK = torch.zeros(rows, num_heads, size, dtype=self.dtype)
        function(
            flat(self.qkv_RX),
            self.rope if rope is None else rope,
            norms,
            np.float32(1e-6),
            *self.cache.layer(0),
            (num_heads, num_groups, size, self.cache.value_width, self.cache.num_blocks),
            self.slots.row_R,
            self.slots.slot_R,
            sight.seen,
            sight.item_I4,
            np.empty(rows * num_heads * size, np.float32),
            flat(out_RHK),
        )
        return out_RHK

    def expected(self, sight: Sight, norms=None) -> torch.Tensor:
        """Rotated, written and attended row by row with torch alone, in float64."""
        num_heads, num_groups, size = self.heads
        heads_RHK = self.qkv_RX.double().view(len(self.qkv_RX), -1, size)
        rotated_RHK = heads_RHK[:, : num_heads + num_groups]
        if norms is not None:
            normed = rotated_RHK * torch.rsqrt(rotated_RHK.square().mean(-1, keepdim=True) + 1e-6)
            weights = [torch.from_numpy(norm).double() for norm in norms]
            rotated_RHK = torch.cat(
                [normed[:, :num_heads] * weights[0], normed[:, num_heads:] * weights[1]], dim=1
            )
        cosine, sine = (torch.from_numpy(x).double().view(-1, 1, size // 2) for x in self.rope)
        a, b = rotated_RHK.chunk(2, dim=-1)
        rotated_RHK = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
        self.cache.write(
            0, self.slots, rotated_RHK[:, num_heads:], heads_RHK[:, num_heads + num_groups :]
        )
        rows = []
        for r, row in enumerate(self.slots.row_R):
            keys, values = self.cache.read(int(row), 150)
            seen = torch.from_numpy(sight.visible(r))
            rows.append(
                reference_attention(
                    rotated_RHK[r, :num_heads], keys[0][:, seen], values[0][:, seen]
                )
            )
        return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 4, 60])
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_attention_equals_its_plain_twin(heads, dtype: torch.dtype, window: int | None) -> None:
    case = AttentionCase(heads, dtype, window)
    out_RHK = case.run(attend, case.sights[1])
    written = case.cache.read(0, 79)
    expected_RHK = case.expected(case.sights[1])
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7

    torch.testing.assert_close(out_RHK.double(), expected_RHK, rtol=tolerance, atol=tolerance)
    for mine, plain in zip(written, case.cache.read(0, 79), strict=True):
        torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)


def test_head_norms_come_before_rotation() -> None:
    case = AttentionCase((4, 2, 32), torch.float32)
    norms = tuple((torch.rand(32) + 0.5).numpy() for _ in range(2))
    out_RHK = case.run(attend, case.sights[1], norms=norms)

    torch.testing.assert_close(
        out_RHK.double(), case.expected(case.sights[1], norms), rtol=2e-6, atol=2e-6
    )


def test_nothing_is_rotated_where_a_layer_has_no_positions() -> None:
    case = AttentionCase((4, 2, 32), torch.float32)
    out_RHK = case.run(attend, case.sights[1], rope=(NOTHING, NOTHING))
    case.rope = np.ones_like(case.rope[0]), np.zeros_like(case.rope[1])

    assert torch.equal(case.run(attend, case.sights[1]), out_RHK)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_threads_change_no_bit_of_attention(heads, dtype: torch.dtype) -> None:
    case = AttentionCase(heads, dtype)

    assert torch.equal(
        case.run(attend, case.sights[1]), case.run(attend_in_threads, case.sights[2])
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
def test_what_a_row_does_not_see_may_be_anything(dtype: torch.dtype) -> None:
    """Stale slots and masked siblings that are not finite leave no trace."""
    case = AttentionCase((4, 2, 32), dtype)
    clean_RHK = case.run(attend, case.sights[1])
    for row, end in enumerate(case.slots.live_lens):
        case.cache._values[:, row, :, end:] = math.nan
        case.cache._keys[:, row, :, end // 64 + 1 :] = math.nan
    case.qkv_RX[4] = math.nan  # a node of the tree without children
    out_RHK = case.run(attend, case.sights[1])

    assert out_RHK[4].isnan().all()
    kept = [r for r in range(len(out_RHK)) if r != 4]
    assert torch.equal(clean_RHK[kept], out_RHK[kept])


@helper
def _exp_all(x, out):
    for i in range(0, len(x), LANES):
        store(out, i, exp(load(x, i)))


@kernel
def exp_all(x, out):
    _exp_all(x, out)


@kernel
def copy_all(x, out):
    for i in range(0, len(x), LANES):
        store(out, i, load(x, i))


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 160_000, dtype=np.float32)
    out = np.empty_like(x)
    exp_all(x, out)
    exact = np.exp(x.astype(np.float64))

    assert np.abs(out - exact).max() > 0
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_beyond_its_range_keeps_to_its_ends_and_nan_stays() -> None:
    x = np.array([-1e30, -np.inf, 1e30, np.inf, np.nan, 0.0, -0.0, *[1.0] * 9], np.float32)
    out = np.empty_like(x)
    exp_all(x, out)

    assert [np.exp(-87.0)] * 2 == pytest.approx(out[:2], rel=1e-6)
    assert [np.exp(88.0)] * 2 == pytest.approx(out[2:4], rel=1e-6)
    assert np.isnan(out[4])
    assert [1.0, 1.0] == out[5:7].tolist()


def test_storing_rounds_to_bfloat16_as_torch_does() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (65536,), dtype=torch.int32)
    ties = (torch.arange(2**16, dtype=torch.int32) << 16) + 0x8000
    x = torch.cat([bits, ties]).view(torch.float32)
    rounded = torch.empty(len(x), dtype=torch.bfloat16)
    copy_all(flat(x), flat(rounded))

    assert x.isnan().any()
    torch.testing.assert_close(rounded, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("size", [1, 12, 64, 1536, 1001])
def test_swiglu_equals_its_plain_twin(size: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(7, 2 * size, generator=torch.Generator().manual_seed(size))).to(
        dtype
    )
    gate, up = gate_up.double().chunk(2, dim=1)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8

    torch.testing.assert_close(
        swiglu(gate_up).double(), F.silu(gate) * up, rtol=tolerance, atol=1e-30
    )


@pytest.mark.alone
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
def test_warming_up_compiles_all_that_a_pass_runs(dtype: torch.dtype) -> None:
    """A kernel compiled in the middle of a request would be a stall of seconds."""
    kernels = (
        *(attend, attend_in_threads, rms_norm, rms_norm_in_threads),
        *(mlp.swiglu, mlp.swiglu_in_threads),
    )
    with compute_threads(2):
        compile_kernels(dtype)
        before = [len(function.signatures) for function in kernels]
        decoder = random_decoder(dtype)
        cache = decoder.new_cache(max_batch_size=1, num_slots=700)
        row = cache.allocate()
        for tokens in ([1, 2, 3], [4] * 600):
            decoder.forward([chain_segment(row, tokens)], cache)
            cache.extend(row, len(tokens))

    assert before == [len(function.signatures) for function in kernels]


@pytest.mark.alone
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("size", [12, 1001])
def test_threads_change_no_bit_of_norm_and_swiglu(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x_RM = torch.randn(40, 2 * size, generator=generator).to(dtype)
    weight = flat(torch.rand(2 * size, generator=generator).to(dtype))
    results = []
    for norm, gate in (
        (rms_norm, mlp.swiglu),
        (rms_norm_in_threads, mlp.swiglu_in_threads),
    ):
        normed, gated = torch.empty_like(x_RM), x_RM.new_empty(40, size)
        norm(flat(x_RM), weight, np.float32(1e-5), flat(normed))
        gate(flat(x_RM), size, flat(gated))
        results.append((normed, gated))

    for alone, shared in zip(*results, strict=True):
        assert torch.equal(alone, shared)
