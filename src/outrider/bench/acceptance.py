"""How many drafted tokens were kept: length, rate, by position; or that nobody says.

Owns the two definitions that must never be mixed and the places they are read from: a server's
counters around a block, or what it said with each answer. A diagnostic: no verdict rests on it.
Reads :mod:`outrider.bench.records`; pure functions.

* *acceptance length* (tau): tokens per verify step, the bonus token included: 1 + accepted / steps.
* *acceptance rate*: accepted / drafted, in 0..1.
* *marginal rate* at position i: steps that accepted their i-th draft token / steps. They sum to
  length - 1. *Conditional*: the same over the steps that accepted the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.bench.records import BlockRecord, RequestRecord

# vLLM's names, which other engines expose too; a "draft" is one verify step.
STEPS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of draft tokens; None where the server does not tell.

    ``source`` is ``counters`` (of the server) or ``answers``.
    """

    source: str
    accepted: int
    drafted: int | None = None
    steps: int | None = None
    per_position: tuple[int, ...] | None = None

    @property
    def length(self) -> float | None:
        """Tokens per verify step, bonus included."""
        return 1.0 + self.accepted / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def marginal(self) -> tuple[float, ...] | None:
        """By position, over all steps."""
        if self.per_position is None or not self.steps:
            return None
        return tuple(count / self.steps for count in self.per_position)

    @property
    def conditional(self) -> tuple[float, ...] | None:
        """By position, over the steps that accepted all before; stops where none was accepted."""
        if self.per_position is None or not self.steps:
            return None
        rates, before = [], self.steps
        for count in self.per_position:
            if not before:
                break
            rates.append(count / before)
            before = count
        return tuple(rates)

    @property
    def is_consistent(self) -> bool:
        """The positions sum to the whole, within the steps that were under way at a scrape."""
        if self.per_position is None:
            return True
        return abs(sum(self.per_position) - self.accepted) <= max(2, 0.02 * self.accepted)

    @property
    def text(self) -> str:
        """For a table: the length, or that it is unavailable."""
        return UNAVAILABLE if self.length is None else f"{self.length:.2f}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        names = ("source", "accepted", "drafted", "steps", "length", "rate")
        rates = {"marginal": self.marginal, "conditional": self.conditional}
        return {name: getattr(self, name) for name in names} | rates


def acceptance_of(
    blocks: Iterable[BlockRecord], requests: Iterable[RequestRecord]
) -> Acceptance | None:
    """Of some blocks of one arm: from the counters where there are any, else from the answers."""
    counted = [of_counters(block) for block in blocks]
    sound = [found for found in counted if found is not None]
    if sound and len(sound) == len(counted):
        return combine(sound)
    return of_answers(requests)


def of_counters(block: BlockRecord) -> Acceptance | None:
    """Between the scrapes around a block; None without counters, or if the server restarted."""
    before, after = block.metrics_before, block.metrics_after
    if before is None or after is None:
        return None
    grown: list[int] = []
    for name in (STEPS, DRAFTED, ACCEPTED):
        from_, to = before.total(name), after.total(name)
        if from_ is None or to is None or to < from_:
            return None
        grown.append(round(to - from_))
    if not grown[0]:
        return None  # nothing was drafted: plain decoding, which has no acceptance
    first = before.by_label(ACCEPTED_PER_POSITION, "position")
    last = after.by_label(ACCEPTED_PER_POSITION, "position")
    order = sorted(last, key=int)
    positions = tuple(round(last[place] - first.get(place, 0.0)) for place in order)
    return Acceptance("counters", grown[2], grown[1], grown[0], positions or None)


def of_answers(requests: Iterable[RequestRecord]) -> Acceptance | None:
    """Summed over the answers that carry counts; None where none does."""
    said = [record.speculative for record in requests if record.speculative is not None]
    found = [
        Acceptance("answers", counts.accepted, counts.drafted, counts.steps,
                   counts.accepted_per_position)
        for counts in said
        if counts.accepted is not None and (counts.steps or counts.drafted)
    ]  # fmt: skip
    return combine(found) if found else None


def combine(parts: Sequence[Acceptance]) -> Acceptance:
    """Counts added up; a count that a part lacks is unknown of the whole. At least one part."""
    drafted = [part.drafted for part in parts if part.drafted is not None]
    steps = [part.steps for part in parts if part.steps is not None]
    positions = [part.per_position for part in parts if part.per_position is not None]
    width = max((len(row) for row in positions), default=0)
    summed = tuple(sum(row[i] for row in positions if i < len(row)) for i in range(width))
    return Acceptance(
        source=parts[0].source,
        accepted=sum(part.accepted for part in parts),
        drafted=sum(drafted) if len(drafted) == len(parts) else None,
        steps=sum(steps) if len(steps) == len(parts) else None,
        per_position=summed if summed and len(positions) == len(parts) else None,
    )


def by_category(requests: Iterable[RequestRecord]) -> dict[str, Acceptance]:
    """From the answers, by the prompts' category; only categories that have counts."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in requests:
        groups.setdefault(record.category, []).append(record)
    found = {name: of_answers(group) for name, group in sorted(groups.items())}
    return {name: value for name, value in found.items() if value is not None}
