"""The prompt book: training prompts as templates, and the language the templates are written in.

Owns the files in ``assets/training_prompts``; ``prompts`` draws from it.

A file of the book is one category: ``weight``, ``[slots]`` (lists of texts) and ``[[group]]``
tables with ``templates``. In a template or a slot's text

- ``{name}`` is a text of the list ``name``; the same field means the same text throughout,
  ``{name.2}`` another text of the same list; listed texts may hold fields of their own;
- ``{n:2..9}`` is a whole number, ``{n:10..90..10}`` one in steps of ten; ``{n}`` repeats it;
- ``{{`` and ``}}`` are braces; a line ``<turn>`` starts the user's next turn;
- ``{passage0}`` is an earlier answer, which ``responses`` puts there; ``{topic0}`` and
  ``{question0}`` are what its group says that it is about and may be asked.

A group may have ``share`` (how often it is used beside the others; default: its number of
templates), ``is_source = true`` with ``topic`` and ``questions`` (its answers serve as passages)
and ``is_opener = true`` (the user's turn is left for the target to complete).
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from typing import Any

_BOOK = "assets/training_prompts"
_FIELD = re.compile(
    r"\{\{|\}\}|\{(?P<key>(?P<name>[a-z_]+)(?:\.\d)?)"
    r"(?::(?P<low>\d+)\.\.(?P<high>\d+)(?:\.\.(?P<step>\d+))?)?\}"
)
_LATE_FIELD = re.compile(r"\{(passage|topic|question)(\d)\}")


class Template:
    """A text with fields, as a numbered list: ``size`` texts, of which `expand` makes one."""

    def __init__(self, text: str, slots: Slots) -> None:
        self.parts: list[str] = []  # literal, key, literal, key, ..., literal
        self.choices: dict[str, _Choice] = {}
        self.passage_count = max(
            (int(field[2]) + 1 for field in _LATE_FIELD.finditer(text)), default=0
        )
        # Late fields are not ours to fill here: they travel through as braces.
        source = _LATE_FIELD.sub(r"{{\1\2}}", text)
        literal, end = "", 0
        for field in _FIELD.finditer(source):
            literal += source[end : field.start()]
            end = field.end()
            if field["key"] is None:
                literal += field[0][0]
                continue
            self.parts += [literal, field["key"]]
            literal = ""
            self._add_choice(field, slots)
        self.parts.append(literal + source[end:])
        assert not set("{}") & set(_FIELD.sub("", source)), f"a single brace in {text!r}"
        self.size = math.prod(choice.size for choice in self.choices.values())

    def _add_choice(self, field: re.Match[str], slots: Slots) -> None:
        key, name = field["key"], field["name"]
        if key in self.choices:
            return
        if field["low"] is not None:
            numbers = range(int(field["low"]), int(field["high"]) + 1, int(field["step"] or 1))
            self.choices[key] = _Choice(name, [str(number) for number in numbers], rank=0)
            return
        rank = sum(choice.name == name for choice in self.choices.values())
        self.choices[key] = _Choice(name, slots.texts(name), rank)

    def expand(self, index: int) -> tuple[str, dict[str, str]]:
        """Text ``index`` of the list, and what its fields were filled with."""
        values: dict[str, str] = {}
        taken: dict[str, list[int]] = {}
        for key, choice in self.choices.items():
            index, digit = divmod(index, choice.size)
            values[key] = choice.text(digit, taken.setdefault(choice.name, []))
        parts = [values[part] if i % 2 else part for i, part in enumerate(self.parts)]
        return "".join(parts), values


class _Choice:
    """What one field may be filled with; of a list used before, only what is left of it."""

    def __init__(self, name: str, texts: Sequence[str | Template], rank: int) -> None:
        self.name = name
        self._texts = texts
        self._is_flat = all(isinstance(text, str) for text in texts)
        assert rank == 0 or self._is_flat, f"{{{name}}} twice: its texts must have no fields"
        sizes = [1 if isinstance(text, str) else text.size for text in texts]
        self._ends = list(accumulate(sizes))
        self.size = self._ends[-1] - rank
        assert self.size > 0, f"the list {name} is too short for its fields"

    def text(self, digit: int, taken: list[int]) -> str:
        """Text ``digit`` of those not in ``taken``, to which it is added."""
        if self._is_flat:
            for used in sorted(taken):
                digit += digit >= used
            taken.append(digit)
        position = bisect_right(self._ends, digit)
        text = self._texts[position]
        if isinstance(text, str):
            return text
        return text.expand(digit - (self._ends[position] - text.size))[0]


class Slots:
    """The lists of one category, their texts compiled when first used."""

    def __init__(self, lists: Mapping[str, Sequence[str]]) -> None:
        self._lists = lists
        self._compiled: dict[str, list[str | Template]] = {}

    def texts(self, name: str) -> list[str | Template]:
        """The list ``name``: plain texts, and templates where a text has fields."""
        if name not in self._compiled:
            assert name in self._lists, f"no list {name} in [slots]"
            templates = [Template(text, self) for text in self._lists[name]]
            self._compiled[name] = [
                template if template.choices else template.expand(0)[0] for template in templates
            ]
        return self._compiled[name]


@dataclass(frozen=True, slots=True)
class Entry:
    """A template with what its group says of it."""

    template: Template
    weight: float
    topic: str | None
    questions: tuple[str, ...]
    is_opener: bool


@dataclass(frozen=True, slots=True)
class Category:
    """One file of the book; ``weight`` is its share of all prompts."""

    name: str
    weight: float
    entries: tuple[Entry, ...]


@functools.cache
def load_book() -> tuple[Category, ...]:
    """Read and compile the whole book, its weights scaled to a sum of one."""
    folder = resources.files("outrider").joinpath(_BOOK)
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".toml")),
        key=lambda file: file.name,
    )
    tables = {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8"))
        for file in files
    }
    total = sum(table["weight"] for table in tables.values())
    return tuple(
        Category(table.get("category", stem), table["weight"] / total, _entries(table))
        for stem, table in tables.items()
    )


def _entries(table: Mapping[str, Any]) -> tuple[Entry, ...]:
    slots = Slots(table.get("slots", {}))
    entries: list[Entry] = []
    for group in table["group"]:
        texts = group["templates"]
        topic = group.get("topic")
        assert group.get("is_source", False) == (topic is not None), "a source has a topic"
        for text in texts:
            entry = Entry(
                template=Template(text.strip(), slots),
                weight=group.get("share", len(texts)) / len(texts),
                topic=topic,
                questions=tuple(group.get("questions", ())),
                is_opener=group.get("is_opener", False),
            )
            entries.append(entry)
    return tuple(entries)


def fill(text: str, values: Mapping[str, str]) -> str:
    """A group's topic or question with the values of one of its prompts."""
    return _FIELD.sub(lambda field: values[field["key"]], text)
