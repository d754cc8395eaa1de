"""What every layout of a draft head is loaded into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import Method
from outrider.models.heads.config import HeadConfig, MedusaConfig
from outrider.models.loading.cache import cache_root
from outrider.models.loading.hashing import joint_sha256
from outrider.models.loading.heads.source import HeadSource
from outrider.models.loading.hub import display_name
from outrider.models.loading.weights import LazyWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A draft head that fits its target; the weights are read on access.

    Attributes:
        method: which drafter runs it.
        config: sizes and options.
        weights: under the names of :mod:`outrider.models.heads.config`.
        name: a short name of where it came from.
        weights_hash: SHA-256 in hex over config.json and the weight files.
        source_bytes: what it takes on disk.
        layout: whose format it was read from.
        conventions: what was found where layouts differ, and how it was translated; sentences.
        recorded_acceptance: the acceptance length its maker measured, where we wrote it down.
        trained_positions: how far config.json says the head's own positions reach, where that is
            less than the target's; the head runs on beyond them.
    """

    method: Method
    config: HeadConfig
    weights: LazyWeights
    name: str
    weights_hash: str
    source_bytes: int
    layout: str
    conventions: tuple[str, ...] = ()
    recorded_acceptance: float | None = None
    trained_positions: int | None = None

    @property
    def vocabulary_coverage(self) -> float:
        """The share of the target's vocabulary that the head can propose."""
        config = self.config
        whole = config.vocab_size if isinstance(config, MedusaConfig) else config.layers.vocab_size
        return config.draft_vocab_size / whole


def loaded_head(
    source: HeadSource,
    *,
    method: Method,
    config: HeadConfig,
    weights: LazyWeights,
    layout: str,
    conventions: Sequence[str],
    recorded_acceptance: float | None = None,
    trained_positions: int | None = None,
) -> LoadedHead:
    """A head that has files of its own."""
    try:
        source_bytes = sum(file.stat().st_size for file in source.files)
        weights_hash = joint_sha256(source.hashed_files, cache_root())
    except BaseException:
        weights.close()
        raise
    return LoadedHead(
        method=method,
        config=config,
        weights=weights,
        name=display_name(source.path),
        weights_hash=weights_hash,
        source_bytes=source_bytes,
        layout=layout,
        conventions=tuple(conventions),
        recorded_acceptance=recorded_acceptance,
        trained_positions=trained_positions,
    )
