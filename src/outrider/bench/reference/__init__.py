"""Figures that others published, with the conditions they hold for.

Owns ``published.json`` and its reading. The report shows them beside a run, never without their
conditions, and only those of a method that the run measured: they say what the method did
elsewhere, not what it should do here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

_NOT_STATED = "not stated"
_METHODS = ("eagle3", "medusa", "mtp", "draft", "ngram")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """One published result. ``is_primary`` is False where only others' accounts were read.

    ``value`` is the text as published, so that no reader takes it for one of ours; ``caveat`` says
    why it may not carry over.
    """

    source: str
    reference: str
    date: str
    method: str
    target: str
    draft: str
    workload: str
    load: str
    machine: str
    engine: str
    sampling: str
    metric: str
    value: str
    acceptance_length: float | None
    is_primary: bool
    caveat: str

    @property
    def conditions(self) -> str:
        """Everything the figure holds for, in one line."""
        names = ("target", "draft", "workload", "load", "machine", "engine", "sampling")
        told = {name: value for name in names if (value := getattr(self, name))}
        return ", ".join(
            f"{name} {value}" if value.startswith(_NOT_STATED) else value
            for name, value in told.items()
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {name: getattr(self, name) for name in self.__slots__}


def published_figures(methods: Iterable[str] | None = None) -> tuple[PublishedFigure, ...]:
    """All figures, or those of the drafters among some arms' methods (trees included)."""
    text = resources.files(__name__).joinpath("published.json").read_text("utf-8")
    figures = tuple(PublishedFigure(**row) for row in json.loads(text)["figures"])
    if methods is None:
        return figures
    wanted = {base_method(method) for method in methods}
    return tuple(figure for figure in figures if figure.method in wanted)


def base_method(method: str) -> str:
    """The drafter in a method's name: ``eagle3`` of ``eagle3-tree+ngram``; itself if unknown."""
    return next((name for name in _METHODS if method.startswith(name)), method)
