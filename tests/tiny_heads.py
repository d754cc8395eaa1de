"""Tiny random draft heads, written in the layouts that real ones come in, with the same keys.

The writers know nothing of the package's own: names and config fields are those of SafeAILab's
``cnets.py``, SpecForge's ``llama3_eagle.py``, speculators' ``Eagle3DraftModel``, MEDUSA's
``medusa_model.py`` and the MTP modules of DeepSeek-V3, Qwen3-Next and MiMo. A target is anything
with the sizes of a :class:`~tests.tiny.TinyModel` or of a decoder's config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import write_hf_checkpoint

LAYOUTS = ("safeailab", "specforge", "speculators", "vllm")
ORDERS = ("deepseek", "qwen", "mimo")


class Sizes(Protocol):
    """What a head must know of its target."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp_size(self) -> int: ...


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs a tiny head captures: the published default, or the last ones."""
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(range(1, num_layers + 1))[-3:]


def draft_ids(vocab_size: int, size: int, seed: int = 0) -> Tensor:
    """A choice of the target's tokens, ascending as every trainer writes it; int64 ``[W]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab_size, generator=generator)[:size].sort().values


def write_eagle3_head(
    folder: Path,
    target: Sizes,
    layout: str = "safeailab",
    *,
    capture_layers: Sequence[int] | None = None,
    state_ids: bool | None = None,
    draft_vocab_size: int | None = 40,
    num_layers: int = 1,
    hidden_size: int | None = None,
    own_embedding: bool = False,
    own_head: bool = True,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_before_residual: bool | None = None,
    norm_output: bool = False,
    old_norm_names: bool = False,
    head_norms: bool = False,
    seed: int = 0,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Any] | None = None,
    changes: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Write an EAGLE-3 head and return its folder.

    Args:
        folder: created where missing.
        target: what the head is for.
        layout: one of ``LAYOUTS``.
        capture_layers: layers whose inputs are captured; written in the layout's own convention.
        state_ids: whether config.json names them; by default where they are not the default.
        draft_vocab_size: None is the target's whole vocabulary.
        num_layers: decoder layers of the head.
        hidden_size: the head's width; the target's by default.
        own_embedding: store ``embed_tokens``.
        own_head: store ``lm_head``.
        fc_norm: EAGLE-3.1's switch, and the three below it.
        norm_before_fc: see there.
        norm_before_residual: None leaves the field out.
        norm_output: see there.
        old_norm_names: ``aux_norm_low`` ... for ``fc_norm.0`` ...
        head_norms: Qwen3's norms on q and k.
        seed: of the weights.
        scale: of the weights.
        dtype: of the weights.
        extra: fields put over config.json's.
        changes: tensors put over the file's by name; None removes one.
    """
    layers = tuple(capture_layers or default_layers(target.num_layers))
    width = hidden_size or target.hidden_size
    rows = target.vocab_size if draft_vocab_size is None else draft_vocab_size
    random = _Random(seed, scale)
    captured = len(layers) * target.hidden_size
    weights: dict[str, Tensor] = {"fc.weight": random(width, captured)}
    for layer in range(num_layers):
        block = _block(random, target, width, first=layer == 0, head_norms=head_norms)
        weights |= {f"layers.{layer}.{name}": tensor for name, tensor in block.items()}
    weights["norm.weight"] = random.norm(width)
    if fc_norm:
        names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
        for i in range(len(layers)):
            name = names[i] if old_norm_names else f"fc_norm.{i}"
            weights[f"{name}.weight"] = random.norm(target.hidden_size)
    if norm_before_fc:
        weights["input_norm.weight"] = random.norm(captured)
    if own_embedding:
        weights["embed_tokens.weight"] = random(target.vocab_size, width)
    if own_head:
        weights["lm_head.weight"] = random(rows, width)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    if draft_vocab_size is not None:
        ids = draft_ids(target.vocab_size, rows, seed)
        weights["d2t"] = ids - torch.arange(rows)
        weights["t2d"] = torch.isin(torch.arange(target.vocab_size), ids)
    options = {"fc_norm": fc_norm, "norm_before_fc": norm_before_fc, "norm_output": norm_output}
    fields = _eagle3_config(target, layout, width, num_layers, "qwen3" if head_norms else "llama")
    fields |= {name: value for name, value in options.items() if value}
    if draft_vocab_size is not None:
        fields["draft_vocab_size"] = rows
    if norm_before_residual is not None:
        fields["norm_before_residual"] = norm_before_residual
    if width != target.hidden_size:
        fields["target_hidden_size"] = target.hidden_size
    if state_ids is None:
        state_ids = target.num_layers < 7 or layers != default_layers(target.num_layers)
    if state_ids or layout == "specforge":
        fields |= _layer_ids(layers, layout)
    stored = _renamed(weights, layout) | dict(changes or {})
    return _write(folder, fields | dict(extra or {}), stored)


def write_medusa_head(
    folder: Path,
    target: Sizes,
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    own_head: bool = True,
    prefix: str = "",
    file_name: str = "medusa_lm_head.safetensors",
    seed: int = 0,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Any] | None = None,
    changes: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Write MEDUSA heads as published, with its wrong number of heads in config.json."""
    random, width = _Random(seed, scale), target.hidden_size
    weights: dict[str, Tensor] = {}
    for head in range(num_heads):
        for block in range(num_layers):
            at = f"{prefix}{head}.{block}.linear."
            weights[at + "weight"], weights[at + "bias"] = random(width, width), random(width)
        if own_head:
            weights[f"{prefix}{head}.{num_layers}.weight"] = random(target.vocab_size, width)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    fields = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "medusa_num_heads": 2,
        "medusa_num_layers": num_layers,
        "transformers_version": "4.31.0",
    }
    return _write(folder, fields | dict(extra or {}), weights | dict(changes or {}), file_name)


def write_mtp_target(
    folder: Path,
    order: str = "qwen",
    *,
    num_modules: int = 1,
    own_embedding: bool = False,
    own_head: bool = False,
    head_seed: int = 1,
    scale: float = 0.3,
    shards: int = 1,
    changes: Mapping[str, Tensor | None] | None = None,
    **shape: Any,
) -> Path:
    """Write a target that holds multi-token-prediction modules; ``order`` is one of ``ORDERS``.

    ``shape`` are the fields of :class:`~tests.tiny.TinyModel`; ``changes`` are tensors put over the
    module's by name, None removes one.
    """
    if order == "mimo":
        shape.setdefault("architecture", "MiMoForCausalLM")
    extra = {"num_nextn_predict_layers": num_modules} | shape.pop("extra", {})
    write_hf_checkpoint(folder, shards=shards, extra=extra, **shape)
    config = json.loads((folder / "config.json").read_text())
    module = mtp_weights(
        config, order, num_modules, own_embedding, own_head, seed=head_seed, scale=scale
    )
    module |= dict(changes or {})
    module = {name: tensor for name, tensor in module.items() if tensor is not None}
    if shards == 1:
        path = folder / "model.safetensors"
        save_file(load_file(path) | module, path, metadata={"format": "pt"})
        return folder
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    save_file(module, folder / "model-mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(module, "model-mtp.safetensors")
    index_path.write_text(json.dumps(index))
    return folder


def mtp_weights(
    config: Mapping[str, Any],
    order: str,
    num_modules: int = 1,
    own_embedding: bool = False,
    own_head: bool = False,
    *,
    seed: int = 1,
    scale: float = 0.3,
) -> dict[str, Tensor]:
    """The modules' tensors for a target with this config.json, under the family's names."""
    names = {
        "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    }[order]
    random, width = _Random(seed, scale), config["hidden_size"]
    sizes = _ConfigSizes(config)
    weights: dict[str, Tensor] = {}
    for module in range(num_modules):
        at = {
            "deepseek": f"model.layers.{config['num_hidden_layers'] + module}.",
            "qwen": "mtp.",
            "mimo": f"model.mtp_layers.{module}.",
        }[order]
        if order != "qwen" or module == 0:
            for name in (names[0], names[1], names[3]):
                weights[f"{at}{name}.weight"] = random.norm(width)
            weights[f"{at}{names[2]}.weight"] = random(width, 2 * width)
        layer = f"layers.{module}." if order == "qwen" else ""
        kind = config["architectures"][0]
        block = _block(random, sizes, width, head_norms=kind == "Qwen3ForCausalLM")
        if kind in ("Qwen2ForCausalLM", "MiMoForCausalLM"):
            for part in "qkv":
                rows = block[f"self_attn.{part}_proj.weight"].shape[0]
                block[f"self_attn.{part}_proj.bias"] = random(rows)
        weights |= {f"{at}{layer}{name}": tensor for name, tensor in block.items()}
        if own_embedding:
            weights[f"{at}embed_tokens.weight"] = random(config["vocab_size"], width)
        if own_head:
            head = "lm_head" if order == "mimo" else "shared_head.head"
            weights[f"{at}{head}.weight"] = random(config["vocab_size"], width)
    return weights


class _Random:
    """Draws weights; norms are near 1."""

    def __init__(self, seed: int, scale: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * self._scale

    def norm(self, size: int) -> Tensor:
        return 1 + self(size) / 2


class _ConfigSizes:
    """The sizes in a config.json under the names of :class:`Sizes`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.vocab_size: int = config["vocab_size"]
        self.hidden_size: int = config["hidden_size"]
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.mlp_size: int = config["intermediate_size"]


def _block(
    random: _Random, sizes: Sizes, width: int, *, first: bool = False, head_norms: bool = False
) -> dict[str, Tensor]:
    """A decoder layer; EAGLE-3's ``first`` one reads the embedding beside the state."""
    inputs = 2 * width if first else width
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    block = {
        "self_attn.q_proj.weight": random(queries, inputs),
        "self_attn.k_proj.weight": random(keys, inputs),
        "self_attn.v_proj.weight": random(keys, inputs),
        "self_attn.o_proj.weight": random(width, queries),
        "mlp.gate_proj.weight": random(sizes.mlp_size, width),
        "mlp.up_proj.weight": random(sizes.mlp_size, width),
        "mlp.down_proj.weight": random(width, sizes.mlp_size),
        "input_layernorm.weight": random.norm(width),
        "post_attention_layernorm.weight": random.norm(width),
    }
    if first:
        block["hidden_norm.weight"] = random.norm(width)
    if head_norms:
        block["self_attn.q_norm.weight"] = random.norm(sizes.head_dim)
        block["self_attn.k_norm.weight"] = random.norm(sizes.head_dim)
    return block


def _eagle3_config(
    target: Sizes, layout: str, width: int, num_layers: int, kind: str
) -> dict[str, Any]:
    layer = {
        "model_type": kind,
        "vocab_size": target.vocab_size,
        "hidden_size": width,
        "intermediate_size": target.mlp_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    if layout == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            },
            "speculators_version": "0.9.0",
        }
    name = "Eagle3LlamaForCausalLM" if layout == "vllm" else "LlamaForCausalLMEagle3"
    return {"architectures": [name], "torch_dtype": "float32", **layer}


def _layer_ids(layers: Sequence[int], layout: str) -> dict[str, Any]:
    """Captured layers: inputs at the top level, outputs in ``eagle_config``."""
    name = "eagle_aux_hidden_state_layer_ids"
    if layout in ("speculators", "vllm"):
        return {name: list(layers)}
    return {"eagle_config": {name: [i - 1 for i in layers], "use_aux_hidden_state": True}}


def _renamed(weights: dict[str, Tensor], layout: str) -> dict[str, Tensor | None]:
    """From speculators' names, which are the plainest, to the layout's."""
    renamed: dict[str, Tensor | None] = {}
    for name, tensor in weights.items():
        if layout == "vllm":
            served = {"d2t": "draft_id_to_target_id", "lm_head.weight": "lm_head.weight"}
            if name != "t2d":  # vLLM keeps none
                renamed[served.get(name, f"model.{name}")] = tensor
        elif layout == "speculators":
            renamed[name] = tensor
        else:
            renamed[name.replace("layers.0.", "midlayer.")] = tensor
    return renamed


def _write(
    folder: Path,
    fields: Mapping[str, Any],
    weights: Mapping[str, Tensor | None],
    file_name: str = "model.safetensors",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stated = {name: value for name, value in fields.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(stated, indent=2), encoding="utf-8")
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / file_name, metadata={"format": "pt"})
    return folder
