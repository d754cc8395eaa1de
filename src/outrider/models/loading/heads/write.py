"""Writing EAGLE-3 heads in the two layouts that other engines read.

Owns the translation back: names, config.json, the captured layers in the layout's convention. What
a layout has no words for is refused, not dropped. Beside the layout's own fields, config.json holds
an object ``outrider``: the captured layers in our convention and the measured acceptance length,
which other readers ignore. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import CheckpointError, ParameterError
from outrider.models.architecture import DecoderConfig, RopeConfig
from outrider.models.heads.config import Eagle3Config
from outrider.models.loading.heads.eagle3 import NAMES, PARTS
from outrider.models.loading.heads.eagle3_config import LAYER_IDS, OURS, default_capture_layers
from outrider.models.loading.heads.vocabulary_map import kept_tokens
from outrider.models.loading.weights import check_weights
from outrider.vocabulary import DraftVocabulary

Layout: TypeAlias = Literal["safeailab", "speculators"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

_THEIR_NAMES = {ours: theirs for theirs, ours in NAMES.items()}
_THEIR_PARTS = {ours: theirs for theirs, ours in PARTS.items()}
_DRAFT_LEN = 5  # speculators wants a number of tokens to propose; this is its own default


def write_eagle3(
    head: Eagle3Config,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    layout: str,
    target_name: str,
    target: DecoderConfig,
    recorded_acceptance: float | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` into a new folder.

    Args:
        head: what the head is.
        weights: under the names of :mod:`outrider.models.heads.config`, in the type to be stored.
        folder: must not exist, or be empty.
        layout: ``safeailab`` or ``speculators``.
        target_name: the model that the head drafts for, as other engines should look it up.
        target: that model.
        recorded_acceptance: its measured acceptance length, read back by :func:`load_head`.

    Raises:
        ParameterError: no such layout, the folder is in use, or the layout cannot express the head.
        CheckpointError: weights that do not fit ``head``, or a folder that cannot be written.
    """
    if layout not in LAYOUTS:
        raise ParameterError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
    _refuse_inexpressible(head, layout)
    _check(head, weights, folder)
    config = _safeailab(head, target) if layout == "safeailab" else _speculators(head)
    if layout == "speculators":
        config["speculators_config"] = _verifier(target_name, target)
    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    config |= {
        "torch_dtype": dtype,
        OURS: {
            "capture_layers": list(head.capture_layers),
            "recorded_acceptance": recorded_acceptance,
        },
    }
    tensors = {_their_name(name, layout): weights[name] for name in head.weight_shapes()}
    if head.is_reduced:
        tensors["d2t"] = weights["d2t"].to(torch.int64)
        ids_W = torch.arange(head.draft_vocab_size) + tensors["d2t"]
        tensors["t2d"] = kept_tokens(ids_W, head.layers.vocab_size)
    _write(config, tensors, Path(folder))


def _refuse_inexpressible(head: Eagle3Config, layout: str) -> None:
    """What the layout's readers would not see, and would therefore compute differently."""
    layers = head.layers
    problems = {
        "sliding attention": bool(layers.sliding_layers),
        "layers without rotation": bool(layers.no_rope_layers),
    }
    if layout == "safeailab":
        problems |= {
            "norm_before_fc": head.norm_before_fc,
            "fc_norm": head.fc_norm,
            "norm_before_residual": head.norm_before_residual,
            "norm_output": head.norm_output,
            f"{layers.num_layers} layers": layers.num_layers > 1,
            "attention biases": layers.attention_bias or layers.attention_out_bias,
            "MLP biases": layers.mlp_bias,
            "q and k norms": layers.qk_norm,
            "the target's output head": not head.has_own_head,
            "the embedding captured as a layer's output": head.capture_layers[0] == 0,
        }
    else:
        problems |= {
            "attention biases on q, k, v alone": layers.attention_bias != layers.attention_out_bias,
            "MLP biases with q and k norms": layers.mlp_bias and layers.qk_norm,
        }
    found = [what for what, is_there in problems.items() if is_there]
    if found:
        other = "; use layout speculators" if layout == "safeailab" else ""
        raise ParameterError(f"layout {layout} cannot express {', '.join(found)}{other}")


def _check(head: Eagle3Config, weights: Mapping[str, Tensor], folder: Path) -> None:
    folder = Path(folder)
    try:
        is_in_use = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _not_written(folder, error) from None
    if is_in_use:
        raise ParameterError(f"{folder}: exists and is not an empty folder; name a new one")
    shapes = {name: tuple(weights[name].shape) for name in weights}
    check_weights(head.weight_shapes(), shapes, folder, source="head's config")
    if head.is_reduced:
        DraftVocabulary.from_offsets(weights["d2t"].numpy(), head.layers.vocab_size)


def _their_name(name: str, layout: str) -> str:
    if name in _THEIR_NAMES:
        return _THEIR_NAMES[name]
    if name.startswith("layers."):
        _, index, part, kind = name.split(".")
        layer = "midlayer" if layout == "safeailab" else f"layers.{index}"
        return f"{layer}.{_THEIR_PARTS[part]}.{kind}"
    return name


def _safeailab(head: Eagle3Config, target: DecoderConfig) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(head.layers, "llama"),
        "draft_vocab_size": head.draft_vocab_size,
    }
    if head.layers.hidden_size != head.target_hidden_size:
        config["target_hidden_size"] = head.target_hidden_size
    # Engines disagree about ids in eagle_config (vLLM's first engine does not add the 1), and
    # SafeAILab's own code does not look at them: where the default holds, none are written.
    if head.capture_layers != default_capture_layers(target.num_layers):
        outputs = [layer - 1 for layer in head.capture_layers]
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: outputs}
    return config


def _speculators(head: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _layer_config(
            head.layers, "qwen3" if head.layers.qk_norm else "llama"
        ),
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        LAYER_IDS: list(head.capture_layers),
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "tie_word_embeddings": False,
    }


def _verifier(target_name: str, target: DecoderConfig) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFT_LEN}],
        "verifier": {"name_or_path": target_name, "architectures": [target.architecture]},
    }


def _layer_config(layers: DecoderConfig, model_type: str) -> dict[str, Any]:
    """Hugging Face's fields of the head's own layers."""
    return {
        "model_type": model_type,
        "vocab_size": layers.vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.mlp_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": layers.hidden_act,
        "rms_norm_eps": layers.norm_eps,
        "max_position_embeddings": layers.max_position,
        "rope_theta": layers.rope.theta,
        "rope_scaling": _rope_scaling(layers.rope),
        "attention_bias": layers.attention_bias,
        "mlp_bias": layers.mlp_bias,
        "tie_word_embeddings": False,
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Hugging Face's ``rope_scaling`` of a rope that is not plain."""
    if rope.kind == "default":
        return None
    fields = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    yarn = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    settings = asdict(rope)
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    for name in fields.get(rope.kind, (*yarn, "truncate")):
        if settings[name] is not None:
            scaling[name] = settings[name]
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return scaling


def _write(config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write beside ``folder``, then move into its place."""
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    # A copy each: weights read from one mapped file share memory, which the format refuses.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        partial.mkdir(parents=True)
        save_file(copies, partial / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise _not_written(folder, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _not_written(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{folder}: cannot be written: {error.strerror or error}")
