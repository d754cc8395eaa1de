"""Methods against each other: linear against tree, and which one to deploy.

Owns the order of simplicity and the tie rule: the simpler of two methods wins unless the other is
shown to be faster by more than the tie margin, on the same blocks. Reads the cells of a run
(:mod:`outrider.bench.verdict`), writes for :mod:`outrider.bench.judgement`; pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from outrider.bench.records import ArmRecord, Load
from outrider.bench.speedup import Speedup
from outrider.bench.statistics import RatioInterval, log_interval
from outrider.bench.verdict import Cell, JudgeSettings, Verdict

TREE = "-tree"
TREE_SETTINGS = frozenset(
    {"use_dynamic_tree", "dynamic_tree_max_topk", "dynamic_tree_max_topK", "tree",
     "max_total_draft_tokens"}
)  # fmt: skip


def is_tree(arm: ArmRecord) -> bool:
    """Whether an arm verifies a tree: by its method's name, or by its settings."""
    return TREE in arm.method or bool(arm.speculation.get("use_dynamic_tree"))


def simplicity(arm: ArmRecord) -> tuple[int, str]:
    """Smaller is simpler: nothing to load, then a head or draft model, a combination, a tree."""
    base = arm.method.partition("+")[0].removesuffix(TREE)
    rank = 0 if base in ("off", "ngram") else 1
    rank += 2 * ("+" in arm.method) + 4 * is_tree(arm)
    return rank, arm.name


@dataclass(frozen=True, slots=True)
class Contrast:
    """One method over another at one load, on the same blocks.

    ``is_faster`` and ``is_slower`` are those of the less simple one, the former beyond the margin.
    ``is_matched`` is False when settings other than the tree's differ: then it says nothing about
    trees as such.
    """

    load: Load
    other: ArmRecord
    simpler: ArmRecord
    speedup: Speedup
    is_faster: bool
    is_slower: bool
    is_tree_against_linear: bool
    is_matched: bool

    @property
    def winner(self) -> ArmRecord:
        """The simpler one on a tie."""
        return self.other if self.is_faster else self.simpler

    @property
    def is_tie(self) -> bool:
        """Neither is shown to be faster."""
        return not (self.is_faster or self.is_slower)

    @property
    def text(self) -> str:
        """For people, with load and workload."""
        end = f"a tie, so {self.simpler.name}" if self.is_tie else f"{self.winner.name} wins"
        note = "" if self.is_matched else " (their other settings differ)"
        return f"{self.speedup}; {end}{note}"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        return {
            "load": self.load.name,
            "over": self.simpler.name,
            "arm": self.other.name,
            **self.speedup.to_json(),
            "is_tree_against_linear": self.is_tree_against_linear,
            "is_matched": self.is_matched,
            "winner": self.winner.name,
            "is_tie": self.is_tie,
        }


def is_clearly_faster(interval: RatioInterval, tie_margin: float) -> bool:
    """The whole interval lies above 1 + margin."""
    return interval.low is not None and interval.low > 1.0 + tie_margin


def contrasts(cells: Iterable[Cell], settings: JudgeSettings) -> list[Contrast]:
    """Every two arms that have a valid cell at the same load, the simpler one below the line."""
    valid = [cell for cell in cells if cell.verdict is not Verdict.INVALID and cell.logs]
    found = []
    for left, right in combinations(valid, 2):
        if left.load != right.load:
            continue
        simple, other = sorted((left, right), key=lambda cell: simplicity(cell.arm))
        interval = over(other, simple, settings.confidence)
        if interval is None or other.speedup is None:
            continue
        conditions = replace(
            other.speedup.conditions, baseline=simple.arm.name, num_blocks=interval.num_pairs
        )
        found.append(
            Contrast(
                left.load,
                other.arm,
                simple.arm,
                Speedup(str(other.metric), conditions, interval),
                is_faster=is_clearly_faster(interval, settings.tie_margin),
                is_slower=interval.is_slower,
                is_tree_against_linear=is_twins(other.arm, simple.arm),
                is_matched=_is_matched(other.arm, simple.arm),
            )
        )
    return found


def over(above: Cell, below: Cell, confidence: float) -> RatioInterval | None:
    """One arm over another from blocks that both were in; the baseline they share cancels out."""
    logs = [above.logs[index] - below.logs[index] for index in above.logs if index in below.logs]
    return log_interval(logs, confidence) if logs else None


def is_twins(left: ArmRecord, right: ArmRecord) -> bool:
    """The same drafter, once as a tree and once linear."""
    names = {arm.method.replace(TREE, "") for arm in (left, right)}
    return len(names) == 1 and is_tree(left) != is_tree(right)


def _is_matched(left: ArmRecord, right: ArmRecord) -> bool:
    plain = [
        {key: value for key, value in arm.speculation.items() if key not in TREE_SETTINGS}
        for arm in (left, right)
    ]
    return plain[0] == plain[1]


def choose(cells: Sequence[Cell], settings: JudgeSettings) -> ArmRecord | None:
    """The arm to deploy: GO at most loads, then fastest over them, then simplest; None without GO.

    An arm gives way to a simpler one, GO at the same loads, that it is not shown to beat at any.
    """
    go: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell.verdict is Verdict.GO:
            go.setdefault(cell.arm.name, {})[cell.load.name] = cell
    if not go:
        return None
    most = max(map(len, go.values()))
    candidates = [by_load for by_load in go.values() if len(by_load) == most]
    best = max(candidates, key=lambda by_load: fmean(map(_mean, by_load.values())))
    names = sorted(candidates, key=lambda by_load: simplicity(_arm(by_load)))
    for simpler in names:
        if simpler is best:
            break
        if set(simpler) == set(best) and not any(
            _beats(best[load], simpler[load], settings) for load in best
        ):
            return _arm(simpler)
    return _arm(best)


def _beats(above: Cell, below: Cell, settings: JudgeSettings) -> bool:
    interval = over(above, below, settings.confidence)
    return interval is not None and is_clearly_faster(interval, settings.tie_margin)


def _mean(cell: Cell) -> float:
    return fmean(cell.logs.values())


def _arm(by_load: dict[str, Cell]) -> ArmRecord:
    return next(iter(by_load.values())).arm
