"""The draft heads that come with Outrider: which of them were made for a given target.

Owns ``assets/heads/<model>/<method>/``, folders as ``outrider train`` exports them, each with its
``manifest.json``. A head belongs to the target whose weights and tokeniser its manifest names; what
the folders are called, or where the target lies, decides nothing. :mod:`outrider.pairing` takes one
where a method needs a head and none was named; ``inspect`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from outrider.config import METHODS_WITH_HEAD, Method
from outrider.models.loading.fields import Fields, read_json

MANIFEST = "manifest.json"
_ASSETS = "assets/heads"
_ALL = "all"  # categories together, among those that acceptance was measured by


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedHead:
    """A head in the package, as its manifest describes it; nothing of its weights was read.

    Attributes:
        method: which drafter runs it.
        path: its folder.
        size_bytes: what it takes on disk.
        recorded_acceptance: acceptance length of its greedy chain, which the self-check expects.
        acceptance_lengths: setting -> temperature -> acceptance length, all categories together.
    """

    method: Method
    path: Path
    size_bytes: int
    recorded_acceptance: float | None
    acceptance_lengths: Mapping[str, Mapping[str, float]]


def assets_root() -> Path:
    """Where the package keeps heads; need not exist."""
    return Path(str(resources.files("outrider"))) / _ASSETS


def shipped_heads(weights_hash: str, tokenizer: str) -> list[ShippedHead]:
    """The heads made for the target with this weights hash and tokeniser fingerprint, by method.

    Raises:
        CheckpointError: a manifest in the package is damaged.
    """
    found = []
    for manifest in sorted(assets_root().glob(f"*/*/{MANIFEST}")):
        meta = Fields(manifest, read_json(manifest)).sub("meta")
        target = meta.sub("target")
        named = target.text("weights_hash", ""), target.text("tokenizer", "")
        if named == (weights_hash, tokenizer):
            found.append(_described(meta, manifest.parent))
    return sorted(found, key=lambda head: list(Method).index(head.method))


def shipped_head(method: Method, weights_hash: str, tokenizer: str) -> ShippedHead | None:
    """The head of this method for that target, if one ships.

    Raises:
        CheckpointError: a manifest in the package is damaged.
    """
    heads = shipped_heads(weights_hash, tokenizer)
    return next((head for head in heads if head.method is method), None)


def _described(meta: Fields, folder: Path) -> ShippedHead:
    method = meta.text("method")
    if method not in METHODS_WITH_HEAD:
        allowed = ", ".join(METHODS_WITH_HEAD)
        raise meta.error("method", f"is {method!r}; allowed: {allowed}")
    return ShippedHead(
        method=Method(method),
        path=folder,
        size_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        recorded_acceptance=meta.positive("acceptance", None),
        acceptance_lengths=_acceptance_lengths(meta.sub("training").sub("acceptance_length")),
    )


def _acceptance_lengths(by_setting: Fields) -> Mapping[str, Mapping[str, float]]:
    """What was measured, without the single categories."""
    lengths: dict[str, Mapping[str, float]] = {}
    for setting in by_setting.values():
        temperatures = by_setting.sub(setting)
        found = {t: temperatures.sub(t).positive(_ALL, None) for t in temperatures.values()}
        lengths[setting] = MappingProxyType({t: tau for t, tau in found.items() if tau is not None})
    return MappingProxyType(lengths)
