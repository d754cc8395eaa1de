"""Opening a draft head: whatever its layout, one :class:`LoadedHead` that fits its target.

Owns the recognition of the kind of head, from config.json's fields and the tensors' names, and the
refusal by name of the kinds that are not ours.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.loading.heads.draft_model import shares_ends
from outrider.models.loading.heads.eagle3 import is_eagle3, load_eagle3, plain
from outrider.models.loading.heads.loaded import LoadedHead
from outrider.models.loading.heads.medusa import is_medusa, load_medusa
from outrider.models.loading.heads.mtp import is_mtp, load_mtp_source
from outrider.models.loading.heads.source import HeadSource
from outrider.models.loading.hub import display_name
from outrider.models.loading.weights import listed
from outrider.types import ProgressCallback

_SUPPORTED = "EAGLE-3 (SafeAILab, SpecForge, speculators, vLLM layouts), MEDUSA, MTP"
# What architectures and config fields of other drafters contain, in lower case.
_OTHERS = {
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dflare": "DFlare",
    "dspark": "DSpark",
    "domino": "Domino",
    "hydra": "Hydra",
}

# Every decoder has both; an EAGLE-1 head has an embedding too, but no norm before its first layer.
_WHOLE = {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"}


def load_head(
    path: Path, target: DecoderConfig, *, on_progress: ProgressCallback | None = None
) -> LoadedHead:
    """Open a draft head and check that it is sound, complete and made for a target like this one.

    Args:
        path: a folder, or a ``.safetensors`` file in one.
        target: the model that the head drafts for.
        on_progress: called with a message and None.

    Raises:
        UnknownModelError: there is no such path.
        UnsafeFileError: the weights are a pickle; it is not opened.
        UnsupportedModelError: a kind of head that is not ours, by name.
        CheckpointError: anything that is damaged, missing, contradictory or of another size than
            the target, by name.
    """
    path = Path(path)
    if on_progress is not None:
        on_progress(f"reading the draft head {display_name(path)}", None)
    source = HeadSource.open(path)
    try:
        _refuse_others(source)
        if is_eagle3(source.tensors):
            return load_eagle3(source, target)
        if is_mtp(source, target):
            return load_mtp_source(source, target)
        if is_medusa(source.tensors):
            return load_medusa(source, target)
        raise _unknown(source)
    except BaseException:
        source.opened.close()
        raise


def is_draft_model(path: Path, target: DecoderConfig) -> bool:
    """Whether ``path`` is a model, whole or without ends, rather than a head or something broken.

    A model that brings a multi-token-prediction module as wide as the target counts as a head.
    Reads headers only.

    Raises:
        UnknownModelError, UnsafeFileError, CheckpointError: as :func:`load_head`.
    """
    if path.suffix.lower() == ".gguf" or (
        path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    ):
        return True
    if shares_ends(path):
        return True
    source = HeadSource.open(path)
    with source.opened:
        names = source.tensors
        if is_eagle3(names) or is_medusa(names) or not names.keys() >= _WHOLE:
            return False
        is_as_wide = source.fields.raw("hidden_size", None) == target.hidden_size
        return not (is_as_wide and is_mtp(source, target))


def _refuse_others(source: HeadSource) -> None:
    fields = source.fields
    kind = fields.text("speculators_model_type", "eagle3")
    listed_names = fields.raw("architectures", [])
    names = (
        [name for name in listed_names if isinstance(name, str)]
        if isinstance(listed_names, list)
        else []
    )
    words = [kind, *names, *(key for key in fields.values() if key.endswith("_config"))]
    for word in words:
        for part, name in _OTHERS.items():
            if part in word.lower().replace("-", "").replace("_", ""):
                raise UnsupportedModelError(
                    f"{fields.path}: a {name} head ({word}); supported: {_SUPPORTED}"
                )
    if kind != "eagle3":
        raise UnsupportedModelError(
            f"{fields.path}: speculators_model_type {kind!r} is not supported; supported: eagle3"
        )


def _unknown(source: HeadSource) -> CheckpointError:
    if shares_ends(source.path):
        return CheckpointError(f"{source.path}: a draft model, not a head; use method draft")
    names = {plain(name): tensor for name, tensor in source.tensors.items()}
    fc = names.get("fc.weight")
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0]:
        return UnsupportedModelError(
            f"{source.path}: an EAGLE-1 or EAGLE-2 head (fc.weight reads one state beside the "
            f"embedding); supported: {_SUPPORTED}"
        )
    return CheckpointError(
        f"{source.path}: not a draft head that we know, tensors: {listed(sorted(source.tensors))}; "
        f"supported: {_SUPPORTED}"
    )
