"""Where a server's step time went: drafting, verifying, the rest; where the server tells.

Owns the reading of one counter of our own server around the blocks of an arm. Reads
:mod:`outrider.bench.records`; a diagnostic for the report, on which no verdict rests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bench.records import BlockRecord

STEP_SECONDS = "outrider_step_seconds_total"


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds by part of a step, as the server names the parts."""

    seconds: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The same as shares of the whole."""
        whole = sum(self.seconds.values())
        return {part: value / whole for part, value in self.seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {"seconds": dict(self.seconds), "shares": self.shares}


def time_split(blocks: Iterable[BlockRecord]) -> TimeSplit | None:
    """Summed over blocks; None where a block has no such counter, or nothing was spent."""
    total: dict[str, float] = {}
    for block in blocks:
        if block.metrics_before is None or block.metrics_after is None:
            return None
        before = block.metrics_before.by_label(STEP_SECONDS, "part")
        after = block.metrics_after.by_label(STEP_SECONDS, "part")
        if not after:
            return None
        for part, value in after.items():
            total[part] = total.get(part, 0.0) + value - before.get(part, 0.0)
    if any(value < 0.0 for value in total.values()) or not sum(total.values()) > 0.0:
        return None  # the server was started anew in between
    return TimeSplit(total)
