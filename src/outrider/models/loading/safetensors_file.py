"""Safetensors files: which tensors they hold, in what shape and type, and each one when it is read.

Owns the format and its damage; what a tensor is for, its reader knows
(:mod:`~outrider.models.loading.huggingface` for models, :mod:`~outrider.models.loading.heads` for
draft heads).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import CheckpointError, UnsupportedModelError

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of one element


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of an open file; ``kind`` is the format's name of its element type."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    file: Any

    @property
    def num_bytes(self) -> int:
        """What it takes on disk; only of the types in ``FLOATS``."""
        return prod(self.shape) * FLOATS[self.kind]

    def require_kind(self, allowed: Iterable[str] = FLOATS) -> None:
        """Check the element type before anything is read.

        Raises:
            UnsupportedModelError: stored in another type than ``allowed``.
        """
        if self.kind not in allowed:
            raise UnsupportedModelError(
                f"{self.path}: tensor {self.name} is stored as {self.kind}; supported: "
                f"{', '.join(allowed)}"
            )

    def read(self) -> Tensor:
        """The tensor, which may share memory with the mapped file.

        Raises:
            CheckpointError: the file is damaged or was closed.
        """
        try:
            return self.file.get_tensor(self.name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(self.path, error) from None


def open_tensors(files: Iterable[Path], opened: ExitStack) -> dict[str, StoredTensor]:
    """Open the files and list their tensors by name; reads headers only.

    Args:
        files: one file, or the shards of one checkpoint.
        opened: closes the files.

    Raises:
        CheckpointError: a damaged file, or one tensor in two files.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            file: Any = opened.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                view = file.get_slice(name)
                shape, kind = tuple(view.get_shape()), view.get_dtype()
                if name in tensors:
                    raise CheckpointError(f"{path}: tensor {name} is in an earlier file too")
                tensors[name] = StoredTensor(path, name, shape, kind, file)
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(path, error) from None
    return tensors


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:200]
    return CheckpointError(f"{path}: not a sound safetensors file: {reason}; fetch it again")
