"""Atomic folders: checkpoints and feature shards that are there whole, or not at all.

Owns how a folder gets to disk, how damage is found again, and how a training state becomes tensors
and JSON (no pickle). The trainer's loop and :mod:`~outrider.training.features` write through it::

    .step-0200.3f9a10c2.partial/      a name of its own, beside the final one
        tensors.safetensors           each file written and synced
        state.json
        manifest.json                 last: sizes and SHA-256 of the others, sealed by its own
    -> synced, renamed to step-0200/, parent synced

A kill at any moment leaves the older folder, the new one, or both; what it leaves besides, the
next process that takes the parent's lock (:func:`sole_writer`) removes. That is safe because only
the lock's holder writes there: a partial folder that it finds has no writer any more.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from outrider.errors import CapacityError, CheckpointError, OutriderError, ParameterError
from outrider.models.loading.cache import exclusive
from outrider.models.loading.safetensors_file import open_tensors, write_tensors

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STATE = "state.json"

Content: TypeAlias = bytes | Callable[[Path], None]
SkipCallback: TypeAlias = Callable[[Path, str], None]

_LOCK, _OWNER = ".lock", ".lock-owner"
_PARTIAL, _RETIRED = ".partial", ".retired"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder says of itself: free-form ``meta``, and (size, SHA-256) of each file."""

    meta: dict[str, Any]
    files: dict[str, tuple[int, str]]


# --- writing -------------------------------------------------------------------------------------


def write_folder(
    final: Path, files: Mapping[str, Content], meta: Mapping[str, Any], *, num_bytes: int = 0
) -> None:
    """Write a folder that appears under its name complete and on disk, or not at all.

    A folder of that name is replaced, and comes back if the process dies in between.

    Args:
        final: where it shall be; its parent is made.
        files: the content of each file, or what writes it to the path it is given.
        meta: goes into the manifest; must be JSON.
        num_bytes: what the callables will write, as far as known: checked against the free space
            before anything is written, and named when the disk is full.

    Raises:
        CapacityError: the disk or the quota is full; nothing of the folder stays.
        CheckpointError: it cannot be written for another reason.
    """
    token = secrets.token_hex(4)
    partial = final.parent / f".{final.name}.{token}{_PARTIAL}"
    needed = num_bytes + sum(len(data) for data in files.values() if isinstance(data, bytes))
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(final.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        partial.mkdir()
        written = {name: _write_file(partial / name, data) for name, data in files.items()}
        _write_file(partial / MANIFEST, _manifest_bytes(dict(meta), written))
        _sync_folder(partial)
        _put_in_place(partial, final, final.parent / f".{final.name}.{token}{_RETIRED}")
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # before the free space is looked up
        raise _not_written(final, error, needed) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def prune(parent: Path, pattern: str, *, keep: int, current: Path) -> None:
    """Keep ``current``, just written, and the ``keep - 1`` newest before it; remove the others.

    Those named as newer than ``current`` go too: a run that resumed from an older folder passed
    them by because they were damaged.
    """
    folders = _newest_first(parent, pattern)
    older = folders[folders.index(current) + 1 :]
    kept = {current, *older[: max(0, keep - 1)]}
    for folder in folders:
        if folder not in kept:
            # Renamed first: a kill half-way must not leave something that looks like damage.
            doomed = parent / f".{folder.name}.{secrets.token_hex(4)}{_PARTIAL}"
            with suppress(OSError):
                folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes to ``folder`` and the folders in it.

    The system lets go of the lock when its holder dies, however it dies. What interrupted writes
    left there is removed first.

    Raises:
        ParameterError: another process holds the lock.
        CheckpointError: the folder cannot be written to.
    """
    owner = folder / _OWNER

    def refuse() -> None:
        try:
            who = f"process {int(owner.read_text(encoding='ascii'))}"
        except (OSError, ValueError):
            who = "another process"
        raise ParameterError(
            f"{folder} is being written by {who}; wait for it, end it, or choose another folder"
        )

    with ExitStack() as held:
        try:
            held.enter_context(exclusive(folder / _LOCK, refuse))
            owner.write_text(str(os.getpid()), encoding="ascii")
            _remove_leftovers(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: cannot be written: {error.strerror or error}"
            ) from None
        held.callback(owner.unlink, missing_ok=True)
        yield


def _write_file(path: Path, content: Content) -> tuple[int, str]:
    """Write and sync one file; its size and SHA-256 as they were read back."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return os.fstat(file.fileno()).st_size, digest


def _put_in_place(partial: Path, final: Path, retired: Path) -> None:
    replaces = final.exists()
    if replaces:
        final.rename(retired)
    try:
        partial.rename(final)
    except OSError:
        if replaces:
            retired.rename(final)
        raise
    _sync_folder(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened to be synced
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(folder: Path) -> None:
    """Remove what interrupted writes left in ``folder`` and the folders in it."""
    for pattern in (f".*{_RETIRED}", f"*/.*{_RETIRED}"):
        for retired in folder.glob(pattern):
            final = retired.with_name(retired.name[1:].rsplit(".", 2)[0])
            if final.exists():
                shutil.rmtree(retired, ignore_errors=True)
            else:  # its successor never came into place
                retired.rename(final)
    for pattern in (f".*{_PARTIAL}", f"*/.*{_PARTIAL}"):
        for partial in folder.glob(pattern):
            shutil.rmtree(partial, ignore_errors=True)


def _not_written(final: Path, error: OSError, needed: int) -> OutriderError:
    reason = error.strerror or str(error)
    if error.errno not in _FULL:
        return CheckpointError(f"{final}: cannot be written: {reason}")
    try:
        free = f"{shutil.disk_usage(final.parent).free:,} bytes are free"
    except OSError:
        free = "how much is free cannot be told"
    return CapacityError(
        f"{final}: {reason}: about {needed:,} bytes are needed, {free}; nothing of it was kept and "
        "what was saved before is untouched: make room or choose another folder, then run the same "
        "command again"
    )


# --- reading -------------------------------------------------------------------------------------


def verify_folder(folder: Path, *, hashes: bool = True) -> Manifest:
    """Check a folder against its manifest; ``hashes=False`` looks at names and sizes only.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    manifest = _read_manifest(folder / MANIFEST)
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise CheckpointError(f"{path}: {found:,} bytes, but {size:,} were written")
            if hashes:
                with path.open("rb") as file:
                    is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest
                if not is_same:
                    raise CheckpointError(
                        f"{path}: damaged: its SHA-256 is not the one in {MANIFEST}"
                    )
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing, though {MANIFEST} lists it") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return manifest


def latest_valid(
    parent: Path, pattern: str, on_skip: SkipCallback | None = None
) -> tuple[Path, Manifest] | None:
    """The newest sound folder and its manifest, or None; newest by the numbers in the names.

    ``on_skip`` is told of each newer one that is not sound, and why.
    """
    for folder in _newest_first(parent, pattern):
        try:
            return folder, verify_folder(folder)
        except CheckpointError as error:
            if on_skip is not None:
                on_skip(folder, str(error))
    return None


def _newest_first(parent: Path, pattern: str) -> list[Path]:
    folders = [path for path in parent.glob(pattern) if path.is_dir() and path.name[0] != "."]
    return sorted(folders, key=lambda path: _natural(path.name), reverse=True)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``step-90`` before ``step-100``."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _manifest_bytes(meta: dict[str, Any], files: Mapping[str, tuple[int, str]]) -> bytes:
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "meta": meta,
        "files": {name: {"size": size, "sha256": sha} for name, (size, sha) in files.items()},
    }
    return _json_bytes(content | {"seal": hashlib.sha256(_json_bytes(content)).hexdigest()})


def _read_manifest(path: Path) -> Manifest:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing: the folder was not written to its end") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        content = json.loads(data)
        version, seal = int(content["schema_version"]), content.pop("seal")
        if version > SCHEMA_VERSION:
            raise CheckpointError(
                f"{path}: written by a newer version (schema {version}, known up to "
                f"{SCHEMA_VERSION}); update outrider"
            )
        is_sealed = data == _json_bytes(content | {"seal": seal})
        if is_sealed and seal == hashlib.sha256(_json_bytes(content)).hexdigest():
            files = content["files"].items()
            return Manifest(content["meta"], {n: (f["size"], f["sha256"]) for n, f in files})
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path}: damaged: its content is not what was written")


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


# --- states --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedState:
    """What :func:`save_state` was given, bit for bit, on the CPU."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]


def save_state(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Write a training state as one atomic folder.

    Args:
        folder: where it shall be.
        tensors: the weights, by name.
        state: all else: any nesting of dicts, lists, tuples, numbers, strings, None and tensors,
            such as ``optimizer.state_dict()``, :func:`random_state` and the data position.
        meta: for the manifest, readable without the tensors.

    Raises:
        CapacityError, CheckpointError: as :func:`write_folder`.
    """
    stored = {f"weights/{name}": tensor for name, tensor in tensors.items()}
    content = {"state": _encode(dict(state), stored, "state")}
    files: dict[str, Content] = {
        TENSORS: lambda path: write_tensors(path, stored),
        STATE: _json_bytes(content),
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    write_folder(folder, files, meta or {}, num_bytes=size)


def load_state(folder: Path) -> SavedState:
    """Verify and read what :func:`save_state` wrote.

    Raises:
        CheckpointError: damaged, incomplete, or not such a folder.
    """
    manifest = verify_folder(folder)
    if not {TENSORS, STATE} <= set(manifest.files):
        raise CheckpointError(f"{folder}: not a training state: {TENSORS} or {STATE} is not listed")
    with ExitStack() as opened:
        files = open_tensors([folder / TENSORS], opened)
        # Copies: the file may be pruned, and what is mapped from it must not be trained in place.
        stored = {name: tensor.read().clone() for name, tensor in files.items()}
    state = _decode(json.loads((folder / STATE).read_bytes())["state"], stored)
    at = "weights/"
    tensors = {name.removeprefix(at): t for name, t in stored.items() if name.startswith(at)}
    return SavedState(tensors, state, manifest.meta)


def random_state() -> dict[str, Any]:
    """The states of Python's and torch's generators, for :func:`save_state`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continue the generators where :func:`random_state` saw them; GPUs as far as there are any."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved, device)


def _encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """JSON from which :func:`_decode` makes the same again; tensors move to ``tensors``.

    A JSON object always is one of ours: JSON has neither tuples nor whole numbers as keys.
    """
    if isinstance(value, Tensor):
        assert name not in tensors, f"two tensors named {name}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        pairs = [[key, _encode(value[key], tensors, f"{name}/{key}")] for key in value]
        return {"items": pairs}
    if isinstance(value, list | tuple):
        parts = [_encode(part, tensors, f"{name}/{i}") for i, part in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    assert value is None or isinstance(value, bool | int | float | str), f"{name}: {type(value)}"
    return value


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_decode(part, tensors) for part in value["tuple"])
    return {key: _decode(part, tensors) for key, part in value["items"]}
