"""Tiny random checkpoints, written in the formats that real ones come in.

Two layers and a few hundred tokens, so that a test can load one in milliseconds; weights large
enough that the logits are lively (entropy well below log V) and a change anywhere shows. The same
arguments and seed give the same weights from :func:`write_hf_checkpoint` and
:func:`write_gguf_checkpoint`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor

from outrider.errors import OutriderError

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = (
    "The outrider left before dawn and rode ahead of the column to see where the road went. "
    "When the others came up he had found the ford, the bridge that was down and the better way "
    "around it, and most of what he told them was right.",
    "A river does not ask the stones where to go. It goes on, and where it meets one that will "
    "not move it goes around, and the stone is rounder for it and the river no slower.",
    "def area(width, height):\n    return width * height\n\nfor i in range(10):\n"
    "    print(i, area(i, i + 1))\n",
)
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "MiMoForCausalLM": "mimo",
}


# Arguments for a checkpoint of a few kilobytes, to be damaged a few hundred times.
SMALLEST: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "mlp_size": 8,
}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The shape of a tiny checkpoint; ``rope`` is written as Hugging Face's ``rope_scaling``.

    ``rope`` may hold ``rope_theta``; ``extra`` goes into config.json as it is.
    """

    architecture: str = "LlamaForCausalLM"
    vocab_size: int = 320
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_size: int = 96
    max_position: int = 512
    rope: dict[str, Any] | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    seed: int = 0
    scale: float = 0.3
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The checkpoint's config.json."""
        rope = dict(self.rope or {})
        config = {
            "architectures": [self.architecture],
            "model_type": _MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.mlp_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-5,
            "rope_theta": rope.pop("rope_theta", 10000.0),
            "rope_scaling": rope or None,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if self.architecture == "SmolLM3ForCausalLM":
            config["no_rope_layer_interval"] = 2  # so that two layers show the difference
        return config | self.extra

    def weights(self) -> dict[str, Tensor]:
        """Random float32 weights under Hugging Face's names, in a fixed order."""
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * self.scale

        weights = {"model.embed_tokens.weight": random(self.vocab_size, self.hidden_size)}
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        is_qwen2 = self.architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM")
        has_bias = self.attention_bias or is_qwen2
        linears = {
            "self_attn.q_proj": (queries, self.hidden_size, has_bias),
            "self_attn.k_proj": (keys, self.hidden_size, has_bias),
            "self_attn.v_proj": (keys, self.hidden_size, has_bias),
            "self_attn.o_proj": (self.hidden_size, queries, self.attention_bias and not is_qwen2),
            "mlp.gate_proj": (self.mlp_size, self.hidden_size, self.mlp_bias),
            "mlp.up_proj": (self.mlp_size, self.hidden_size, self.mlp_bias),
            "mlp.down_proj": (self.hidden_size, self.mlp_size, self.mlp_bias),
        }
        norms = {"input_layernorm": self.hidden_size, "post_attention_layernorm": self.hidden_size}
        if self.architecture == "Qwen3ForCausalLM":
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            for name, (rows, columns, biased) in linears.items():
                weights[f"{at}{name}.weight"] = random(rows, columns)
                if biased:
                    weights[f"{at}{name}.bias"] = random(rows)
            for name, size in norms.items():
                weights[f"{at}{name}.weight"] = 1 + random(size) / 2
        weights["model.norm.weight"] = 1 + random(self.hidden_size) / 2
        if not self.tied:
            weights["lm_head.weight"] = random(self.vocab_size, self.hidden_size)
        return weights


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE with ChatML's control tokens as ids 0 to 2.

    Below 259 tokens there is no room for all bytes: the first printable ones are kept, and what
    has no token is dropped.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(SPECIALS)
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    if room < len(alphabet):
        tokens = [*SPECIALS, *alphabet[: max(0, room)]][:vocab_size]
        backend.model = BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
        backend.add_special_tokens(specials[:vocab_size])
        return backend
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=alphabet,
        min_frequency=1,
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def write_hf_checkpoint(
    folder: Path, *, shards: int = 1, dtype: torch.dtype = torch.float32, **shape: Any
) -> Path:
    """Write a Hugging Face folder and return it; ``shape`` are the fields of :class:`TinyModel`."""
    model = TinyModel(**shape)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model.config(dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    tiny_tokenizer(model.vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHATML,
        },
    )
    weights = {name: tensor.to(dtype) for name, tensor in model.weights().items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": 0}, "weight_map": weight_map},
    )
    return folder


def write_gguf_checkpoint(
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    **shape: Any,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, and return its path.

    ``kind`` is how matrices are stored (norms and biases stay float32); ``pre`` names the
    pre-tokenizer; ``shape`` are the fields of :class:`TinyModel`, where Mistral becomes ``llama``.
    """
    model = TinyModel(**shape)
    arch = _MODEL_TYPES[model.architecture].replace("mistral", "llama")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_position)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.mlp_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_vocab_size(model.vocab_size)
    _add_rope(writer, model)
    _add_tokenizer(writer, model.vocab_size, pre)
    for name, tensor in model.weights().items():
        stored = _gguf_name(name)
        if arch in ("llama", "smollm3") and (".attn_q." in stored or ".attn_k." in stored):
            heads = model.num_heads if ".attn_q." in stored else model.num_kv_heads
            halves = tensor.reshape(heads, 2, model.head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)  # noqa: PLW2901 - one step of several
        data = tensor.contiguous().numpy()
        if data.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, data)
        else:
            writer.add_tensor(stored, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    rope = model.rope or {}
    theta = rope.get("rope_theta", 10000.0)
    writer.add_rope_freq_base(theta)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, theta, model.head_dim))


def _llama3_divisors(rope: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, pre: str) -> None:
    model = json.loads(tiny_tokenizer(vocab_size).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    )
    # an empty array has no element type: a GGUF tokenizer needs at least one merge
    assert model["merges"], f"vocab_size {vocab_size} leaves no room for merges; take 260 or more"
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


def _gguf_name(name: str) -> str:
    renames = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for old, new in renames.items():
        name = name.replace(old, new)
    return name


def complaint(action: Callable[[], object]) -> str | None:
    """The message of the error that ``action`` raises on purpose, or None if it succeeds."""
    try:
        action()
    except OutriderError as error:
        return str(error)
    return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
