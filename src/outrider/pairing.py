"""A target and what drafts for it: opened together, checked for their fit, built.

Owns the way from ``SpeculationConfig.head`` to a drafter: which files it means (without one, those
that ship for the target), whether the two belong together, what the drafter will take in memory.
Used by :mod:`outrider.llm` and by ``inspect``; stands above :mod:`outrider.drafters` and
:mod:`outrider.models.loading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.config import METHODS_WITH_HEAD, Method, SpeculationConfig
from outrider.drafters import Drafter, DraftSource, create_drafter, drafted_slots
from outrider.drafters.autoregressive import MAX_WAITING
from outrider.errors import ParameterError, UnknownModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.config import Eagle3Config, MedusaConfig, MtpConfig, Shapes
from outrider.models.loading import LoadedCheckpoint, Tokenizer, load
from outrider.models.loading.heads import (
    LoadedHead,
    check_tokenizer,
    has_mtp,
    load_head,
    load_mtp,
    load_shared_draft_model,
    recorded_acceptance,
    shares_ends,
    shipped_head,
)
from outrider.models.loading.hub import display_name, resolve
from outrider.models.memory import MemoryItem, cache_item, weights_item
from outrider.types import ProgressCallback


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """What of an opened target decides which drafters fit."""

    path: Path
    config: DecoderConfig
    tokenizer: Tokenizer
    weights_hash: str

    @classmethod
    def of(cls, path: Path, checkpoint: LoadedCheckpoint) -> TargetFiles:
        """What the checkpoint at ``path`` is to its drafters."""
        return cls(path, checkpoint.config, checkpoint.tokenizer, checkpoint.weights_hash)


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A head or a draft model whose files are open and fit the target.

    ``head`` is None for a draft model; ``recorded_acceptance`` is what its maker measured.
    """

    source: DraftSource
    name: str
    weights_hash: str
    head: LoadedHead | None
    recorded_acceptance: float | None

    @classmethod
    def of(cls, head: LoadedHead) -> OpenedDrafter:
        """What a head is to its drafter."""
        source = DraftSource(head.config, head.weights)
        return cls(source, head.name, head.weights_hash, head, head.recorded_acceptance)

    def close(self) -> None:
        """Let go of the files."""
        close = getattr(self.source.weights, "close", None)
        if close is not None:
            close()


def open_drafter(
    speculation: SpeculationConfig, target: TargetFiles, on_progress: ProgressCallback | None
) -> OpenedDrafter | None:
    """Open what the method reads; None for a method without a checkpoint of its own.

    Raises:
        ParameterError: the head is of another method, or none is named and none ships.
        CheckpointError: damaged files, or a head made for another target.
        UnsupportedModelError: a draft model with another tokeniser.
    """
    if speculation.method not in METHODS_WITH_HEAD:
        return None
    if speculation.head is None and speculation.method is Method.MTP and has_mtp(target.path):
        return OpenedDrafter.of(load_mtp(target.path, target.config))
    named = speculation.head or _shipped(speculation.method, target)
    if speculation.method is Method.DRAFT:
        return _open_draft_model(named, target, on_progress)
    head = open_head(named, target, on_progress)
    if head.method is not speculation.method:
        head.weights.close()
        raise ParameterError(
            f"head: {head.name} is a head for method {head.method}; use that, or another head for "
            f"{speculation.method}"
        )
    return OpenedDrafter.of(head)


def open_head(
    path: str, target: TargetFiles, on_progress: ProgressCallback | None = None
) -> LoadedHead:
    """Open a head of whatever kind it is.

    Raises:
        UnknownModelError: there is no such folder or file.
        CheckpointError: damaged, or made for another target.
    """
    if not Path(path).exists():
        raise UnknownModelError(f"--head: no such folder or file: {path}")
    return load_head(Path(path), target.config, on_progress=on_progress)


def _shipped(method: Method, target: TargetFiles) -> str:
    """The folder of the target's head in the package."""
    found = shipped_head(method, target.weights_hash, target.tokenizer.fingerprint)
    if found is not None:
        return str(found.path)
    name = display_name(target.path)
    inside = ", its checkpoint holds no mtp module" if method is Method.MTP else ""
    what = "draft model" if method is Method.DRAFT else f"{method} head"
    raise ParameterError(
        f"method: no {what} ships for {name}{inside}; give one with head (--head), train one "
        f"(outrider train {method} --model ... --out DIR), or use another method"
    )


def _open_draft_model(
    name: str, target: TargetFiles, on_progress: ProgressCallback | None
) -> OpenedDrafter:
    path = resolve(name, pull=True, on_progress=on_progress)
    if shares_ends(path):
        model = load_shared_draft_model(path, target.config, target.tokenizer)
    else:
        model = load(path, on_progress=on_progress)
        try:
            check_tokenizer(model.name, model.tokenizer.fingerprint, target.tokenizer.fingerprint)
        except BaseException:
            model.weights.close()
            raise
    source = DraftSource(model.config, model.weights)
    return OpenedDrafter(source, model.name, model.weights_hash, None, recorded_acceptance(path))


def build_drafter(
    speculation: SpeculationConfig,
    opened: OpenedDrafter | None,
    target: Decoder,
    *,
    max_batch_size: int,
    max_model_len: int,
) -> Drafter | None:
    """Load the weights and build the drafter; the files are closed."""
    try:
        return create_drafter(
            speculation,
            source=None if opened is None else opened.source,
            target=target,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
        )
    finally:
        if opened is not None:
            opened.close()


def _loaded_shapes(source: DraftSource) -> Shapes:
    """The weights in memory: those of the file, and an output head that is copied beside them.

    Of a reduced vocabulary that shares its target's head, it is the rows it needs; of a whole draft
    model with tied ends, the packed second copy.
    """
    config, shapes = source.config, source.config.weight_shapes()
    if isinstance(config, Eagle3Config) and config.is_reduced:
        shapes["lm_head.weight"] = (config.draft_vocab_size, config.layers.hidden_size)
    elif isinstance(config, DecoderConfig) and "embed.weight" in shapes:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def drafter_items(
    source: DraftSource,
    speculation: SpeculationConfig,
    *,
    dtype: torch.dtype,
    max_batch_size: int,
    max_model_len: int,
) -> Sequence[MemoryItem]:
    """The drafter's lines of the memory plan: weights, own cache, states kept, draft logits."""
    config = source.config
    items = [weights_item("draft weights", _loaded_shapes(source), dtype)]
    if isinstance(config, MedusaConfig):
        rows, width = max_batch_size * config.num_heads, config.draft_vocab_size
    else:
        is_model = isinstance(config, DecoderConfig)
        layers = config if is_model else config.layers
        num_slots = max_model_len + drafted_slots(speculation)
        items.append(cache_item("draft KV cache", layers, dtype, max_batch_size, num_slots))
        width = config.vocab_size if is_model else config.draft_vocab_size
        if not isinstance(config, DecoderConfig):
            items.append(_states_item(config, dtype, max_batch_size))
        assert speculation.dynamic_tree_max_topK is not None
        rows = max_batch_size * speculation.dynamic_tree_max_topK
    items.append(MemoryItem("draft buffers", "draft logits of one pass", 2 * 4 * rows * width))
    return items


def _states_item(
    config: Eagle3Config | MtpConfig, dtype: torch.dtype, max_batch_size: int
) -> MemoryItem:
    """The target's states that a head keeps while it is not asked, at most."""
    width = config.layers.hidden_size
    if isinstance(config, Eagle3Config):
        width = len(config.capture_layers) * config.target_hidden_size
    size = max_batch_size * MAX_WAITING * width * dtype.itemsize
    return MemoryItem("draft states", f"{max_batch_size} x {MAX_WAITING} rows of {width:,}", size)
