"""Which target a data folder belongs to.

Owns the record in the folder and the refusal of another target. Responses and features are worth
nothing for another model, precision or tokenizer, and nothing in their numbers would show it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from outrider.errors import CheckpointError
from outrider.models.loading import LoadedCheckpoint
from outrider.training.files import read_json, write_json

IDENTITY = "target.json"


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What makes data the data of one target: none of these may change between two stages."""

    weights_hash: str
    tokenizer: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: LoadedCheckpoint, dtype: torch.dtype) -> TargetIdentity:
        """The identity of a loaded checkpoint that computes in ``dtype``."""
        config = checkpoint.config
        return cls(
            weights_hash=checkpoint.weights_hash,
            tokenizer=checkpoint.tokenizer.fingerprint,
            dtype=f"{dtype}".removeprefix("torch."),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
        )

    def claim(self, folder: Path) -> None:
        """Record the target in a data folder, or compare with the one recorded there.

        Raises:
            CheckpointError: the data is another target's, or the record cannot be read or written.
            CapacityError: the disk is full.
        """
        recorded = read_json(folder / IDENTITY)
        if recorded is None:
            write_json(folder / IDENTITY, asdict(self))
        else:
            self.require_same(recorded, folder)

    def require_same(self, recorded: dict[str, Any], where: Path) -> None:
        """Refuse data that was made with another target.

        Raises:
            CheckpointError: names every property that differs.
        """
        names = [field.name for field in fields(self)]
        pairs = [(name, recorded.get(name), getattr(self, name)) for name in names]
        changed = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
        if changed:
            raise CheckpointError(
                f"{where}: made with another target: {'; '.join(changed)}; use that target again, "
                "or another data folder for this one"
            )
