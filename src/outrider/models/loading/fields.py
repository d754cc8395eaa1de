"""Checked access to what a checkpoint's metadata says: every value has a type and a range.

Used on ``config.json`` and on GGUF metadata alike, so that a missing, mistyped or absurd field is
an error that names the file and the field, and nothing below has to check again. The bounds lie far
above any published model; they keep a flipped bit from turning into a huge allocation.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError

MAX_JSON_BYTES = 256 * 2**20
MAX_VOCAB = 2**24
MAX_WIDTH = 2**22
MAX_LAYERS = 2**11
MAX_HEADS = 2**14
MAX_POSITION = 2**31 - 1
_REQUIRED: Any = object()


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """A UTF-8 text file.

    Raises:
        CheckpointError: missing, unreadable, larger than ``limit`` bytes, or not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes are too many (at most {limit})")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text; fetch the checkpoint again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is an object.

    Raises:
        CheckpointError: missing, unreadable, not JSON, or something other than an object.
    """
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content


@contextmanager
def at_path(path: Path) -> Iterator[None]:
    """Put the file's name before a checkpoint error that does not know it."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


class Fields:
    """Typed, bounded look-ups in one metadata object; every failure names file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(self._prefix + name) is not None

    def states(self, name: str) -> bool:
        """Whether the field is written down at all, if only as null."""
        return self._prefix + name in self._values

    def error(self, name: str, what: str) -> CheckpointError:
        """The error for a bad ``name``; ``what`` continues the sentence."""
        return CheckpointError(f"{self.path}: {self._prefix}{name} {what}")

    def raw(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value as it stands; null counts as absent."""
        value = self._values.get(self._prefix + name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(name, "is missing")
        return default

    def whole(self, name: str, low: int, high: int, default: Any = _REQUIRED) -> Any:
        """An integer in ``low..high``; an absent one gives ``default`` unchecked."""
        value = self.raw(name, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            allowed = f"a whole number from {low} to {high}"
            raise self.error(name, f"is {reprlib.repr(value)}; allowed: {allowed}")
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> Any:
        """A finite number above zero; an absent one gives ``default`` unchecked."""
        value = self.raw(name, default)
        if value is default:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < 1e15 or not math.isfinite(value):
            raise self.error(name, f"is {reprlib.repr(value)}; allowed: a number above 0")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """True or false."""
        value = self.raw(name, default)
        if value is not default and not isinstance(value, bool):
            raise self.error(name, f"is {reprlib.repr(value)}; allowed: true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        value = self.raw(name, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, f"is {reprlib.repr(value)}; allowed: a string")
        return value

    def sub(self, name: str) -> Fields:
        """The object under ``name``; an absent one is empty."""
        value = self.raw(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"is {reprlib.repr(value)}; allowed: an object")
        return Fields(self.path, value)

    def values(self) -> Mapping[str, Any]:
        """The whole object."""
        return self._values
