"""Prompt files: read, check and name the prompts that demos, tests and benchmarks run on.

Owns the JSONL formats that are accepted and the hash that names a set of prompts. Sits at the
edge, before any request exists; knows no tokeniser, no chat template and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.errors import PromptError

_BUNDLED = "assets/prompts.jsonl"
_FORMS = '"turns" (list of strings), "prompt" (string) or "messages" (list of role and content)'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to run: the user's turns, answered one after the other."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: Path | None = None) -> list[Prompt]:
    """Read a JSONL file of prompts, or the bundled ones; order is that of the file.

    Each line is an object with ``turns``, ``prompt`` or ``messages``, and optionally ``id`` (else
    ``<file>:<line>``) and ``category`` (else ``other``); other keys are metadata. Of ``messages``
    the user's are taken: the assistant's are replaced by the model's own answers.

    Raises:
        PromptError: the file cannot be read, or a line is not a prompt; names file and line.
    """
    name, data = prompt_file(path)
    prompts = [
        _parse_row(where, row, default_id=f"{Path(name).name}:{number}")
        for number, where, row in json_rows(name, data)
    ]
    if not prompts:
        raise PromptError(f"{name}: holds no prompts; give one JSON object per line with {_FORMS}")
    _refuse_repeated_ids(name, prompts)
    return prompts


def prompt_set_hash(prompts: Sequence[Prompt]) -> str:
    """Twelve hex digits that name these prompts in this order: SHA-256 over canonical JSON."""
    rows = [[prompt.id, prompt.category, list(prompt.turns)] for prompt in prompts]
    canonical = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:12]


def prompt_file(path: Path | None) -> tuple[str, bytes]:
    """Name and content of a file of prompts, or of the bundled one.

    Raises:
        PromptError: the file cannot be read.
    """
    if path is None:
        return _BUNDLED, resources.files("outrider").joinpath(_BUNDLED).read_bytes()
    try:
        return str(path), path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read ({error.strerror}); give a JSONL file") from None


def json_rows(name: str, data: bytes) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The objects of a JSONL file: number of the line, words for where it is, the object.

    Raises:
        PromptError: a line is not UTF-8, not JSON or no object; names file and line.
    """
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            yield number, where, _parse_line(where, line)


def _parse_line(where: str, line: bytes) -> dict[str, Any]:
    """The object that one line holds; ``where`` starts every message."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where}: byte {line[error.start]:#04x} at offset {error.start} is not UTF-8; "
            "save the file as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        # Python's own limits apply beside the grammar: digits of a number, depth of nesting.
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "beyond Python's limits"
        raise PromptError(
            f"{where}: is not JSON ({reason}); give one JSON object per line with {_FORMS}"
        ) from None
    if not isinstance(row, dict):
        raise PromptError(f"{where}: is a JSON {json_kind(row)}, not an object with {_FORMS}")
    return row


def _parse_row(where: str, row: Mapping[str, object], default_id: str) -> Prompt:
    return Prompt(
        id=checked_text(f"{where}: id", row.get("id", default_id)),
        category=checked_text(f"{where}: category", row.get("category", "other")),
        turns=_turns(where, row),
    )


def _turns(where: str, row: Mapping[str, object]) -> tuple[str, ...]:
    """The user's turns from whichever of the three forms the line has."""
    given = [key for key in ("turns", "prompt", "messages") if key in row]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise PromptError(f"{where}: needs exactly one of {_FORMS}; has {found}")
    if "prompt" in row:
        return (checked_text(f"{where}: prompt", row["prompt"]),)
    items = row[given[0]]
    if not isinstance(items, list) or not items:
        raise PromptError(f"{where}: {given[0]} is {json_kind(items)}, not a non-empty list")
    if "turns" in row:
        return tuple(checked_text(f"{where}: turns[{i}]", item) for i, item in enumerate(items))
    contents = [_message(f"{where}: messages[{i}]", item) for i, item in enumerate(items)]
    turns = tuple(content for content in contents if content is not None)
    if not turns:
        raise PromptError(f"{where}: messages has no message of the role user; add one")
    return turns


def _message(where: str, message: object) -> str | None:
    """A user message's content, None for an assistant's."""
    if not isinstance(message, dict):
        raise PromptError(f"{where}: is {json_kind(message)}, not an object with role and content")
    role = message.get("role")
    if role == "assistant":
        return None
    if role != "user":
        raise PromptError(
            f"{where}: role {role!r} is not one of user, assistant; put instructions into the "
            "first user message"
        )
    return checked_text(f"{where}: content", message.get("content"))


def checked_text(where: str, value: object) -> str:
    """Refuse what is not a string with something in it that a tokeniser can encode."""
    if not isinstance(value, str):
        raise PromptError(f"{where}: is {json_kind(value)}, not a string")
    if not value.strip():
        raise PromptError(f"{where}: is empty; write a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where}: has half a surrogate pair (\\u{ord(value[error.start]):04x}), which is no "
            "character; remove it"
        ) from None
    return value


def _refuse_repeated_ids(name: str, prompts: Sequence[Prompt]) -> None:
    """Results are kept by id, so an id may stand for one prompt only."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise PromptError(f"{name}: id {prompt.id!r} is used twice; give each prompt its own")
        seen.add(prompt.id)


def json_kind(value: object) -> str:
    """JSON's word for a value's type."""
    if value is None:
        return "null"
    words = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return words.get(type(value), "object")
