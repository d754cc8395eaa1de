"""The log of a training run: one JSON object per line, the same after any interruption.

Owns ``log.jsonl`` (losses, accuracies, predicted acceptance: a pure function of data and settings)
and ``times.jsonl`` (seconds and tokens so far, which are not). On resuming, what was written behind
the checkpoint is cut off, so a run that was killed ends with the log of one that was not. Written
by :mod:`outrider.training.loop`, drawn by :mod:`outrider.report.curve`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.errors import CheckpointError
from outrider.models.loading.cache import publish
from outrider.training.files import writing

LOG, TIMES = "log.jsonl", "times.jsonl"


class JsonLines:
    """An append-only file of JSON objects, each with the ``step`` it belongs to.

    Args:
        path: the file; what it holds of later steps than ``last_step`` is cut off.
        last_step: the step that the run goes on from; 0 begins anew.

    Attributes:
        kept_step: of the last line that was kept, 0 without any.

    Raises:
        CapacityError: the disk is full; so do the methods.
        CheckpointError: the file cannot be written for another reason; so do the methods.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._path = path
        self.kept_step = 0
        kept = []
        with writing(path):
            if last_step and path.exists():
                kept = [(step, line) for step, line in _lines(path) if step <= last_step]
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(b"".join(line for _, line in kept))
            publish(partial, path)
            self._file = path.open("ab")
        if kept:
            self.kept_step = kept[-1][0]

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line."""
        line = json.dumps({"step": step, **values}, separators=(",", ":"))
        with writing(self._path):
            self._file.write(line.encode() + b"\n")

    def sync(self) -> None:
        """Put what was appended on disk; before the checkpoint that it belongs to."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file; lines that were not synced belong to no checkpoint and may go."""
        with suppress(OSError):
            self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a log.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return [json.loads(line) for _, line in _lines(path)]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole, sound lines with their steps; stops at the first that a kill cut off."""
    with path.open("rb") as file:
        for line in file:
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            yield step, line
