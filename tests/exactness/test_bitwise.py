"""Bitwise equality of the target's logits, and proof that the test could see a difference.

Contract (docs/exactness.md): whatever way a token is decoded - alone, in a chain or a tree, behind
a prefix prefilled in other chunks, in a batch - its logits are ``torch.equal``. Each check returns
at the first differing bit.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from outrider.kv_cache import KEY_BLOCK
from outrider.models import exactness
from outrider.models.attention import Sight
from outrider.models.decoder import Decoder
from outrider.models.exactness import (
    CHECKS,
    NUM_STEPS,
    PREFIX_LEN,
    chain_segment,
    prefill,
    random_tokens,
    reference_logits,
)
from outrider.models.kernels.attention import attend
from outrider.models.layers import swiglu
from outrider.models.linear import MAX_ROWS, MIN_ROWS, ExactLinear, RowPolicy, probe_rows
from tests.models import compute_threads, random_decoder

pytestmark = pytest.mark.alone  # with one and with two threads

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_logits_are_bit_identical_on_a_tiny_target(check, dtype: torch.dtype, threads: int) -> None:
    with compute_threads(threads):
        decoder = random_decoder(dtype)
        tokens = random_tokens(decoder.config.vocab_size, PREFIX_LEN + NUM_STEPS, seed=1)
        expected_RV = reference_logits(decoder, tokens, PREFIX_LEN)

        assert check(decoder, tokens, expected_RV)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_bit_identical_with_windows_biases_and_head_norms(dtype: torch.dtype) -> None:
    decoder = random_decoder(
        dtype,
        architecture="Qwen3ForCausalLM",
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        qk_norm=True,
        no_rope_layers=(1,),
        sliding_window=9,
        sliding_layers=(0,),
    )

    assert exactness.self_test(decoder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_leave_the_same_logits(dtype: torch.dtype) -> None:
    decoder = random_decoder(dtype)
    tokens = random_tokens(decoder.config.vocab_size, 520, seed=4)
    last_logits = []
    for chunk in (16, 31, 100, 256, 512):
        cache = decoder.new_cache(max_batch_size=1, num_slots=len(tokens))
        row = cache.allocate()
        prefill(decoder, cache, row, tokens[:-1], chunk)
        last_logits.append(decoder.forward([chain_segment(row, tokens[-1:])], cache).logits_RV)

    assert all(torch.equal(last_logits[0], other) for other in last_logits[1:])


class _StockLinear(ExactLinear):
    """The stock product: one kernel call for all rows, whatever their number."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, None, policy=None)
        self._stock = weight

    def __call__(self, x_RD, residual_RD=None):
        product = F.linear(x_RD, self._stock)
        return product if residual_RD is None else product + residual_RD


def test_stock_float32_products_are_caught() -> None:
    """Inverse test: a stock linear gives other bits for one row than for many."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1536, 576, generator=generator)
    x_RD = torch.randn(32, 576, generator=generator)
    one_by_one = torch.cat([F.linear(x_RD[i : i + 1], weight) for i in range(32)])

    assert not torch.equal(one_by_one, F.linear(x_RD, weight))
    assert probe_rows(1536, 576, torch.float32, adds=False).is_exact


def _stock_attend(
    qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, seen, items, query, out
) -> None:
    """The kernel's work by torch's attention in bfloat16, masked slots between the visible ones."""
    attend(qkv, rope, norms, eps, keys, values, sizes, row_R, slot_R, seen, items, query, out)
    num_heads, num_groups, head_dim, width, num_blocks = sizes
    query_RHK = torch.from_numpy(query).view(len(row_R), num_heads, head_dim) * head_dim**0.5
    out_RHK = torch.from_numpy(out)[: query.size].view(torch.bfloat16).view_as(query_RHK)
    panels = -1, num_groups, num_blocks
    key_BGSK = torch.from_numpy(keys).view(torch.bfloat16).view(*panels, head_dim, KEY_BLOCK)
    key_BGSK = key_BGSK.transpose(-1, -2).flatten(2, 3)
    value_BGSK = torch.from_numpy(values).view(torch.bfloat16).view(*panels, KEY_BLOCK, width)
    value_BGSK = value_BGSK.flatten(2, 3)
    sight = Sight(*seen, items)
    for cache_row in dict.fromkeys(row_R.tolist()):
        rows = [r for r in range(len(row_R)) if row_R[r] == cache_row]
        end = 1 + max(slot_R[rows])
        bias_TS = torch.full((len(rows), end), -torch.inf, dtype=torch.bfloat16)
        for bias_S, r in zip(bias_TS, rows, strict=True):
            bias_S[torch.from_numpy(sight.visible(r))] = 0
        out_RHK[rows] = F.scaled_dot_product_attention(
            query_RHK[rows].transpose(0, 1).bfloat16().unsqueeze(0),
            key_BGSK[cache_row, :, :end].unsqueeze(0),
            value_BGSK[cache_row, :, :end, :head_dim].unsqueeze(0),
            attn_mask=bias_TS,
            enable_gqa=True,
        )[0].transpose(0, 1)


def test_stock_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inverse test: attention as torch sums it fails the very same self-test."""
    decoder = random_decoder(torch.bfloat16)

    assert exactness.self_test(decoder)
    for name in ("attend", "attend_in_threads"):
        monkeypatch.setattr(f"outrider.models.layers.{name}", _stock_attend)
    assert not exactness.self_test(decoder)


def test_a_mask_that_lets_siblings_see_each_other_is_caught(monkeypatch) -> None:
    original = exactness.scattered_tree

    def leaky(*args):
        segment, path = original(*args)
        assert segment.ancestor_mask_TT is not None
        segment.ancestor_mask_TT[-1, 1:-1] = True
        return segment, path

    decoder = random_decoder()
    rng_seed_tokens = random_tokens(decoder.config.vocab_size, PREFIX_LEN + NUM_STEPS, seed=1)
    expected_RV = reference_logits(decoder, rng_seed_tokens, PREFIX_LEN)
    monkeypatch.setattr(exactness, "scattered_tree", lambda *args: _with_last_on_path(leaky, args))

    assert not exactness.check_trees(decoder, rng_seed_tokens, expected_RV)


def _with_last_on_path(make, args):
    """Draw until the last node, the one that sees too much, is on the true path."""
    for _ in range(1000):
        segment, path = make(*args)
        if path[-1] == len(segment.tokens) - 1:
            return segment, path
    raise AssertionError("no tree ended on its path")


def test_a_commit_that_moves_the_wrong_node_is_caught(monkeypatch) -> None:
    decoder = random_decoder()
    tokens = random_tokens(decoder.config.vocab_size, PREFIX_LEN + NUM_STEPS, seed=1)
    expected_RV = reference_logits(decoder, tokens, PREFIX_LEN)
    cache_class = type(decoder.new_cache(max_batch_size=1, num_slots=8))
    commit = cache_class.commit
    monkeypatch.setattr(
        cache_class,
        "commit",
        lambda self, row, path: commit(self, row, [max(1, n - 1) for n in path]),
    )

    assert not exactness.check_trees(decoder, tokens, expected_RV)


@pytest.mark.parametrize("max_rows", MAX_ROWS)
@pytest.mark.parametrize("min_rows", MIN_ROWS)
def test_blocks_cover_all_rows_within_the_range(min_rows: int, max_rows: int) -> None:
    if max_rows < 2 * min_rows - 1:
        with pytest.raises(AssertionError):
            RowPolicy(min_rows, max_rows)
        return
    policy = RowPolicy(min_rows, max_rows)
    for num_rows in range(min_rows, 400):
        blocks = policy.blocks(num_rows)

        assert num_rows == sum(blocks)
        assert all(min_rows <= block <= max_rows for block in blocks)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("width", [1536, 8192, 14336])
def test_swiglu_rows_are_bit_identical_at_any_row_and_thread_count(
    width: int, threads: int
) -> None:
    """A stock silu splits a large tensor between threads in mid-row, where exp has a tail."""
    generator = torch.Generator().manual_seed(width)
    gate_up_RM = torch.randn(96, 2 * width, generator=generator)
    with compute_threads(threads):
        expected = torch.cat([swiglu(row) for row in gate_up_RM.split(1)])
        row_counts = [
            n for n in range(1, 97) if not torch.equal(swiglu(gate_up_RM[:n]), expected[:n])
        ]

    assert [] == row_counts


def test_a_stock_silu_is_caught() -> None:
    """Inverse test: where three threads share 55 rows, some elements take the other routine."""
    gate = torch.randn(96, 8192, generator=torch.Generator().manual_seed(0))
    with compute_threads(3):
        expected = torch.cat([F.silu(row) for row in gate.split(1)])
        differing = [n for n in range(1, 97) if not torch.equal(F.silu(gate[:n]), expected[:n])]

    assert differing


@pytest.fixture(scope="module")
def embedded_decoders():
    from outrider.models.loading import load
    from outrider.models.loading.hub import DEFAULT_MODEL, resolve

    checkpoint = load(resolve(DEFAULT_MODEL))

    def make(dtype: torch.dtype) -> Decoder:
        policies = exactness.row_policies(checkpoint.config, dtype, cache=None)
        return Decoder(checkpoint.config, checkpoint.weights, dtype=dtype, policies=policies)

    return make


@pytest.mark.exact
@pytest.mark.embedded
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_bit_identical_on_the_embedded_model(
    embedded_decoders, dtype: torch.dtype, threads: int
) -> None:
    with compute_threads(threads):
        decoder = embedded_decoders(dtype)
        for seed in range(4):
            tokens = random_tokens(decoder.config.vocab_size, PREFIX_LEN + NUM_STEPS, seed=seed)
            expected_RV = reference_logits(decoder, tokens, PREFIX_LEN)

            assert all(check(decoder, tokens, expected_RV) for check in CHECKS)


@pytest.mark.exact
@pytest.mark.embedded
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_are_bit_identical_on_the_embedded_model(
    embedded_decoders, dtype: torch.dtype
) -> None:
    decoder = embedded_decoders(dtype)
    rng = random.Random(0)
    tokens = [rng.randrange(decoder.config.vocab_size) for _ in range(600)]
    last_logits = []
    for chunk in (16, 64, 100, 256, 512):
        cache = decoder.new_cache(max_batch_size=1, num_slots=len(tokens))
        row = cache.allocate()
        prefill(decoder, cache, row, tokens[:-1], chunk)
        last_logits.append(decoder.forward([chain_segment(row, tokens[-1:])], cache).logits_RV)

    assert all(torch.equal(last_logits[0], other) for other in last_logits[1:])
