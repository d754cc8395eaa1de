"""Turning a draft head of one layout into another, for another engine.

Owns what ``outrider convert`` does and reports: the head is read, checked against its target, and
written again; weights keep their type and every bit. Output rows that the head has from its target
are put in where other engines would miss them. Stands between :mod:`outrider.cli` and
:mod:`outrider.models.loading.heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from outrider.commands.console import format_bytes, table
from outrider.errors import ParameterError
from outrider.models.heads.config import Eagle3Config
from outrider.models.loading import LoadedCheckpoint, load
from outrider.models.loading.heads import LoadedHead, completed, load_head, write_eagle3
from outrider.models.loading.hub import resolve
from outrider.types import ProgressCallback


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was converted; ``conventions`` are sentences about what differs between layouts."""

    head: str
    target: str
    source_layout: str
    layout: str
    folder: str
    num_bytes: int
    conventions: tuple[str, ...]
    recorded_acceptance: float | None

    def to_json(self) -> dict[str, Any]:
        """All facts as plain values."""
        return asdict(self)

    def table(self) -> Table:
        """The same facts for people."""
        acceptance = self.recorded_acceptance
        return table(
            ("", ""),
            [
                ("head", self.head),
                ("for", self.target),
                ("layout", f"{self.source_layout} -> {self.layout}"),
                ("written to", f"{self.folder} ({format_bytes(self.num_bytes)})"),
                *(("found", sentence) for sentence in self.conventions),
                (
                    "acceptance length",
                    "not recorded" if acceptance is None else f"{acceptance:.2f}",
                ),
            ],
            numbers_from=2,
        )


def convert(
    head: Path,
    model: str,
    layout: str,
    out: Path,
    *,
    on_progress: ProgressCallback | None = None,
) -> Conversion:
    """Write the EAGLE-3 head at ``head`` to the new folder ``out`` in ``layout``.

    Args:
        head: a folder or ``.safetensors`` file in any layout that we read.
        model: the head's target; a name, folder or file.
        layout: ``safeailab`` or ``speculators``.
        out: must not exist, or be empty.
        on_progress: called with what is being done.

    Raises:
        ParameterError: another kind of head, no such layout, ``out`` is in use, or the layout
            cannot express the head.
        CheckpointError: the head or the model is damaged, or they do not fit together.
        UnknownModelError: no such head or model.
    """
    target = load(resolve(model), on_progress=on_progress)
    try:
        loaded = load_head(head, target.config, on_progress=on_progress)
        try:
            config, weights = _for_layout(loaded, layout, target)
            write_eagle3(
                config,
                weights,
                out,
                layout=layout,
                target_name=target.name,
                target=target.config,
                recorded_acceptance=loaded.recorded_acceptance,
            )
        finally:
            loaded.weights.close()
    finally:
        target.weights.close()
    return Conversion(
        head=loaded.name,
        target=target.name,
        source_layout=loaded.layout,
        layout=layout,
        folder=str(out),
        num_bytes=sum(file.stat().st_size for file in Path(out).iterdir()),
        conventions=loaded.conventions,
        recorded_acceptance=loaded.recorded_acceptance,
    )


def _for_layout(
    head: LoadedHead, layout: str, target: LoadedCheckpoint
) -> tuple[Eagle3Config, Mapping[str, Tensor]]:
    """What is to be written: an output head that ``layout`` has no words to share is put in."""
    config, weights = head.config, head.weights
    if not isinstance(config, Eagle3Config):
        raise ParameterError(
            f"{head.name}: a {head.layout} head; only EAGLE-3 heads have several layouts"
        )
    if config.has_own_head or not (config.is_reduced or layout == "safeailab"):
        return config, weights
    config, weights = completed(
        config, weights, target.config, target.weights, with_embedding=False
    )
    assert isinstance(config, Eagle3Config), "completing changes no kind"
    return config, weights
