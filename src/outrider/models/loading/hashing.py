"""SHA-256 of large files, remembered while a file's size and time of change stay the same.

A memory of a hash is a small JSON file in the user cache. It only saves time: when it cannot be
read or written, the file is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from outrider.errors import CheckpointError

_CHUNK = 2**22
_WORTH_REMEMBERING = 2**23  # bytes; less is hashed in a few milliseconds


def file_sha256(path: Path, cache: Path) -> str:
    """SHA-256 of ``path`` in hex, from the memory under ``cache`` where it is still valid.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = path.resolve()
    try:
        state = path.stat()
        if state.st_size < _WORTH_REMEMBERING:
            return _hash(path)
        facts = {"path": str(path), "size": state.st_size, "mtime_ns": state.st_mtime_ns}
        memory = cache / "hashes" / (hashlib.sha256(bytes(path)).hexdigest()[:32] + ".json")
        known = _recall(memory)
        if all(known.get(key) == value for key, value in facts.items()):
            return known["sha256"]
        digest = _hash(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    with suppress(OSError):
        _remember(memory, {**facts, "sha256": digest})
    return digest


def joint_sha256(files: Iterable[Path], cache: Path) -> str:
    """One SHA-256 in hex over the names and hashes of several files.

    Raises:
        CheckpointError: a file cannot be read.
    """
    lines = [f"{file.name} {file_sha256(file, cache)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def _recall(memory: Path) -> dict:
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        return {}
    sound = isinstance(known, dict) and isinstance(known.get("sha256"), str)
    return known if sound else {}


def _remember(memory: Path, facts: dict) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=memory.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(facts, file)
        Path(temporary).replace(memory)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
