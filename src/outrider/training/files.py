"""Single files of a data or run folder: written whole or not at all, and what is said if not.

Owns the words for a full disk and for a damaged record. Used by every stage that keeps a file of
its own; whole folders are :mod:`outrider.training.store`'s.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import CapacityError, CheckpointError
from outrider.models.loading.cache import publish


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what is wrong when ``path`` cannot be written.

    Raises:
        CapacityError: the disk or the quota is full.
        CheckpointError: it cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"{path}: {reason}; what was saved before is untouched: make room, then run the "
                "same command again"
            ) from None
        raise CheckpointError(f"{path}: cannot be written: {reason}") from None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document that appears under its name complete.

    Raises:
        CapacityError, CheckpointError: as :func:`writing`.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        publish(partial, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object that a file holds; None where there is no file.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: damaged: it is not JSON") from None
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{path}: damaged: a JSON {type(document).__name__} where an object is kept"
        )
    return document
