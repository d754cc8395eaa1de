"""Opening a draft head's files: what is there, and what is refused before it is looked into.

Owns the choice of files. A folder may hold its weights under any single name (MEDUSA's are
``medusa_lm_head.safetensors``); pickles and GGUF files are never opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.errors import (
    CheckpointError,
    UnknownModelError,
    UnsafeFileError,
    UnsupportedModelError,
)
from outrider.models.heads.config import Shapes
from outrider.models.loading.fields import Fields, read_json
from outrider.models.loading.safetensors_file import StoredTensor, open_tensors
from outrider.models.loading.weight_files import PICKLES, weight_files
from outrider.models.loading.weights import LazyWeights, check_weights

_STANDARD = ("model.safetensors", "model.safetensors.index.json")

Readers = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class HeadSource:
    """An opened head: its tensors by the file's names, nothing read but headers.

    ``path`` is what the user named; ``fields`` is config.json, empty where there is none.
    """

    path: Path
    files: tuple[Path, ...]
    fields: Fields
    has_config: bool
    tensors: Mapping[str, StoredTensor]
    opened: ExitStack

    @classmethod
    def open(cls, path: Path) -> HeadSource:
        """Open a folder or a ``.safetensors`` file in one.

        Raises:
            UnknownModelError: there is no such path.
            UnsafeFileError: the weights are a pickle; it is not opened.
            UnsupportedModelError: a GGUF file.
            CheckpointError: no weights, or damaged ones.
        """
        folder, files = _files(path)
        config = folder / "config.json"
        has_config = config.is_file()
        fields = Fields(config, read_json(config) if has_config else {})
        with ExitStack() as opened:
            tensors = open_tensors(files, opened)
            return cls(path, tuple(files), fields, has_config, tensors, opened.pop_all())
        raise AssertionError("unreachable: the stack swallows no exception")

    @property
    def hashed_files(self) -> list[Path]:
        """The files that make the head what it is."""
        return [self.fields.path] * self.has_config + list(self.files)

    def require_config(self) -> Fields:
        """config.json, for the layouts that cannot be read without it."""
        if not self.has_config:
            raise CheckpointError(
                f"{self.fields.path}: missing; the head's layout needs it beside the weights"
            )
        return self.fields

    def lazy_weights(
        self,
        needed: Shapes,
        found: Mapping[str, StoredTensor],
        *,
        unexpected: Iterable[str],
        readers: Readers,
    ) -> LazyWeights:
        """The tensors ``found`` under our names, all of them checked, none of them read.

        Args:
            needed: the head's weights.
            found: the file's tensors under our names.
            unexpected: the file's names of tensors that have no place.
            readers: of those that are changed while they are read.

        Raises:
            CheckpointError: names every missing, unexpected and wrongly shaped tensor.
            UnsupportedModelError: a tensor of another type than F32, F16 or BF16.
        """
        shapes = {name: tensor.shape for name, tensor in found.items()}
        source = "config.json and the target"
        check_weights(needed, shapes, self.path, unexpected=unexpected, source=source)
        for name, tensor in found.items():
            if name != "d2t":
                tensor.require_kind()
        plain = {name: tensor.read for name, tensor in found.items()}
        return LazyWeights(self.path, {**plain, **readers}, self.opened.close)


def _files(path: Path) -> tuple[Path, list[Path]]:
    """The folder and the safetensors files in it that ``path`` stands for."""
    if path.is_dir():
        return path, _files_in(path)
    if not path.exists():
        raise UnknownModelError(f"no such folder or file: {path}")
    _refuse(path)
    if path.suffix.lower() != ".safetensors":
        raise CheckpointError(f"{path}: not a draft head; allowed: .safetensors or a folder")
    return path.parent, [path]


def _files_in(folder: Path) -> list[Path]:
    if any((folder / name).is_file() for name in _STANDARD):
        return weight_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(file.name for file in found[:8])
        raise CheckpointError(f"{folder}: several weight files; name one of them: {names}")
    for file in sorted(folder.iterdir()):
        _refuse(file)
    raise CheckpointError(f"{folder}: no weights; allowed: {', '.join(_STANDARD)} with its shards")


def _refuse(file: Path) -> None:
    suffix = file.suffix.lower()
    if suffix in PICKLES:
        raise UnsafeFileError(
            f"{file}: a pickle, which can run code when opened; where its origin is trusted, "
            f"convert it once: safetensors.torch.save_file(torch.load({file.name!r}, "
            "weights_only=True), 'model.safetensors')"
        )
    if suffix == ".gguf":
        raise UnsupportedModelError(
            f"{file}: draft heads are read from safetensors only; use the head's original files"
        )
