"""Drafting methods: one file each behind one contract, and the table that names them."""

from __future__ import annotations

from collections.abc import Callable

from outrider.config import Method, SpeculationConfig
from outrider.drafters.base import Drafter
from outrider.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "create_drafter"]

_FACTORIES: dict[Method, Callable[[SpeculationConfig], Drafter]] = {
    Method.NGRAM: NgramDrafter,
}


def create_drafter(speculation: SpeculationConfig) -> Drafter | None:
    """The drafter of a configuration; None for plain decoding."""
    if speculation.method is Method.OFF:
        return None
    return _FACTORIES[speculation.method](speculation)
