"""The tables of a judged run as plain text cells, for the console, the page and CSV alike.

Owns which figures stand together and under which title; every ratio is taken out of its
:class:`~outrider.bench.speedup.Speedup` under a title and row that name workload and load. Reads
:mod:`outrider.bench.judgement`; knows neither terminal nor HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean

from outrider.bench.acceptance import UNAVAILABLE
from outrider.bench.categories import CategoryRatio, category_ratios
from outrider.bench.judgement import ArmAtLoad, Judgement
from outrider.bench.metrics import pooled
from outrider.bench.planning import detectable_ratio
from outrider.bench.records import ClientProof
from outrider.bench.reference import published_figures
from outrider.bench.samples import MIN_SAMPLES, cluster_bootstrap, is_printable, percentile
from outrider.bench.speedup import machine_text
from outrider.bench.verdict import Cell, Verdict

NONE = "-"
_IN_MACHINE_TEXT = ("processor", "num_cores", "num_usable_cores", "memory_bytes")
_MACHINE_WORDS = {"gpus": "GPUs", "load_average": "load before (1, 5, 15 min)"}
_MAX_POSITIONS = 8  # of a draft, in a table


@dataclass(frozen=True, slots=True)
class Table:
    """A title, columns and rows of text.

    Columns from ``numbers_from`` up to before ``numbers_to`` are flush right; ``is_stacked`` asks a
    narrow page to put a row's cells below each other instead of scrolling sideways.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers_from: int = 1
    numbers_to: int | None = None
    is_stacked: bool = False
    note: str = ""

    def is_number(self, index: int) -> bool:
        """Whether a column holds numbers."""
        return self.numbers_from <= index < (self.numbers_to or len(self.columns))


def workload_title(judgement: Judgement) -> str:
    """What the figures hold for, in one line; every table and chart carries it."""
    run = judgement.data.run
    return (
        f"{run.workload.source} (#{run.workload.prompt_hash}), {run.workload.num_prompts} prompts, "
        f"{run.baseline.model}"
    )


def verdict_table(judgement: Judgement) -> Table:
    """One row per arm and load: what decides, and the decision."""
    baseline = judgement.data.run.baseline.name
    title = f"Speculation against plain decoding ({baseline}), {workload_title(judgement)}"
    metrics = list(dict.fromkeys(str(cell.metric) for cell in judgement.cells))
    ttfts = list(dict.fromkeys(cell.ttft.name for cell in judgement.cells if cell.ttft is not None))
    goodput = f" Goodput: {judgement.settings.level.text}." if _has_goodput(judgement) else ""
    return Table(
        title,
        ("load", "method", "verdict", "ratio", "plain", "method's", "TTFT ratio",
         *(["goodput"] if goodput else []), "accepted", "blocks"),
        tuple(_verdict_row(judgement, cell, title) for cell in judgement.cells),
        numbers_from=3,
        is_stacked=True,
        note=f"Plain and method's: {' or '.join(metrics)}, averaged over blocks. Ratio: the "
        "geometric mean of the blocks' own ratios, so not quite that of the averages, with a "
        f"{judgement.settings.confidence:.0%} interval that is wider where several methods share "
        f"the baseline. TTFT ratio: of {' or '.join(ttfts) or 'nothing'}.{goodput} Accepted: "
        "tokens per verify step, the bonus token included.",
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
        ratio,
        *(f"{fmean(values):.1f}" if values else NONE for values in rates),
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
        numbers_to=5,
        is_stacked=True,
        note="Length: tokens per verify step, the bonus token included. Half of requests: their "
        "median length with a 95% bootstrap interval over blocks. Rate: accepted / drafted. By "
        f"position: steps that accepted it / steps, the first {_MAX_POSITIONS} positions. From: "
        "the server's counters over the blocks, or what its answers carry.",
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
        NONE
        if found.marginal is None
        else " ".join(f"{rate:.2f}" for rate in found.marginal[:_MAX_POSITIONS]),
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
        numbers_to=4,
        is_stacked=True,
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
        is_stacked=True,
        note="The baseline against itself; and the difference that the blocks of this run would "
        f"show with {judgement.settings.power:.0%} power at that noise.",
    )


def conditions_tables(judgement: Judgement) -> list[Table]:
    """Every condition: what all arms have in common, then what sets each apart.

    The first load's stand for all; loads and blocks are in the table of verdicts.
    """
    found: dict[str, dict[str, str]] = {}
    for cell in judgement.cells:
        if cell.speedup is not None and cell.arm.name not in found:
            rows = dict(cell.speedup.conditions.rows)
            found[cell.arm.name] = {k: v for k, v in rows.items() if k not in ("load", "blocks")}
    if not found:
        return []
    names = list(next(iter(found.values())))
    apart = [name for name in names if len({rows[name] for rows in found.values()}) > 1]
    first = next(iter(found.values()))
    shared = tuple((name, first[name]) for name in names if name not in apart)
    tables = [Table("Conditions of every figure", ("", ""), shared, numbers_from=2)]
    if apart:
        rows = tuple(tuple(rows[name] for name in apart) for rows in found.values())
        title = "Conditions that differ between methods"
        tables.append(Table(title, tuple(apart), rows, numbers_from=len(apart), is_stacked=True))
    return tables


def run_table(judgement: Judgement) -> Table:
    """When, where and with what was measured: machine, versions, the client's own proof."""
    run = judgement.data.run
    rows = [
        ("begun", _moment(run.started)),
        ("measured", f"{len(judgement.data.blocks)} turns, {len(judgement.data.requests)} requests "
                     f"in them, warm-ups included; settings {run.settings_hash}"),
        ("client's machine", machine_text(run.machine)),
        *(
            (_MACHINE_WORDS.get(name, name.replace("_", " ")), _plain(value))
            for name, value in run.machine.items()
            if name not in _IN_MACHINE_TEXT
        ),
        ("seeds", _plain(run.seeds)),
        ("versions", _plain(run.versions)),
        ("client", _proof_text(run.client)),
    ]  # fmt: skip
    return Table("The run", ("", ""), tuple(row for row in rows if row[1]), numbers_from=2)


def _moment(started: str) -> str:
    """``1 December 2026, 14:15 UTC`` of an ISO time in UTC; the text itself if it is none."""
    try:
        at = datetime.fromisoformat(started)
    except ValueError:
        return started
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def _plain(value: object) -> str:
    """A record's value as words: ``torch 2.13.0, numpy 2.4`` of a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        separator = "; " if any(isinstance(each, Mapping) for each in value) else ", "
        return separator.join(map(_plain, value))
    return str(value)


def _proof_text(proof: ClientProof | None) -> str:
    if proof is None:
        return "not tested before the run"
    return (
        f"at {proof.concurrency} at once it saw a mock server's gaps with an error of "
        f"{proof.gap_error_p99_s * 1000:.1f} ms (99th percentile) and kept up with "
        f"{proof.max_tokens_per_s:.0f} tokens/s"
    )


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
        is_stacked=True,
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
        is_stacked=True,
        note="Not a target for this run: model, prompts, load, machine and definitions differ.",
    )
