"""Safetensors files: which tensors they hold, in what shape and type, and each one when it is read.

Owns the format, reading and writing, and its damage; what a tensor is for, its reader knows
(:mod:`~outrider.models.loading.huggingface` for models, :mod:`~outrider.models.loading.heads` for
draft heads, :mod:`outrider.training.store` for checkpoints and features).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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

    def read_rows(self, start: int, stop: int, columns: slice = slice(None)) -> Tensor:
        """Rows ``start .. stop`` of a matrix, all columns or a range; nothing else is read.

        Raises:
            CheckpointError: the file is damaged or was closed.
        """
        try:
            return self.file.get_slice(self.name)[start:stop, columns]
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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of any device and layout to one new file.

    Raises:
        OSError: the system's own reason, such as ``ENOSPC``.
    """
    taken: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        # The format refuses tensors that share memory, as rows of one table or tied weights do.
        ready[name] = plain.clone() if storage in taken else plain
        taken.add(storage)
    try:
        save_file(ready, path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        code = int(found.group(1)) if found else 0
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:200]
    return CheckpointError(f"{path}: not a sound safetensors file: {reason}; fetch it again")
