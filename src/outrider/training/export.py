"""The end of a training run: the head as a folder in its published layout, with where it is from.

Owns what is stored and what is left to the target, the precision, ``manifest.json`` and the
replacing of an earlier export; names and fields of each layout are
:mod:`outrider.models.loading.heads`' business. ``training/run.py`` exports before the evaluation,
which loads the folder as a user would, and again with what was measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.config import Method
from outrider.errors import CheckpointError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import (
    Eagle3Config,
    HeadConfig,
    MedusaConfig,
    MtpConfig,
    SharedEndsConfig,
)
from outrider.models.loading import load
from outrider.models.loading.heads import (
    HeadFiles,
    completed,
    draft_model_files,
    eagle3_files,
    medusa_files,
    mtp_files,
)
from outrider.models.loading.heads.folder import check_fit, check_new
from outrider.models.loading.hub import display_name
from outrider.pairing import TargetFiles
from outrider.training.store import verify_folder, write_folder

_KIND = "outrider head"
_TENSORS = ".safetensors"

Config: TypeAlias = HeadConfig | DecoderConfig
Weights: TypeAlias = Mapping[str, Tensor]

_METHODS: dict[Method, type[Config]] = {
    Method.EAGLE3: Eagle3Config,
    Method.MTP: MtpConfig,
    Method.MEDUSA: MedusaConfig,
    Method.DRAFT: DecoderConfig,
}


def export_head(
    method: Method,
    config: Config,
    weights: Weights,
    folder: Path,
    *,
    target: TargetFiles,
    manifest: Mapping[str, Any],
    acceptance: float | None = None,
    self_contained: bool = False,
    layout: str = "speculators",
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Write a trained head or draft model; ``folder`` appears whole or not at all.

    Args:
        method: which drafter runs it.
        config: what it is. A draft model whose weights hold no embedding shares its target's ends.
        weights: under our names, in any float type.
        folder: new, empty, or an earlier export, which is replaced.
        target: the model that it was trained for; opened again where its ends are stored.
        manifest: how it was made, as JSON values; kept under ``training`` in ``manifest.json``,
            beside the method, the target and the SHA-256 of each file.
        acceptance: the acceptance length measured with chains of
            :data:`~outrider.selfcheck.RECORDED_CHAIN`, greedy; the self-check compares with it.
        self_contained: store embedding and output head too, wherever the head uses them, for
            engines that do not take the target's.
        layout: of EAGLE-3: ``speculators`` or ``safeailab``; the others have one.
        dtype: of the stored weights.

    Returns:
        SHA-256 in hex that names the stored tensors, whatever the manifest says beside them.

    Raises:
        CheckpointError: a weight is missing, of another shape or not finite, or the folder cannot
            be written; an earlier export is then still there.
        CapacityError: the disk is full; the same.
        ParameterError: ``folder`` holds something else, or the layout cannot express the head.
    """
    assert isinstance(config, _METHODS[method]), f"{type(config).__name__} is no {method}"
    folder = Path(folder)
    if not _is_export(folder):
        check_new(folder)
    stored = _in_precision(weights, dtype, folder)
    if method is Method.DRAFT and "embed.weight" not in stored:
        assert isinstance(config, DecoderConfig)
        config = SharedEndsConfig.of(config)
    if self_contained:
        config, stored = _completed(config, stored, target)
    about = {
        "kind": _KIND,
        "method": method.value,
        "target": {
            "name": display_name(target.path),
            "weights_hash": target.weights_hash,
            "tokenizer": target.tokenizer.fingerprint,
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.config.vocab_size,
            "num_layers": target.config.num_layers,
        },
        "self_contained": self_contained,
        "acceptance": acceptance,
        "training": dict(manifest),
    }
    check_fit(config.weight_shapes(), stored, folder)
    files = _files(config, stored, target, layout=layout, acceptance=acceptance)
    write_folder(folder, files.contents(), about, num_bytes=files.num_bytes)
    return _tensors_sha256(folder)


def _files(
    config: Config,
    weights: Weights,
    target: TargetFiles,
    *,
    layout: str,
    acceptance: float | None,
) -> HeadFiles:
    """The head in its layout."""
    about: dict[str, Any] = {
        "target_name": display_name(target.path),
        "recorded_acceptance": acceptance,
    }
    if isinstance(config, Eagle3Config):
        return eagle3_files(config, weights, layout=layout, target=target.config, **about)
    if isinstance(config, MtpConfig):
        return mtp_files(config, weights, target=target.config, **about)
    if isinstance(config, MedusaConfig):
        return medusa_files(config, weights, **about)
    return draft_model_files(config, weights, tokenizer=target.tokenizer, **about)


def _in_precision(weights: Weights, dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    """The weights as they are stored; a vocabulary map keeps its type."""
    stored = {}
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{folder}: not written: weight {name} holds a NaN or an infinity"
            )
        plain = tensor.detach().cpu()
        stored[name] = plain.to(dtype) if plain.is_floating_point() else plain
    return stored


def _completed(
    config: Config, weights: Weights, target: TargetFiles
) -> tuple[Config, dict[str, Tensor]]:
    """With what is the target's, out of its files."""
    checkpoint = load(target.path)
    try:
        config, whole = completed(config, weights, target.config, checkpoint.weights)
        # Copies: without a change of type they are views of a file that is about to be closed.
        return config, {name: tensor.clone() for name, tensor in whole.items()}
    finally:
        checkpoint.weights.close()


def _tensors_sha256(folder: Path) -> str:
    """One over those of the tensor files, which the manifest lists."""
    files = verify_folder(folder, hashes=False).files
    listed = sorted((name, sha) for name, (_, sha) in files.items() if name.endswith(_TENSORS))
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _is_export(folder: Path) -> bool:
    try:
        return verify_folder(folder, hashes=False).meta.get("kind") == _KIND
    except CheckpointError:
        return False
