"""The demonstration's figures: what follows from pairs of answers, one plain and one drafted.

Owns rates, ratios and their grouping; pure functions of finished answers. ``commands.demo`` makes
the pairs, ``commands.demo_report`` lays the figures out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from outrider.bench.statistics import RatioInterval, ratio_interval
from outrider.types import Completion, SpeculationStats

REPEATING_CATEGORIES = frozenset({"code-edit", "answer", "rewrite", "summarize"})
REPEATING, REST, ALL = "repeats input", "rest", "all"
GROUPS = (REPEATING, REST, ALL)
MIN_PER_CATEGORY = 2  # prompts below which a ratio says more about the prompt than the category


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt answered plainly and by one method, with the same sampling settings."""

    prompt_id: str
    category: str
    mode: str
    method: str
    plain: Completion
    speculative: Completion

    @property
    def group(self) -> str:
        """Whether the answer is expected to repeat parts of its prompt."""
        return REPEATING if self.category in REPEATING_CATEGORIES else REST

    @property
    def is_same(self) -> bool:
        """Same tokens, text and end, and no error on either side."""
        plain, other = self.plain, self.speculative
        return (
            plain.token_ids == other.token_ids
            and plain.text == other.text
            and plain.finish_reason == other.finish_reason
            and plain.error is None
            and other.error is None
        )

    @property
    def ratio(self) -> float | None:
        """The method's rate over the plain one; None where an answer was too short for a rate."""
        above, below = self.speculative.decode_rate, self.plain.decode_rate
        return None if above is None or below is None else above / below


@dataclass(frozen=True, slots=True)
class Row:
    """One method's figures in one mode and group of prompts; None where nothing can be divided.

    Rates are tokens per second over all answers of the group; ``ratio`` is speculative over plain.
    """

    mode: str
    method: str
    group: str
    num_pairs: int
    num_same: int
    plain_rate: float | None
    speculative_rate: float | None
    ratio: RatioInterval | None
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """One method's ratio on one category or group of prompts, over all modes.

    ``ratio`` is None below ``MIN_PER_CATEGORY`` prompts.
    """

    method: str
    category: str
    is_group: bool
    num_prompts: int
    ratio: RatioInterval | None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that was measured, with its conditions."""

    pairs: tuple[Pair, ...]
    conditions: dict[str, Any]
    elapsed_s: float
    peak_memory_bytes: int

    @property
    def methods(self) -> list[str]:
        """What was compared with plain decoding, in the tables' order."""
        return list(dict.fromkeys(pair.method for pair in self.pairs))

    @property
    def modes(self) -> list[str]:
        """The sampling modes, in the tables' order."""
        return list(dict.fromkeys(pair.mode for pair in self.pairs))

    @property
    def rows(self) -> list[Row]:
        """One row per sampling mode, method and group, in the tables' order."""
        return [
            summarise(self.pairs, mode, method, group)
            for mode in self.modes
            for method in self.methods
            for group in GROUPS
        ]

    @property
    def categories(self) -> list[CategoryRow]:
        """One row per category and method; before a group's categories, the group itself."""
        return [
            summarise_category(self.pairs, method, name)
            for group in (REPEATING, REST)
            for name in dict.fromkeys(
                name
                for pair in self.pairs
                if pair.group == group
                for name in (group, pair.category)
            )
            for method in self.methods
        ]

    @property
    def differing(self) -> list[Pair]:
        """The pairs whose two answers are not the same."""
        return [pair for pair in self.pairs if not pair.is_same]

    @property
    def is_lossless(self) -> bool:
        """Every text was the same with and without speculation."""
        return not self.differing


def summarise(pairs: Sequence[Pair], mode: str, method: str, group: str) -> Row:
    """The figures of one method's pairs in one mode and group (``ALL`` takes every group)."""
    chosen = [
        pair
        for pair in pairs
        if (pair.mode, pair.method) == (mode, method) and group in (ALL, pair.group)
    ]
    ratios = [ratio for pair in chosen if (ratio := pair.ratio) is not None]
    speculation = SpeculationStats()
    for pair in chosen:
        speculation.add(pair.speculative.speculation)
    return Row(
        mode=mode,
        method=method,
        group=group,
        num_pairs=len(chosen),
        num_same=sum(pair.is_same for pair in chosen),
        plain_rate=total_rate([pair.plain for pair in chosen]),
        speculative_rate=total_rate([pair.speculative for pair in chosen]),
        ratio=ratio_interval(ratios, [1.0] * len(ratios)) if ratios else None,
        acceptance_length=speculation.acceptance_length,
    )


def summarise_category(pairs: Sequence[Pair], method: str, name: str) -> CategoryRow:
    """One method's ratio on the prompts of a category or group.

    A prompt counts once, with the geometric mean over its modes: its answers are not independent.
    """
    logs: dict[str, list[float]] = {}
    for pair in pairs:
        is_chosen = pair.method == method and name in (pair.category, pair.group)
        if is_chosen and (ratio := pair.ratio) is not None:
            logs.setdefault(pair.prompt_id, []).append(math.log(ratio))
    ratios = [math.exp(fmean(of_prompt)) for of_prompt in logs.values()]
    return CategoryRow(
        method=method,
        category=name,
        is_group=name in GROUPS,
        num_prompts=len(ratios),
        ratio=ratio_interval(ratios, [1.0] * len(ratios))
        if len(ratios) >= MIN_PER_CATEGORY
        else None,
    )


def total_rate(completions: Sequence[Completion]) -> float | None:
    """Tokens per second after the first step's, over all answers; None when there are none."""
    tokens = sum(c.usage.completion_tokens - c.timing.num_first for c in completions)
    seconds = sum(completion.timing.decode_s for completion in completions)
    return tokens / seconds if tokens and seconds > 0 else None
