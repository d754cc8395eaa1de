"""The answers of a data folder as files: what a line holds, how it is read and appended.

Owns the format of ``responses*.jsonl``. Written by :mod:`outrider.training.responses` as answers
end; read by it and by every stage after it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One answered turn: what the target read, and what it wrote under which parameters."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float
    seed: int
    finish_reason: str


def read_responses(folder: Path) -> dict[str, Response]:
    """All answers in a data folder by id, in the order in which they were written, file by file.

    A last line that an interrupted run left unfinished is passed over.

    Raises:
        CheckpointError: a line in the middle of a file is damaged; names file and line.
    """
    answers = Answers(folder)
    answers.refresh()
    return answers.by_id


class Answers:
    """The answers in a folder, read as the files grow."""

    def __init__(self, folder: Path) -> None:
        self.by_id: dict[str, Response] = {}
        self.tokens_of: dict[Path, int] = {}
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._lines: dict[Path, int] = {}

    def refresh(self) -> None:
        """Read what was appended since the last call, by whichever process."""
        for path in sorted(self._folder.glob("responses*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written, or cut off
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._lines[path] = self._lines.get(path, 0) + 1
                    response = _parse(line, path, self._lines[path])
                    self.by_id.setdefault(response.id, response)
                    written = self.tokens_of.get(path, 0) + len(response.response_ids)
                    self.tokens_of[path] = written

    def get(self, response_id: str) -> Response | None:
        """The answer of that id, if it has been read."""
        return self.by_id.get(response_id)


def _parse(line: bytes, path: Path, number: int) -> Response:
    try:
        fields: dict[str, Any] = json.loads(line)
        return Response(
            id=str(fields["id"]),
            category=str(fields["category"]),
            prompt_ids=tuple(map(int, fields["prompt_ids"])),
            response_ids=tuple(map(int, fields["response_ids"])),
            temperature=float(fields["temperature"]),
            seed=int(fields["seed"]),
            finish_reason=str(fields["finish_reason"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}, line {number}: not an answer ({error}); remove the line, or the file to have "
            "its prompts answered again"
        ) from None


def open_to_append(path: Path) -> BinaryIO:
    """Open for appending, unbuffered, behind the last whole line."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with path.open("r+b") as file:
                file.truncate(whole)
    return path.open("ab", buffering=0)


def append(file: BinaryIO, line: bytes) -> None:
    """Write all of a line: near the end of a disk, a write may take only part of it."""
    rest = memoryview(line)
    while rest:
        rest = rest[file.write(rest) :]
