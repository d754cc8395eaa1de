"""Draft models as Hugging Face folders: whole ones written, and those without ends of their own.

A draft model made from its target may leave embedding and output head to it. Its config.json then
says so, and which tokeniser it means, in our object::

    "outrider": {"embed_tokens": "target", "lm_head": "target", "tokenizer": "<fingerprint>"}

and the folder holds neither those weights nor a tokeniser. A whole one is an ordinary model, which
:func:`outrider.models.loading.load` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import SharedEndsConfig
from outrider.models.loading.cache import cache_root
from outrider.models.loading.fields import Fields, read_json
from outrider.models.loading.hashing import joint_sha256
from outrider.models.loading.heads.eagle3_config import OURS, TARGETS, says_target
from outrider.models.loading.heads.folder import HeadFiles
from outrider.models.loading.heads.hf_fields import decoder_fields
from outrider.models.loading.hf_config import parse_config
from outrider.models.loading.hub import display_name
from outrider.models.loading.huggingface import LAYER_PARTS, open_weights
from outrider.models.loading.tokenizer import Tokenizer
from outrider.models.loading.weight_files import weight_files
from outrider.models.loading.weights import LazyWeights

_ENDS = ("embed_tokens", "lm_head")
_THEIR_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_THEIR_PARTS = {ours: theirs for theirs, ours in LAYER_PARTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDraftModel:
    """A draft model without ends that fits its target; the weights are read on access."""

    config: SharedEndsConfig
    weights: LazyWeights
    name: str
    weights_hash: str


def shares_ends(path: Path) -> bool:
    """Whether ``path`` is a draft model that uses its target's embedding and output head.

    Raises:
        CheckpointError: a damaged config.json, or one that gives only one end to the target.
    """
    config = _folder(path) / "config.json"
    if path.suffix.lower() == ".gguf" or not config.is_file():
        return False
    ours = Fields(config, read_json(config)).sub(OURS)
    if "embed_tokens" not in ours:
        return False
    if not all(says_target(ours, name) for name in _ENDS):
        raise ours.error(
            OURS, f"gives {_ENDS[0]} to the target and not {_ENDS[1]}; allowed: both or none"
        )
    return True


def recorded_acceptance(path: Path) -> float | None:
    """The acceptance length that the maker of the draft model at ``path`` measured, if any.

    Raises:
        CheckpointError: a damaged config.json.
    """
    config = _folder(path) / "config.json"
    if path.suffix.lower() == ".gguf" or not config.is_file():
        return None
    return Fields(config, read_json(config)).sub(OURS).positive("recorded_acceptance", None)


def load_shared_draft_model(
    path: Path, target: DecoderConfig, tokenizer: Tokenizer
) -> SharedDraftModel:
    """Open a draft model that :func:`shares_ends`, and check that the target's ends fit it.

    Raises:
        CheckpointError: damaged, or made for a target of other sizes; names both.
        UnsupportedModelError: made for another tokeniser.
    """
    folder = _folder(path)
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    config = parse_config(fields)
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise fields.error(
                name,
                f"is {ours}, the target's is {theirs}: the draft model uses its target's "
                "embedding and output head, so it fits the model it was made for only",
            )
    check_tokenizer(
        display_name(path), fields.sub(OURS).text("tokenizer", ""), tokenizer.fingerprint
    )
    shared = SharedEndsConfig.of(replace(config, tied_embeddings=target.tied_embeddings))
    files = weight_files(folder) if path.is_dir() else [path]
    weights = open_weights(files, shared, folder)
    try:
        weights_hash = joint_sha256([fields.path, *files], cache_root())
    except BaseException:
        weights.close()
        raise
    return SharedDraftModel(
        config=shared, weights=weights, name=display_name(path), weights_hash=weights_hash
    )


def check_tokenizer(name: str, draft: str, target: str) -> None:
    """Compare the fingerprints of a draft model's tokeniser and its target's.

    Raises:
        UnsupportedModelError: they differ.
    """
    if draft != target:
        raise UnsupportedModelError(
            f"draft model {name} has another tokeniser than the target: vocabulary "
            f"{draft[:16] or 'unknown'} is not {target[:16]}; its tokens would mean something "
            "else; choose a draft model of the target's family"
        )


def draft_model_files(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    *,
    tokenizer: Tokenizer,
    target_name: str,
    recorded_acceptance: float | None = None,
) -> HeadFiles:
    """A draft model's folder, whole or without ends as ``config`` says.

    Args:
        config: the model; a :class:`~outrider.models.heads.config.SharedEndsConfig` leaves
            embedding, output head and tokeniser to the target.
        weights: under the names of :mod:`outrider.models.architecture`, all of them.
        tokenizer: the target's, which is also the draft model's.
        target_name: the model that it drafts for.
        recorded_acceptance: its measured acceptance length.

    Raises:
        ParameterError: config.json has no words for the architecture.
    """
    ours: dict[str, Any] = {"target": target_name, "recorded_acceptance": recorded_acceptance}
    is_shared = isinstance(config, SharedEndsConfig)
    if is_shared:
        ours |= {**dict.fromkeys(_ENDS, TARGETS), "tokenizer": tokenizer.fingerprint}
    fields = {
        **decoder_fields(config),
        "torch_dtype": str(weights["norm.weight"].dtype).removeprefix("torch."),
        OURS: ours,
    }
    tensors = {_their_name(name): weights[name] for name in config.weight_shapes()}
    return HeadFiles(config=fields, tensors=tensors, others={} if is_shared else tokenizer.files())


def _their_name(name: str) -> str:
    if name in _THEIR_ENDS:
        return _THEIR_ENDS[name]
    _, index, part, kind = name.split(".")
    return f"model.layers.{index}.{_THEIR_PARTS[part]}.{kind}"


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent
