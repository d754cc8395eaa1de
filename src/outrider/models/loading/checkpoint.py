"""Opening a checkpoint: whatever its format, one :class:`LoadedCheckpoint`.

Owns the choice of the reader and the check that config, weights and tokenizer fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError, UnknownModelError, UnsafeFileError
from outrider.models.architecture import DecoderConfig
from outrider.models.loading import gguf_model, gguf_tokenizer, hf_tokenizer, huggingface
from outrider.models.loading.cache import cache_root
from outrider.models.loading.gguf_file import MAGIC, GGUFFile
from outrider.models.loading.hashing import file_sha256, joint_sha256
from outrider.models.loading.hf_config import parse_config
from outrider.models.loading.hub import display_name
from outrider.models.loading.tokenizer import Tokenizer
from outrider.models.loading.weight_files import PICKLES, weight_files
from outrider.models.loading.weights import LazyWeights


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint whose parts fit together; the weights are read on access.

    ``weights_hash`` is SHA-256 in hex: of a GGUF file its own, of a folder one over config.json and
    the weight files. ``source_bytes`` is what the weights take on disk.
    """

    config: DecoderConfig
    weights: LazyWeights
    tokenizer: Tokenizer
    name: str
    weights_hash: str
    source_bytes: int


def load(
    path: Path, *, on_progress: Callable[[str, float | None], None] | None = None
) -> LoadedCheckpoint:
    """Open a checkpoint and check that config, weights and tokenizer are sound and complete.

    Args:
        path: a Hugging Face folder, a ``.safetensors`` file in one, a ``.gguf`` file, or a folder
            that holds nothing but one of those. See :func:`resolve` for names.
        on_progress: called with a message and None.

    Raises:
        UnknownModelError: there is no such path.
        UnsafeFileError: the weights are a pickle; it is not opened.
        UnsupportedModelError: an architecture, tensor type or tokenizer that is not ours.
        CheckpointError: anything that is damaged, missing or contradictory, by name.
    """
    path = Path(path)
    if on_progress is not None:
        on_progress(f"reading {display_name(path)}", None)
    if path.is_dir():
        if not (path / "config.json").is_file() and (inner := _only_gguf(path)):
            return _load_gguf(inner)
        return _load_folder(path, weight_files(path))
    if not path.exists():
        raise UnknownModelError(f"no such folder or file: {path}")
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        raise UnsafeFileError(
            f"{path}: a pickle, which can run code when opened; convert it to safetensors first"
        )
    if suffix == ".safetensors":
        return _load_folder(path.parent, [path])
    if suffix == ".gguf" or _starts_as_gguf(path):
        return _load_gguf(path)
    raise CheckpointError(f"{path}: not a model file; allowed: .gguf, .safetensors or a folder")


def _load_folder(folder: Path, files: list[Path]) -> LoadedCheckpoint:
    fields = huggingface.read_config_fields(folder)
    config = parse_config(fields)
    weights = huggingface.open_weights(files, config, folder)
    try:
        backend, parts = hf_tokenizer.from_folder(folder, fields.values(), config.vocab_size)
        return LoadedCheckpoint(
            config=config,
            weights=weights,
            tokenizer=Tokenizer(backend, parts),
            name=display_name(folder),
            weights_hash=joint_sha256([folder / "config.json", *files], cache_root()),
            source_bytes=sum(file.stat().st_size for file in files),
        )
    except BaseException:
        weights.close()
        raise


def _load_gguf(path: Path) -> LoadedCheckpoint:
    file = GGUFFile.open(path)
    try:
        config = gguf_model.read_config(file)
        weights = gguf_model.open_weights(file, config)
        backend, parts = gguf_tokenizer.from_gguf(file, config.vocab_size)
        return LoadedCheckpoint(
            config=config,
            weights=weights,
            tokenizer=Tokenizer(backend, parts),
            name=display_name(path),
            weights_hash=file_sha256(path, cache_root()),
            source_bytes=path.stat().st_size,
        )
    except BaseException:
        file.close()
        raise


def _only_gguf(folder: Path) -> Path | None:
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise CheckpointError(f"{folder}: several GGUF files; name one of them: {names}")
    return files[0] if files else None


def _starts_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
