"""Small random targets for tests that need a decoder but no files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.exactness import row_policies


def tiny_config(**changes: object) -> DecoderConfig:
    """A two-layer Llama with odd sizes: widths no vector divides, more heads than one group."""
    sizes: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 331,
        "hidden_size": 72,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 12,
        "mlp_size": 100,
        "norm_eps": 1e-5,
        "max_position": 4096,
    }
    return DecoderConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def random_weights(config: DecoderConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough that the logits are lively and depend on distant tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            fan_in = shape[-1] if len(shape) == 2 else 25
            scale = 1.0 if name == "embed.weight" else 1.6 / fan_in**0.5
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def random_decoder(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Decoder:
    """A decoder with random weights; its row ranges are probed, not remembered."""
    config = tiny_config(**changes)
    policies = row_policies(config, dtype, cache=None)
    return Decoder(config, random_weights(config, seed), dtype=dtype, policies=policies)


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Run with another number of compute threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
