"""Writing EAGLE-3 heads in the two layouts that other engines read.

Owns the translation back: names, config.json, the captured layers in the layout's convention. What
a layout has no words for is refused, not dropped. Beside the layout's own fields, config.json holds
an object ``outrider``: the captured layers in our convention and the measured acceptance length,
which other readers ignore. There it is also said that a reduced vocabulary's output rows are the
target's; for other engines :func:`~outrider.models.loading.heads.complete.completed` puts them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import Eagle3Config
from outrider.models.loading.heads.eagle3 import NAMES, PARTS
from outrider.models.loading.heads.eagle3_config import (
    LAYER_IDS,
    OURS,
    TARGETS,
    default_capture_layers,
)
from outrider.models.loading.heads.folder import HeadFiles, check_fit, check_new, write_folder
from outrider.models.loading.heads.hf_fields import layer_fields
from outrider.models.loading.heads.vocabulary_map import kept_tokens
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
    folder = Path(folder)
    check_layout(head, layout)
    check_new(folder)
    check_fit(head.weight_shapes(), weights, folder)
    files = eagle3_files(
        head,
        weights,
        layout=layout,
        target_name=target_name,
        target=target,
        recorded_acceptance=recorded_acceptance,
    )
    write_folder(folder, files)


def eagle3_files(
    head: Eagle3Config,
    weights: Mapping[str, Tensor],
    *,
    layout: str,
    target_name: str,
    target: DecoderConfig,
    recorded_acceptance: float | None = None,
) -> HeadFiles:
    """What :func:`write_eagle3` writes; ``weights`` fit ``head``.

    Raises:
        ParameterError: no such layout, or one that cannot express the head.
        CheckpointError: ``d2t`` is no choice of the target's tokens.
    """
    check_layout(head, layout)
    config = _safeailab(head, target) if layout == "safeailab" else _speculators(head)
    if layout == "speculators":
        config["speculators_config"] = _verifier(target_name, target)
    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    ours: dict[str, Any] = {
        "capture_layers": list(head.capture_layers),
        "recorded_acceptance": recorded_acceptance,
    }
    if not head.has_own_head:
        ours["lm_head"] = TARGETS
    config |= {"torch_dtype": dtype, OURS: ours}
    tensors = {_their_name(name, layout): weights[name] for name in head.weight_shapes()}
    if head.is_reduced:
        tensors["d2t"] = weights["d2t"].to(torch.int64)
        chosen = DraftVocabulary.from_offsets(tensors["d2t"].numpy(), head.layers.vocab_size)
        tensors["t2d"] = kept_tokens(torch.tensor(chosen.ids_W), head.layers.vocab_size)
    return HeadFiles(config=config, tensors=tensors)


def check_layout(head: Eagle3Config, layout: str) -> None:
    """Refuse what the layout's readers would not see, and would therefore compute differently.

    Raises:
        ParameterError: no such layout, or one that cannot express the head.
    """
    if layout not in LAYOUTS:
        raise ParameterError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
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
        **layer_fields(head.layers, "llama"),
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
        "transformer_layer_config": layer_fields(
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
