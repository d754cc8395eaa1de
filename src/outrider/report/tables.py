"""The tables of a judged run as plain text cells, for the console, the page and CSV alike.

Owns which figures stand together and under which title; every ratio is taken out of its
:class:`~outrider.bench.speedup.Speedup` under a title and row that name workload and load. Reads
:mod:`outrider.bench.judgement`; knows neither terminal nor HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.bench.acceptance import UNAVAILABLE
from outrider.bench.categories import CategoryRatio, category_ratios
from outrider.bench.judgement import ArmAtLoad, Judgement
from outrider.bench.metrics import pooled
from outrider.bench.planning import detectable_ratio
from outrider.bench.reference import published_figures
from outrider.bench.samples import MIN_SAMPLES, cluster_bootstrap, is_printable, percentile
from outrider.bench.verdict import Cell, Verdict

NONE = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """A title, columns and rows of text; ``numbers_from`` is the first column flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers_from: int = 1
    note: str = ""


def workload_title(judgement: Judgement) -> str:
    """What the figures hold for, in one line; every table and chart carries it."""
    run = judgement.data.run
    return (
        f"{run.workload.source} (#{run.workload.prompt_hash}), {run.workload.num_prompts} prompts, "
        f"{run.baseline.model}"
    )


def verdict_table(judgement: Judgement) -> Table:
    """One row per arm and load: what decides, and the decision."""
    title = f"Speculation against {judgement.data.run.baseline.name}, {workload_title(judgement)}"
    metrics = list(dict.fromkeys(str(cell.metric) for cell in judgement.cells))
    ttfts = list(dict.fromkeys(cell.ttft.name for cell in judgement.cells if cell.ttft is not None))
    goodput = f" Goodput: {judgement.settings.level.text}." if _has_goodput(judgement) else ""
    return Table(
        title,
        ("load", "method", "verdict", "plain", "method's", "ratio", "TTFT ratio",
         *(["goodput"] if goodput else []), "accepted", "blocks"),
        tuple(_verdict_row(judgement, cell, title) for cell in judgement.cells),
        numbers_from=3,
        note=f"Plain, method's and their ratio: {' or '.join(metrics)}, with "
        f"{judgement.settings.confidence:.0%} intervals, wider where several methods share the "
        f"baseline. TTFT ratio: of {' or '.join(ttfts) or 'nothing'}.{goodput} Accepted: tokens "
        "per verify step, the bonus token included.",
    )  # fmt: skip


def _has_goodput(judgement: Judgement) -> bool:
    """Whether a service level was set; without one the column would be empty."""
    return judgement.settings.level.is_set


def _verdict_row(judgement: Judgement, cell: Cell, title: str) -> tuple[str, ...]:
    entry = judgement.at(cell.arm.name, cell.load)
    acceptance = None if entry is None else entry.acceptance
    is_valid = cell.verdict is not Verdict.INVALID
    ratio = NONE
    if cell.speedup is not None and is_valid:
        ratio = cell.speedup.within(f"{title} {cell.load.text}")
    rates = [
        [value for block in blocks if (value := cell.metric.of(block)) is not None]
        for blocks in (cell.sides.baseline, cell.sides.speculative)
    ]
    goodput = NONE if cell.goodput is None else f"{cell.goodput.mean:+.0%}"
    return (
        cell.load.text,
        cell.arm.name,
        str(cell.verdict),
        *(f"{fmean(values):.1f}" if values else NONE for values in rates),
        ratio,
        str(cell.ttft.interval) if cell.ttft is not None and is_valid else NONE,
        *([goodput] if _has_goodput(judgement) else []),
        UNAVAILABLE if acceptance is None else acceptance.text,
        str(len(cell.logs)),
    )


def category_table(judgement: Judgement, *, groups_only: bool) -> Table:
    """One row per load and category or group of them, a column per method.

    With ``groups_only`` the groups alone, or the categories where there are no groups.
    """
    title = f"Ratio by kind of prompt, {workload_title(judgement)}"
    methods = [arm.name for arm in judgement.data.run.arms if not arm.is_baseline]
    rows = []
    for load in judgement.data.run.loads:
        found = {
            cell.arm.name: category_ratios(cell) for cell in judgement.cells if cell.load == load
        }
        first = max(found.values(), key=len, default=[])
        has_groups = any(entry.is_group for entry in first)
        for entry in first:
            if groups_only and has_groups and not entry.is_group:
                continue
            mine = [_named(found.get(method, []), entry.name) for method in methods]
            indent = (
                "" if entry.is_group or not has_groups or groups_only else "\N{NO-BREAK SPACE}" * 2
            )
            rows.append(
                (
                    load.text,
                    f"{indent}{entry.name}",
                    str(entry.num_prompts),
                    *(
                        NONE if one is None else one.speedup.within(f"{title} {load.text}")
                        for one in mine
                    ),
                )
            )
    return Table(
        title,
        ("load", "prompts", "number", *methods),
        tuple(rows),
        numbers_from=2,
        note="Output tokens/s per user over plain decoding's, prompt by prompt, with 95% intervals "
        "over blocks.",
    )


def _named(ratios: Sequence[CategoryRatio], name: str) -> CategoryRatio | None:
    return next((ratio for ratio in ratios if ratio.name == name), None)


def latency_table(judgement: Judgement) -> Table:
    """One row per arm and load, the baseline too: what users saw.

    The tail is the highest percentile that every row has the requests for; gaps have more.
    """
    fewest = min((len(pooled(e.blocks, "ttft_s")) for e in judgement.arms), default=0)
    tail = next((percent for percent in (95, 90, 75) if is_printable(fewest, percent)), None)
    percents = {name: (50, *([tail] if tail else [])) for name in ("ttft_s", "tpot_s")}
    percents["chunk_gap_s"] = (50, 95)
    words = {"ttft_s": "TTFT", "tpot_s": "TPOT", "chunk_gap_s": "gap"}
    columns = [f"{words[name]} p{each}" for name, these in percents.items() for each in these]
    return Table(
        f"Latencies and rates, {workload_title(judgement)}",
        ("load", "method", *columns, "per user", "aggregate"),
        tuple(_latency_row(entry, percents) for entry in judgement.arms),
        numbers_from=2,
        note="Milliseconds and output tokens/s, over all blocks. TTFT and rates count from when a "
        "request was due. A gap lies between two chunks, however many tokens they hold. A "
        f"95th percentile needs {MIN_SAMPLES[95]} samples.",
    )


def _latency_row(entry: ArmAtLoad, percents: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    cells = [
        _milliseconds(pooled(entry.blocks, name), percent)
        for name, these in percents.items()
        for percent in these
    ]
    for rates in (
        [block.user_rate for block in entry.blocks],
        [block.whole_rate for block in entry.blocks],
    ):
        known = [rate for rate in rates if rate is not None]
        cells.append(f"{fmean(known):.1f}" if known else NONE)
    return entry.load.text, entry.arm.name, *cells


def _milliseconds(values: Sequence[float], percent: int) -> str:
    value = percentile(values, percent)
    if value is None:
        return NONE
    if not is_printable(len(values), percent):
        return "too few"
    return f"{value * 1000:.1f}"


def acceptance_table(judgement: Judgement) -> Table:
    """One row per speculative arm and load: lengths with their spread over requests, rates."""
    return Table(
        f"Acceptance, {workload_title(judgement)}",
        ("load", "method", "length", "half of requests", "rate", "by position", "from"),
        tuple(_acceptance_row(entry) for entry in judgement.arms if not entry.arm.is_baseline),
        numbers_from=2,
        note="Length: tokens per verify step, the bonus token included. Half of requests: their "
        "median length with a 95 % bootstrap interval over blocks. Rate: accepted / drafted. By "
        "position: steps that accepted it / steps.",
    )


def _acceptance_row(entry: ArmAtLoad) -> tuple[str, ...]:
    found = entry.acceptance
    if found is None:
        return entry.load.text, entry.arm.name, UNAVAILABLE, NONE, NONE, NONE, NONE
    lengths = [
        [
            1.0 + said.accepted / said.steps
            for request in block.sound
            if (said := request.record.speculative) is not None
            and said.accepted is not None
            and said.steps
        ]
        for block in entry.blocks
    ]
    middle = percentile([length for block in lengths for length in block], 50)
    spread = cluster_bootstrap(lengths, 50)
    return (
        entry.load.text,
        entry.arm.name,
        found.text,
        NONE
        if middle is None or spread is None
        else f"{middle:.2f} ({spread[0]:.2f}-{spread[1]:.2f})",
        NONE if found.rate is None else f"{found.rate:.0%}",
        NONE if found.marginal is None else " ".join(f"{rate:.2f}" for rate in found.marginal[:8]),
        found.source,
    )


def contrast_table(judgement: Judgement, *, all_pairs: bool = True) -> Table:
    """Methods against each other, tree against linear first.

    Without ``all_pairs`` only tree against linear and the winner against the others, where there is
    a winner: with many methods most pairs decide nothing.
    """
    title = f"Methods against each other, {workload_title(judgement)}"
    winner = judgement.winner
    shown = [
        contrast
        for contrast in judgement.contrasts
        if all_pairs
        or winner is None
        or contrast.is_tree_against_linear
        or winner.name in (contrast.other.name, contrast.simpler.name)
    ]
    notes = {
        id(contrast): "their other settings differ"
        for contrast in shown
        if contrast.is_tree_against_linear and not contrast.is_matched
    }
    rows = tuple(
        (
            contrast.load.text,
            contrast.other.name,
            contrast.simpler.name,
            contrast.speedup.within(f"{title} {contrast.load.text}"),
            f"{contrast.winner.name}{' (tie: the simpler)' if contrast.is_tie else ''}",
            *([notes.get(id(contrast), "")] if notes else []),
        )
        for contrast in sorted(shown, key=lambda contrast: not contrast.is_tree_against_linear)
    )
    return Table(
        title,
        ("load", "method", "over", "ratio", "deploy", *(["note"] if notes else [])),
        rows,
        numbers_from=3,
        note="On the same blocks, so the baseline cancels out. The simpler one wins unless the "
        f"other is shown to be faster by more than {judgement.settings.tie_margin:.0%}.",
    )


def power_table(judgement: Judgement) -> Table:
    """Per load: the noise floor, and the smallest gain that so many blocks find."""
    rows = []
    for load in judgement.data.run.loads:
        floor = judgement.noise.get(load.name)
        counts = [len(cell.logs) for cell in judgement.cells if cell.load == load]
        seen = None
        if floor is not None and floor.spread is not None and counts:
            seen = detectable_ratio(
                min(counts), floor.spread, wanted_power=judgement.settings.power
            )
        rows.append(
            (
                load.text,
                "no A/A blocks" if floor is None else floor.text,
                NONE if seen is None else f"{seen - 1.0:.1%}",
            )
        )
    return Table(
        f"What this run could see, {workload_title(judgement)}",
        ("load", "noise floor", "smallest difference found"),
        tuple(rows),
        numbers_from=2,
        note="The baseline against itself; and the difference that the blocks of this run would "
        f"show with {judgement.settings.power:.0%} power at that noise.",
    )


def conditions_tables(judgement: Judgement) -> list[Table]:
    """Every condition, one table per arm; the first load's stand for all."""
    tables = []
    for arm in judgement.data.run.arms:
        cells = [cell for cell in judgement.cells_of(arm) if cell.speedup is not None]
        if cells and cells[0].speedup is not None:
            rows = tuple(
                row for row in cells[0].speedup.conditions.rows if row[0] not in ("load", "blocks")
            )
            tables.append(Table(f"Conditions of {arm.name}", ("", ""), rows, numbers_from=2))
    return tables


def findings_table(judgement: Judgement) -> Table:
    """What the guards found, each text once with the cells it is about."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for cell in judgement.cells:
        for finding in cell.findings:
            key = (str(finding.severity), finding.guard, finding.text)
            places.setdefault(key, []).append(f"{cell.arm.name} at {cell.load.text}")
    rows = tuple((*key, ", ".join(where)) for key, where in sorted(places.items(), reverse=True))
    return Table(
        "What the guards found",
        ("", "guard", "what was seen", "where"),
        rows,
        numbers_from=4,
    )


def published_table(judgement: Judgement) -> Table:
    """What others reported of the same drafters, each with its conditions."""
    methods = [arm.method for arm in judgement.data.run.arms if not arm.is_baseline]
    rows = tuple(
        (
            figure.value,
            figure.metric,
            figure.conditions,
            NONE if figure.acceptance_length is None else f"{figure.acceptance_length:.2f}",
            figure.source + ("" if figure.is_primary else " (second-hand)"),
            figure.caveat,
        )
        for figure in published_figures(methods)
    )
    return Table(
        "Published elsewhere, under other conditions",
        ("value", "metric", "conditions", "accepted", "source", "caveat"),
        rows,
        numbers_from=6,
        note="Not a target for this run: model, prompts, load, machine and definitions differ.",
    )
