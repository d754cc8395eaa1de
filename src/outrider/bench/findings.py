"""What a guard says, and what it looks at: the two sides of one comparison.

Owns no rule. Between :mod:`outrider.bench.metrics` and the guards (``output_guards``,
``timing_guards``, ``arm_guards``), whose findings :mod:`outrider.bench.verdict` acts on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from outrider.bench.metrics import BlockMetrics, RequestMetrics
from outrider.bench.records import ArmRecord, Load, RunRecord


class Severity(StrEnum):
    """A void comparison has no verdict but INVALID; a warning stands beside the verdict."""

    VOID = "void"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a guard found; ``text`` names what was seen, the limit and what to do."""

    guard: str
    severity: Severity
    text: str

    def to_json(self) -> dict[str, str]:
        """Plain values for a JSON document."""
        return {"guard": self.guard, "severity": str(self.severity), "text": self.text}


@dataclass(frozen=True, slots=True)
class Sides:
    """Baseline and one arm at one load: their measured blocks, paired by place in the tuples."""

    run: RunRecord
    load: Load
    baseline_arm: ArmRecord
    arm: ArmRecord
    baseline: tuple[BlockMetrics, ...]
    speculative: tuple[BlockMetrics, ...]

    @property
    def named(self) -> tuple[tuple[str, tuple[BlockMetrics, ...]], ...]:
        """Both sides by their arm's name, the baseline first."""
        return (self.baseline_arm.name, self.baseline), (self.arm.name, self.speculative)

    def pairs(self) -> Iterator[tuple[RequestMetrics, RequestMetrics]]:
        """Requests at the same place of the same block; only where both answers are sound."""
        for base, other in zip(self.baseline, self.speculative, strict=True):
            for left, right in zip(in_order(base), in_order(other), strict=False):
                if left.is_sound and right.is_sound:
                    yield left, right


Guard = Callable[[Sides], Iterable[Finding]]


def in_order(block: BlockMetrics) -> list[RequestMetrics]:
    """A block's requests as they were scheduled."""
    return sorted(block.requests, key=lambda request: request.record.scheduled_s)


def requests_of(blocks: Iterable[BlockMetrics]) -> list[RequestMetrics]:
    """All requests of some blocks."""
    return [request for block in blocks for request in block.requests]
