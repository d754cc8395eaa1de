"""The folder that a head or a draft model is written to: it appears whole, or not at all.

Owns what such a folder consists of, and the order of writing: everything into a temporary folder
beside the final one, flushed to the disk, then one rename. What the files say is the business of
the modules beside this one; :mod:`outrider.training.export` writes them with a manifest.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import CheckpointError, ParameterError
from outrider.models.heads.config import Shapes
from outrider.models.loading.safetensors_file import write_tensors
from outrider.models.loading.weights import check_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFiles:
    """What a head's folder holds: ``config.json``, its weights, and ``others`` by name."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    weights_name: str = "model.safetensors"
    others: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What the weights take on disk."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def contents(self) -> dict[str, bytes | Callable[[Path], None]]:
        """What is in each file, or what writes it to the path it is given."""
        return {
            **self.others,
            self.weights_name: partial(write_tensors, tensors=self.tensors),
            "config.json": (json.dumps(self.config, indent=2) + "\n").encode(),
        }


def check_new(folder: Path) -> None:
    """Refuse a folder that something is in.

    Raises:
        ParameterError: it is in use.
        CheckpointError: it cannot be looked into.
    """
    try:
        is_in_use = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise _not_written(folder, error) from None
    if is_in_use:
        raise ParameterError(f"{folder}: exists and is not an empty folder; name a new one")


def check_fit(needed: Shapes, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Compare weights that are to be written with what their config says.

    Raises:
        CheckpointError: names every missing, unexpected and wrongly shaped weight.
    """
    shapes = {name: tuple(weights[name].shape) for name in weights}
    check_weights(needed, shapes, folder, source="head's config")


def write_folder(folder: Path, files: HeadFiles) -> None:
    """Write them into a new folder.

    Raises:
        ParameterError: ``folder`` is in use.
        CheckpointError: it cannot be written; nothing is left behind.
    """
    check_new(folder)
    unfinished = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    try:
        unfinished.mkdir(parents=True)
        for name, content in files.contents().items():
            if isinstance(content, bytes):
                (unfinished / name).write_bytes(content)
            else:
                content(unfinished / name)
        for path in (*unfinished.iterdir(), unfinished):
            _flush(path)
        if folder.is_dir():
            folder.rmdir()
        unfinished.rename(folder)
        _flush(folder.parent)
    except OSError as error:
        raise _not_written(folder, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _not_written(folder: Path, error: OSError) -> CheckpointError:
    """What to say when the system refuses."""
    return CheckpointError(f"{folder}: cannot be written: {error.strerror or error}")


def _flush(path: Path) -> None:
    """Onto the disk: a rename may otherwise outlive a crash that the content does not."""
    if os.name != "posix" and path.is_dir():  # elsewhere a folder cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
