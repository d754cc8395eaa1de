"""Which kinds of prompts a method pays on: its ratio by category, and by group of categories.

Owns the groups (answers that repeat their prompt, and the rest, which n-gram and heads tell apart
most) and the estimate: per block the mean logarithm of the per-user rates of the same prompts, over
blocks a t interval. A view for the report; no verdict rests on it. Reads the cells of a run
(:mod:`outrider.bench.verdict`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from outrider.bench.speedup import Speedup
from outrider.bench.statistics import log_interval
from outrider.bench.verdict import Cell, Metric, Verdict

# Of the bundled prompts, and of Spec-Bench.
REPEATING_CATEGORIES = frozenset({"code-edit", "answer", "rewrite", "summarize"})
SPEC_BENCH_REPEATING = frozenset({"summarization", "rag"})
REPEATING, REST, ALL = "repeats input", "rest", "all"


@dataclass(frozen=True, slots=True)
class CategoryRatio:
    """One method's ratio on one category, or group of them, at one load."""

    name: str
    is_group: bool
    num_prompts: int
    speedup: Speedup

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "category": self.name,
            "is_group": self.is_group,
            "num_prompts": self.num_prompts,
            **self.speedup.to_json(),
        }


def group_of(category: str) -> str:
    """Whether the answers are expected to repeat parts of their prompts."""
    return REPEATING if category in REPEATING_CATEGORIES | SPEC_BENCH_REPEATING else REST


def category_ratios(cell: Cell) -> list[CategoryRatio]:
    """By category, each group before its own; empty for a cell that is void.

    A single group, or a single category, is the whole and is left out.
    """
    if cell.verdict is Verdict.INVALID or cell.speedup is None:
        return []
    logs: dict[str, dict[int, list[float]]] = {}
    prompts: dict[str, set[str]] = {}
    for left, right in cell.sides.pairs():
        if not left.rate or not right.rate:
            continue
        record = left.record
        for name in (group_of(record.category), record.category):
            of_block = logs.setdefault(name, {}).setdefault(record.block, [])
            of_block.append(math.log(right.rate / left.rate))
            prompts.setdefault(name, set()).add(record.prompt_id)
    groups = [name for name in (REPEATING, REST) if name in logs]
    order: list[str] = []
    for group in groups:
        members = sorted(n for n in logs if n not in groups and group_of(n) == group)
        order += [*([group] if len(groups) > 1 else []), *(members if len(logs) > 2 else [])]
    return [
        CategoryRatio(
            name,
            name in groups,
            len(prompts[name]),
            _speedup(cell, name, [fmean(of_block) for of_block in logs[name].values()]),
        )
        for name in order
    ]


def _speedup(cell: Cell, name: str, logs: list[float]) -> Speedup:
    assert cell.speedup is not None
    conditions = cell.speedup.conditions
    narrowed = replace(
        conditions, workload=f"{name} of {conditions.workload}", num_blocks=len(logs)
    )
    return Speedup(str(Metric.USER), narrowed, log_interval(logs))
