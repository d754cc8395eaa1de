"""Our forward pass against transformers', in float32, within 2e-4 at every position.

transformers is the oracle: it reads the same files and computes each architecture its own way. A
tree's nodes are held against the same path decoded alone, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers_peer import load_transformers

from outrider.bench.prompts import load_prompts
from outrider.models.decoder import FINAL_STATE, Decoder
from outrider.models.exactness import chain_segment, prefill, random_tokens, row_policies
from outrider.models.layers import Segment
from outrider.models.loading import DEFAULT_MODEL, load, resolve
from outrider.models.norm import RMSNorm
from outrider.tree import DraftTree
from tests.tiny import write_hf_checkpoint

TOLERANCE = 2e-4

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, object]] = {
    "llama": {},
    "tied": {"tied": True},
    "multi-head": {"num_kv_heads": 4},
    "one kv head": {"num_kv_heads": 1},
    "odd widths": {
        "hidden_size": 60,
        "mlp_size": 99,
        "head_dim": 20,
        "num_heads": 3,
        "num_kv_heads": 1,
    },
    "attention bias": {"attention_bias": True},
    "mlp bias": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope": {"rope_theta": 500000.0}},
    "rope linear": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "rope llama3": {"rope": LLAMA3},
    "rope yarn": {"rope": YARN},
    "rope yarn, own factor": {"rope": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0}},
    "mistral": {"architecture": "MistralForCausalLM"},
    "mistral, window": {"architecture": "MistralForCausalLM", "extra": {"sliding_window": 7}},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2, window": {
        "architecture": "Qwen2ForCausalLM",
        "extra": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
    "smollm3": {"architecture": "SmolLM3ForCausalLM"},
}


def open_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = load(path)
    policies = row_policies(checkpoint.config, dtype, cache=None)
    return Decoder(checkpoint.config, checkpoint.weights, dtype=dtype, policies=policies)


def all_logits(decoder: Decoder, tokens: list[int], chunk: int = 64) -> torch.Tensor:
    """Logits ``[len(tokens), V]`` of every position of a prompt."""
    cache = decoder.new_cache(max_batch_size=1, num_slots=len(tokens))
    row = cache.allocate()
    pieces = []
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        pieces.append(decoder.forward([chain_segment(row, piece)], cache).logits_RV)
        cache.extend(row, len(piece))
    return torch.cat(pieces)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    path = write_hf_checkpoint(tmp_path / "model", **VARIANTS[name], scale=0.15)
    decoder = open_decoder(path)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for seed, length in enumerate((1, 2, 37, 150)):
        tokens = random_tokens(decoder.config.vocab_size, length, seed=1000 * seed)
        with torch.no_grad():
            expected_RV = oracle(torch.tensor([tokens])).logits[0].float()
        logits_RV = all_logits(decoder, tokens)

        assert expected_RV.std() > 0.1  # lively enough for a difference to show
        torch.testing.assert_close(logits_RV, expected_RV, rtol=0, atol=TOLERANCE)


def test_captured_states_equal_transformers(tmp_path: Path) -> None:
    path = write_hf_checkpoint(tmp_path / "model", num_layers=4, scale=0.15)
    decoder = open_decoder(path)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = random_tokens(decoder.config.vocab_size, 20, seed=0)
    cache = decoder.new_cache(max_batch_size=1, num_slots=20)
    capture = (0, 2, 3, FINAL_STATE)  # transformers' last one is behind the final norm
    output = decoder.forward([chain_segment(cache.allocate(), tokens)], cache, capture=capture)
    with torch.no_grad():
        hidden = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states

    assert output.hidden_RC is not None
    for state_RD, layer in zip(output.hidden_RC.chunk(len(capture), dim=1), capture, strict=True):
        torch.testing.assert_close(state_RD, hidden[layer][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3", "rope yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_each_tree_node_equals_its_path_decoded_alone(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    decoder = open_decoder(write_hf_checkpoint(tmp_path / "model", **VARIANTS[name]), dtype)
    prompt = random_tokens(decoder.config.vocab_size, 21, seed=9)
    tree = DraftTree.root(3)
    for parent, token in ((0, 5), (0, 6), (1, 7), (2, 5), (4, 8), (1, 9), (5, 10), (0, 11), (7, 2)):
        tree.add(parent, token, 0.5)
    cache = decoder.new_cache(max_batch_size=1, num_slots=64)
    row = cache.allocate()
    prefill(decoder, cache, row, prompt, chunk=16)
    segment = Segment(row, tree.token, tree.depth, tree.ancestor_mask())
    logits_NV = decoder.forward([segment], cache).logits_RV
    for node in range(len(tree)):
        alone = all_logits(decoder, [*prompt, tree.token[0], *tree.path_tokens(node)])[-1]

        assert torch.equal(alone, logits_NV[node])


@pytest.mark.parametrize("size", [12, 72, 576, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_equals_its_plain_twin_row_by_row(size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    weight_D = torch.rand(size, generator=generator) + 0.5
    x_RD = scale * (torch.randn(33, size, generator=generator) + 3.0)
    norm = RMSNorm(weight_D, 1e-5)
    together = norm(x_RD)

    torch.testing.assert_close(
        together, F.rms_norm(x_RD, (size,), weight_D, 1e-5), rtol=2e-6, atol=1e-6
    )
    assert torch.equal(together, torch.cat([norm(x_RD[i : i + 1]) for i in range(33)]))


@pytest.mark.embedded
def test_embedded_logits_equal_transformers_at_every_position() -> None:
    """20 bundled prompts; transformers gets the very same dequantised weights."""
    checkpoint = load(resolve(DEFAULT_MODEL))
    decoder = open_decoder(resolve(DEFAULT_MODEL))
    oracle = load_transformers(resolve(DEFAULT_MODEL), "float32")
    for prompt in load_prompts()[::3][:20]:
        tokens = checkpoint.tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        with torch.no_grad():
            expected_RV = oracle(torch.tensor([tokens])).logits[0]

        torch.testing.assert_close(all_logits(decoder, tokens), expected_RV, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "mistral, window"])
def test_a_tree_grown_layer_by_layer_equals_the_tree_in_one_pass(name: str, tmp_path: Path) -> None:
    """As drafters grow it: each pass writes one depth behind the earlier ones, uncommitted."""
    decoder = open_decoder(write_hf_checkpoint(tmp_path / "model", **VARIANTS[name]))
    trees = [DraftTree.root(3), DraftTree.root(4)]
    for parent, token in ((0, 5), (0, 6), (1, 7), (2, 5), (2, 8), (3, 9), (5, 10), (6, 4)):
        trees[0].add(parent, token, 0.5)
    for parent, token in enumerate((9, 8, 6)):  # a chain needs no mask
        trees[1].add(parent, token, 0.5)
    whole, grown = (decoder.new_cache(max_batch_size=2, num_slots=64) for _ in range(2))
    for cache in (whole, grown):
        for row, length in enumerate((21, 9)):
            assert row == cache.allocate()
            prompt = random_tokens(decoder.config.vocab_size, length, seed=9 + row)
            prefill(decoder, cache, row, prompt, chunk=16)
    at_once = [
        Segment(row, tree.token, tree.depth, tree.ancestor_mask()) for row, tree in enumerate(trees)
    ]
    expected_RV = decoder.forward(at_once, whole).logits_RV
    rows: list[dict[int, torch.Tensor]] = [{}, {}]
    for depth in range(6):
        segments, owners = [], []
        for row, tree in enumerate(trees):
            new = [node for node in range(len(tree)) if tree.depth[node] == depth]
            if new:
                seen = slice(new[0], new[-1] + 1)
                mask_NN = tree.ancestor_mask()
                mask = None if mask_NN is None else mask_NN[seen, : seen.stop]
                segments.append(Segment(row, tree.token[seen], tree.depth[: seen.stop], mask))
                owners += [(row, node) for node in new]
        if segments:
            logits_RV = decoder.forward(segments, grown).logits_RV
            for (row, node), logits_V in zip(owners, logits_RV, strict=True):
                rows[row][node] = logits_V
    ordered = [rows[row][node] for row, tree in enumerate(trees) for node in range(len(tree))]

    assert torch.equal(expected_RV, torch.stack(ordered))
