"""Names of ways to draft, as they stand on command lines and in tables: ``eagle3-tree+ngram``.

Owns the names and the shape behind each. A name is a method, ``-tree`` for a tree instead of a
chain, ``+ngram`` for n-gram's guesses beside the head's. Used by ``outrider bench``,
``demo`` and ``serve --also``; knows neither models nor whether a head is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import METHODS_WITH_HEAD, Method, SpeculationConfig
from outrider.errors import ParameterError

_TREE, _NGRAM = "-tree", "+ngram"
_DEPTH = 5  # of a head's chain or tree; what published figures are mostly given for
# With the root as many rows as cost hardly more than one on a CPU with prepacked weights.
_NUM_NODES = 16
_NUM_CHILDREN = 4


@dataclass(frozen=True, slots=True)
class ArmName:
    """A method with its shape, by the name it has on the command line and in the tables."""

    method: Method
    is_tree: bool = False
    with_ngram: bool = False

    @classmethod
    def parse(cls, text: str, *, flag: str = "--methods") -> ArmName:
        """The name behind the text, which was given with ``flag``.

        Raises:
            ParameterError: there is no such name; lists those there are.
        """
        allowed = {str(name): name for name in all_names(tuple(Method)[1:])}
        if text not in allowed:
            known = ", ".join([Method.OFF, *allowed])
            raise ParameterError(f"{flag}: {text!r} is not one of {known}")
        return allowed[text]

    def __str__(self) -> str:
        tree, ngram = _TREE if self.is_tree else "", _NGRAM if self.with_ngram else ""
        return f"{self.method}{tree}{ngram}"

    def speculation(self, head: str | None) -> SpeculationConfig:
        """The shape: n-gram's usual depth, a head's chain of 5, or a tree of 16 nodes."""
        fields: dict[str, Any] = {"method": self.method, "with_ngram": self.with_ngram}
        if self.method in METHODS_WITH_HEAD:
            fields |= {"head": head, "max_draft_len": _DEPTH}
        if self.is_tree:
            fields |= {
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": _NUM_CHILDREN,
                "max_total_draft_tokens": _NUM_NODES,
            }
        return SpeculationConfig(**fields)


def all_names(methods: Sequence[Method]) -> list[ArmName]:
    """Every name of these methods, plainest first."""
    return [
        ArmName(method, is_tree, with_ngram)
        for method in methods
        for with_ngram in ((False, True) if method in METHODS_WITH_HEAD else (False,))
        for is_tree in (False, True)
    ]
