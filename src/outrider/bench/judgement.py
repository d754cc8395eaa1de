"""A whole run judged: a cell per arm and load, break-even, projection, comparison, one verdict.

Owns how the parts are put together; each part has its own module::

    records -> metrics -> guards -> verdict (a cell) --+-> breakeven, costmodel, compare
                                                       +-> Judgement -> report, plan

Everything follows from the records and the thresholds, so ``--from DIR`` tells the same again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.bench.acceptance import Acceptance, acceptance_of, by_category
from outrider.bench.breakeven import BreakEven, break_even
from outrider.bench.compare import Contrast, choose, contrasts
from outrider.bench.costmodel import LoadPoint, Projection, project
from outrider.bench.findings import Sides
from outrider.bench.metrics import BlockMetrics, block_metrics
from outrider.bench.output_guards import Sameness
from outrider.bench.planning import NoiseFloor, noise_floor
from outrider.bench.records import ArmRecord, BlockKind, Load, LoadKind, RequestRecord, RunData
from outrider.bench.statistics import holm
from outrider.bench.step_time import TimeSplit, time_split
from outrider.bench.verdict import (
    Cell,
    JudgeSettings,
    Metric,
    Verdict,
    judge_cell,
    lossless_sentence,
    primary_metric,
)
from outrider.errors import RecordError


@dataclass(frozen=True, slots=True)
class ArmAtLoad:
    """One arm's measured blocks at one load, the baseline's included; for tables and charts."""

    arm: ArmRecord
    load: Load
    blocks: tuple[BlockMetrics, ...]

    @property
    def _records(self) -> list[RequestRecord]:
        return [request.record for block in self.blocks for request in block.requests]

    @property
    def acceptance(self) -> Acceptance | None:
        """Over all its blocks; None is "unavailable"."""
        if self.arm.is_baseline:
            return None
        return acceptance_of((block.block for block in self.blocks), self._records)

    @property
    def acceptance_by_category(self) -> dict[str, Acceptance]:
        """By the prompts' category, where the answers carry counts."""
        return by_category(self._records)

    @property
    def time_split(self) -> TimeSplit | None:
        """Where its steps' time went; None is "unavailable"."""
        return time_split(block.block for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything that a run says; ``winner`` is None unless some arm is GO."""

    data: RunData
    settings: JudgeSettings
    cells: tuple[Cell, ...]
    arms: tuple[ArmAtLoad, ...]
    noise: dict[str, NoiseFloor]
    break_evens: dict[str, BreakEven]
    projections: dict[str, Projection]
    contrasts: tuple[Contrast, ...]
    verdict: Verdict
    winner: ArmRecord | None
    remarks: tuple[str, ...]

    def cells_of(self, arm: ArmRecord) -> list[Cell]:
        """An arm's cells in the order of the loads."""
        return [cell for cell in self.cells if cell.arm.name == arm.name]

    def at(self, arm_name: str, load: Load) -> ArmAtLoad | None:
        """An arm's blocks at a load; None if there are none."""
        found = (entry for entry in self.arms if (entry.arm.name, entry.load) == (arm_name, load))
        return next(found, None)

    def same_answers(self, arm: ArmRecord) -> str:
        """How many of an arm's answers are plain decoding's, over all loads; for people."""
        counts = [cell.same for cell in self.cells_of(arm)]
        kinds = {count.kind for count in counts}
        return Sameness(
            sum(count.num_same for count in counts),
            sum(count.num_pairs for count in counts),
            kinds.pop() if len(kinds) == 1 else "texts",
        ).text

    @property
    def headline(self) -> str:
        """The verdict of the run in one sentence."""
        workload = self.data.run.workload
        where = f"on {workload.source} (#{workload.prompt_hash})"
        match self.verdict:
            case Verdict.GO:
                assert self.winner is not None
                return self._go_sentence(self.winner)
            case Verdict.NO_GO:
                loads = ", ".join(dict.fromkeys(cell.load.text for cell in self.cells))
                return (
                    f"NO-GO: no method is worth deploying at {loads} {where}: "
                    f"{'; '.join(dict.fromkeys(cell.reasons[0] for cell in self.cells))}"
                )
            case Verdict.INVALID:
                reasons = list(dict.fromkeys(r for cell in self.cells for r in cell.reasons))
                return f"INVALID: nothing {where} can be judged: {reasons[0] if reasons else ''}"
            case Verdict.INCONCLUSIVE:
                return self._open_sentence(where)

    def _open_sentence(self, where: str) -> str:
        """What is not decided: by chance alone, in a cell, or because other cells are void."""
        if self.remarks:
            return f"INCONCLUSIVE: {self.remarks[0]}; {where}"
        undecided = [cell for cell in self.cells if cell.verdict is Verdict.INCONCLUSIVE]
        if undecided:
            return undecided[0].sentence
        void = next(cell for cell in self.cells if cell.verdict is Verdict.INVALID)
        return (
            f"INCONCLUSIVE: what can be judged {where} is NO-GO, but {void.arm.name} at "
            f"{void.load.text} is void: {void.reasons[0]}"
        )

    def _go_sentence(self, arm: ArmRecord) -> str:
        cells = [cell for cell in self.cells_of(arm) if cell.verdict is Verdict.GO]
        told = f"GO: deploy {arm.name}: {cells[0].speedup}"
        if len(cells) > 1:
            further = ", ".join(
                f"{cell.speedup.within(f'{told} {cell.load.text}')} at {cell.load.text}"
                for cell in cells[1:]
                if cell.speedup is not None
            )
            told += f"; {further}"
        others = [
            f"{cell.verdict} at {cell.load.text}" for cell in self.cells_of(arm)
            if cell.verdict is not Verdict.GO
        ]  # fmt: skip
        parts = [told, *others]
        found = self.break_evens.get(arm.name)
        if found is not None and found.is_told:
            parts.append(found.text)
        parts += {cell.ttft.gap: None for cell in cells if cell.ttft and cell.ttft.gap}
        return "; ".join([*parts, self.same_answers(arm), lossless_sentence(arm)])


def judge(data: RunData, settings: JudgeSettings | None = None) -> Judgement:
    """Everything that follows from a run's records; thresholds from the run unless given.

    Raises:
        RecordError: the run has no block in which baseline and another arm were both measured.
    """
    settings = settings or JudgeSettings.from_run(data.run)
    by_place: dict[tuple[int, int], list[RequestRecord]] = {}
    for record in data.requests:
        by_place.setdefault((record.block, record.position), []).append(record)
    figures = [
        block_metrics(block, by_place.get((block.index, block.position), ()))
        for block in data.blocks
        if block.kind is not BlockKind.WARMUP
    ]
    cells: list[Cell] = []
    noise: dict[str, NoiseFloor] = {}
    entries: list[ArmAtLoad] = []
    for load in data.run.loads:
        here = [block for block in figures if block.block.load == load]
        measured = [block for block in here if block.block.kind is BlockKind.MEASURE]
        metric = primary_metric(load, here)
        if (floor := _noise(here, metric)) is not None:
            noise[load.name] = floor
        sides = [s for arm in data.run.arms if (s := _sides(data, arm, load, measured)) is not None]
        cells += [
            judge_cell(side, metric, noise.get(load.name), settings, num_arms=len(sides))
            for side in sides
        ]
        entries += [
            ArmAtLoad(arm, load, mine)
            for arm in data.run.arms
            if (mine := tuple(block for block in measured if block.block.arm == arm.name))
        ]
    if not cells:
        raise RecordError(
            "the run holds no block in which the baseline and another arm were both measured; "
            "resume it with the command that began it"
        )
    verdict, remarks = _overall(cells, settings)
    if verdict in (Verdict.GO, Verdict.NO_GO):
        remarks += _missing_blocks(data, cells)
    chosen = choose(cells, settings) if verdict is Verdict.GO else None
    others = [arm for arm in data.run.arms if not arm.is_baseline]
    return Judgement(
        data=data,
        settings=settings,
        cells=tuple(cells),
        arms=tuple(entries),
        noise=noise,
        break_evens={arm.name: found for arm in others if (found := _break_even(arm, cells))},
        projections={arm.name: project(_points(arm, entries)) for arm in others},
        contrasts=tuple(contrasts(cells, settings)),
        verdict=verdict,
        winner=chosen,
        remarks=tuple(remarks),
    )


def _sides(
    data: RunData, arm: ArmRecord, load: Load, measured: Sequence[BlockMetrics]
) -> Sides | None:
    """Baseline and an arm, paired by block; None for the baseline and where no block has both."""
    baseline = data.run.baseline
    if arm.is_baseline:
        return None
    left, right = (
        {block.block.index: block for block in measured if block.block.arm == name}
        for name in (baseline.name, arm.name)
    )
    shared = sorted(left.keys() & right.keys())
    if not shared:
        return None
    return Sides(
        data.run,
        load,
        baseline,
        arm,
        tuple(left[index] for index in shared),
        tuple(right[index] for index in shared),
    )


def _noise(blocks: Iterable[BlockMetrics], metric: Metric) -> NoiseFloor | None:
    """The second turn over the first in every A/A block."""
    turns: dict[int, list[BlockMetrics]] = {}
    for block in blocks:
        if block.block.kind is BlockKind.AA:
            turns.setdefault(block.block.index, []).append(block)
    logs = []
    for pair in turns.values():
        values = [metric.of(b) for b in sorted(pair, key=lambda b: b.block.position)]
        if len(values) == 2 and values[0] and values[1]:
            logs.append(math.log(values[1] / values[0]))
    return noise_floor(logs)


def _overall(cells: Sequence[Cell], settings: JudgeSettings) -> tuple[Verdict, list[str]]:
    """The run's verdict; a GO must also hold among all the chances that the run had (Holm)."""
    valid = [cell for cell in cells if cell.verdict is not Verdict.INVALID]
    if not valid:
        return Verdict.INVALID, []
    go = [cell for cell in valid if cell.verdict is Verdict.GO]
    if go:
        adjusted = holm([cell.p_value for cell in valid])
        level = (1.0 - settings.confidence) / 2
        best = min(p for cell, p in zip(valid, adjusted, strict=True) if cell in go)
        if best <= level:
            return Verdict.GO, []
        return Verdict.INCONCLUSIVE, [
            f"{go[0].arm.name} is GO at {go[0].load.text} by itself, but of {len(valid)} "
            f"comparisons one may look so by chance (Holm: p = {best:.3f}, allowed {level:.3f}); "
            "measure more blocks"
        ]
    if all(cell.verdict is Verdict.NO_GO for cell in cells):
        return Verdict.NO_GO, []
    return Verdict.INCONCLUSIVE, []


def _missing_blocks(data: RunData, cells: Sequence[Cell]) -> list[str]:
    """That a run was judged before its end: who stops when it looks good finds chance."""
    planned = data.run.settings.get("num_blocks")
    there = dict.fromkeys(data.run.loads, 0)
    for cell in cells:
        there[cell.load] = max(there[cell.load], len(cell.sides.baseline))
    short = [f"{n} of {planned} at {load.text}" for load, n in there.items() if n < (planned or 0)]
    if not short:
        return []
    return [
        f"the run is not complete: blocks measured are {', '.join(short)}; a verdict that is read "
        "before the end is right less often than its intervals say, so run the same command again"
    ]


def _break_even(arm: ArmRecord, cells: Sequence[Cell]) -> BreakEven | None:
    """Over the closed loads that are valid, else over the open ones."""
    valid = [c for c in cells if c.arm.name == arm.name and c.verdict is not Verdict.INVALID]
    for kind, unit in (
        (LoadKind.CLOSED, "users"),
        (LoadKind.POISSON, "requests/s"),
        (LoadKind.GAMMA, "requests/s"),
    ):
        logs = {c.load.value: list(c.logs.values()) for c in valid if c.load.kind is kind}
        if (found := break_even(logs, unit)) is not None:
            return found
    return None


def _points(arm: ArmRecord, entries: Sequence[ArmAtLoad]) -> list[LoadPoint]:
    """Decode steps of baseline and arm at every closed load where acceptance is known."""
    points = []
    by_name = {(entry.arm.is_baseline or entry.arm.name, entry.load): entry for entry in entries}
    for entry in entries:
        base, users = by_name.get((True, entry.load)), entry.load.concurrency
        if entry.arm.name != arm.name or base is None or users is None:
            continue
        counts = entry.acceptance
        plain, other = (_mean_tpot_s(side.blocks) for side in (base, entry))
        if counts is None or counts.length is None or not counts.drafted or not counts.steps:
            continue
        if plain is None or other is None:
            continue
        points.append(
            LoadPoint(
                users=users,
                plain_s=plain,
                speculative_s=other * counts.length,
                num_drafted=counts.drafted / counts.steps,
                length=counts.length,
            )
        )
    return points


def _mean_tpot_s(blocks: Sequence[BlockMetrics]) -> float | None:
    values = [value for block in blocks for value in block.samples("tpot_s")]
    return fmean(values) if values else None
