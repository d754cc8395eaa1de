"""What is asked: conversations from any common prompt file, chosen, named and in a fixed order.

Owns the file shapes beyond those of :mod:`outrider.bench.prompts`, the choice by category and
length, the groups by input length, and the test for random-token prompts. Used before a run; knows
no server, and no tokeniser: lengths are characters, token counts come from the servers' usage.

Every request must say the same in every arm, so nothing that a model wrote during the run may enter
a prompt. A conversation is therefore asked up to its last user message with the assistant's turns
*as the file gives them*; of ``turns``, which has none, the first is asked.

Shapes, one JSON object per line (or one JSON array, as ShareGPT's files are)::

    {"prompt": "..."}
    {"turns": ["...", "..."]}                           Spec-Bench: question_id, category, turns
    {"turns": [{"role": "user", "content": "..."}]}     SPEED-Bench's other form of turns
    {"messages": [{"role": "user", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}]}                ShareGPT
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.prompts import checked_text, json_kind, json_rows, prompt_file
from outrider.bench.records import WorkloadRecord
from outrider.errors import ParameterError, PromptError

BUNDLED = "the bundled set"  # what the prompts that ship are called
_KEYS = ("prompt", "turns", "messages", "conversations")
_ROLES = ("system", "user", "assistant")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_ID_KEYS = ("id", "question_id", "prompt_id")

# Text in any language says some words again; tokens drawn at random hardly ever do. Measured with
# a vocabulary of 49,152: 191 words of English repeat .36 of them, 2,000 random "words" .03.
_RANDOM_WORDS, _RANDOM_SAMPLE, _RANDOM_REPEATS = 150, 2000, 0.15
# Scripts without spaces count by character.
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0e7f\u3040-\u9fff]+")


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation to be answered once; ``messages`` are (role, content) pairs."""

    id: str
    category: str
    messages: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """Everything that is said, as the prompt of a text completion."""
        return "\n\n".join(content for _, content in self.messages)

    @property
    def num_chars(self) -> int:
        """Length of everything that is said before the answer."""
        return sum(len(content) for _, content in self.messages)

    @property
    def hash(self) -> str:
        """Twelve hex digits of what is said, whatever its name."""
        return _hash(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which prompts of a file are asked.

    ``max_prompts`` are taken from all categories in turn. ``buckets`` are bounds between lengths
    in characters; with them a question's category becomes its length bucket.

    Raises:
        ParameterError: a bound is out of range or out of order.
    """

    categories: tuple[str, ...] = ()
    min_chars: int = 0
    max_chars: int | None = None
    max_prompts: int | None = None
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.min_chars < 0:
            raise ParameterError(f"--min-chars: {self.min_chars} is below 0")
        if self.max_chars is not None and self.max_chars < max(1, self.min_chars):
            raise ParameterError(
                f"--max-chars: {self.max_chars} is below 1 or below --min-chars {self.min_chars}"
            )
        if self.max_prompts is not None and self.max_prompts < 1:
            raise ParameterError(f"--max-prompts: {self.max_prompts} is below 1")
        bounds = (0, *self.buckets)
        if any(low >= high for low, high in pairwise(bounds)):
            raise ParameterError(
                f"--length-buckets: {','.join(map(str, self.buckets))} must be rising and above 0"
            )

    def to_json(self) -> dict[str, Any]:
        """What was asked for beyond the defaults."""
        fields = {
            "categories": list(self.categories),
            "min_chars": self.min_chars,
            "max_chars": self.max_chars,
            "max_prompts": self.max_prompts,
            "length_buckets": list(self.buckets),
        }
        return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class Workload:
    """The questions in the order they are asked, and what they are."""

    questions: tuple[Question, ...]
    record: WorkloadRecord


def load_workload(path: Path | None, selection: Selection) -> Workload:
    """Read a file of prompts, or the bundled ones, and choose among them.

    Order: one of each category in turn, each category in file order, so that every stretch of the
    list is as mixed as the whole.

    Raises:
        PromptError: a line is no prompt (named by number), an id is used twice, most lines say the
            same, or nothing is left to ask.
    """
    name, data = prompt_file(path)
    everything = [_question(name, *row) for row in _rows(name, data)]
    if not everything:
        raise PromptError(f"{name}: holds no prompts; give one JSON object per line")
    _refuse_repeats(name, everything)
    chosen = _mixed([question for question in everything if _fits(question, selection)])
    if selection.buckets:
        chosen = _mixed([_by_length(question, selection.buckets) for question in chosen])
    chosen = chosen[: selection.max_prompts]
    if not chosen:
        there = Counter(question.category for question in everything)
        lengths = [question.num_chars for question in everything]
        raise PromptError(
            f"{name}: none of {len(everything)} prompts is left by {selection.to_json()}; there are"
            f" the categories {', '.join(sorted(there))} and {min(lengths)} to {max(lengths)} "
            "characters"
        )
    return Workload(tuple(chosen), _record(path.name if path else BUNDLED, chosen, selection))


def looks_random(questions: Sequence[Question]) -> bool:
    """Whether the texts are tokens drawn at random; False where there is too little to tell by."""
    words: list[str] = []
    for question in questions:
        for _, content in question.messages:
            words += _WORD.findall(content.lower())
        if len(words) >= _RANDOM_SAMPLE:
            break
    words = words[:_RANDOM_SAMPLE]
    if len(words) < _RANDOM_WORDS:
        return False
    return 1.0 - len(set(words)) / len(words) < _RANDOM_REPEATS


def _record(source: str, questions: Sequence[Question], selection: Selection) -> WorkloadRecord:
    lengths = [question.num_chars for question in questions]
    rows = [(question.id, question.category, question.messages) for question in questions]
    return WorkloadRecord(
        source=source,
        prompt_hash=_hash(rows),
        num_prompts=len(questions),
        categories=dict(Counter(question.category for question in questions)),
        num_chars_min=min(lengths),
        num_chars_median=float(median(lengths)),
        num_chars_max=max(lengths),
        filters=selection.to_json(),
        is_random=looks_random(questions),
    )


def _hash(value: object) -> str:
    canonical = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:12]


def _fits(question: Question, selection: Selection) -> bool:
    is_asked_for = not selection.categories or question.category in selection.categories
    most = selection.max_chars
    is_short = most is None or question.num_chars <= most
    return is_asked_for and is_short and question.num_chars >= selection.min_chars


def _by_length(question: Question, bounds: Sequence[int]) -> Question:
    """With its length bucket for a category; a bound belongs to the bucket above it."""
    below = [bound for bound in bounds if bound <= question.num_chars]
    above = [bound for bound in bounds if bound > question.num_chars]
    low = below[-1] if below else 0
    name = f"{low}-{above[0] - 1} chars" if above else f"{low}+ chars"
    return replace(question, category=name)


def _mixed(questions: Sequence[Question]) -> list[Question]:
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    rounds = zip_longest(*by_category.values())
    return [question for one_round in rounds for question in one_round if question is not None]


def _refuse_repeats(name: str, questions: Sequence[Question]) -> None:
    twice = [id_ for id_, count in Counter(q.id for q in questions).items() if count > 1]
    if twice:
        raise PromptError(f"{name}: id {twice[0]!r} is used twice; give each prompt its own")
    content, count = Counter(question.messages for question in questions).most_common(1)[0]
    if count > 1 and count > len(questions) / 2:
        # SPEED-Bench's public files are like this: the real turns are fetched by its own script.
        raise PromptError(
            f"{name}: {count} of {len(questions)} prompts say the same ({content[-1][1][:60]!r}), "
            "so they are placeholders or measure a cache; give the real prompts"
        )


def _rows(name: str, data: bytes) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Number, place and object of every prompt in the file."""
    if not data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from json_rows(name, data)
        return
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise PromptError(f"{name}: begins like a JSON array and is none: {problem}") from None
    for number, item in enumerate(items, start=1):
        where = f"{name}, item {number}"
        if not isinstance(item, dict):
            raise PromptError(f"{where}: is a JSON {json_kind(item)}, not an object")
        yield number, where, item


def _question(name: str, number: int, where: str, row: Mapping[str, Any]) -> Question:
    given = [key for key in _KEYS if key in row]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise PromptError(f"{where}: needs exactly one of {', '.join(_KEYS)}; has {found}")
    id_ = next((row[key] for key in _ID_KEYS if key in row), f"{Path(name).name}:{number}")
    category = row.get("category", "other")
    return Question(
        # Spec-Bench and SPEED-Bench number their questions.
        id=checked_text(f"{where}: id", str(id_) if isinstance(id_, int) else id_),
        category=checked_text(f"{where}: category", category),
        messages=_messages(where, given[0], row[given[0]]),
    )


def _messages(where: str, key: str, value: object) -> tuple[tuple[str, str], ...]:
    if key == "prompt":
        return (("user", checked_text(f"{where}: prompt", value)),)
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: {key} is {json_kind(value)}, not a non-empty list")
    if key == "turns" and all(isinstance(item, str) for item in value):
        return (("user", checked_text(f"{where}: turns[0]", value[0])),)
    names = ("from", "value") if key == "conversations" else ("role", "content")
    said = [_message(f"{where}: {key}[{i}]", item, *names) for i, item in enumerate(value)]
    last_user = max((i for i, (role, _) in enumerate(said) if role == "user"), default=None)
    if last_user is None:
        raise PromptError(f"{where}: {key} has no message of the user; add one")
    return tuple(said[: last_user + 1])


def _message(where: str, message: object, role_key: str, text_key: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise PromptError(
            f"{where}: is {json_kind(message)}, not an object with {role_key} and {text_key}"
        )
    role = message.get(role_key)
    if role_key == "from":
        role = _SHAREGPT_ROLES.get(str(role), role)
    if role not in _ROLES:
        allowed = sorted(_SHAREGPT_ROLES) if role_key == "from" else _ROLES
        raise PromptError(f"{where}: {role_key} {role!r} is not one of {', '.join(allowed)}")
    return str(role), checked_text(f"{where}: {text_key}", message.get(text_key))
