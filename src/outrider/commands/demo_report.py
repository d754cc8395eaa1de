"""What the demonstration shows: the live display, the tables, the verdict, the JSON document.

Owns words and layout; every figure comes from ``commands.demo_figures``. Progress goes to stderr,
the result to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Self

from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column, Table
from rich.text import Text

from outrider.bench.statistics import RatioInterval
from outrider.commands import console
from outrider.commands.demo import PLAIN, SCHEMA_VERSION, Progress
from outrider.commands.demo_figures import (
    ALL,
    MIN_PER_CATEGORY,
    CategoryRow,
    DemoResult,
    Pair,
    Row,
)
from outrider.types import Completion


class Display:
    """The live display of a running demonstration; a line per prompt without a terminal.

    It is redrawn between answers only: a background thread would take time from the very
    processor that is being measured, and at a different share of each arm.
    """

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            line = Column(no_wrap=True, overflow="ellipsis")  # many methods make it a long one
            columns = (
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False, table_column=line),
            )
            self._bar = ProgressBar(
                *columns, console=console.stderr(), transient=True, auto_refresh=False
            )
            self._task = self._bar.add_task("warming up", total=None)
            self._bar.start()
            self._bar.refresh()
        else:
            console.note("demo: warming up")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __call__(self, progress: Progress) -> None:
        """Show how far it is."""
        line = progress_line(progress)
        if self._bar is None or self._task is None:
            console.note(f"demo: {line}")
            return
        self._bar.update(
            self._task, total=progress.num_pairs, completed=progress.num_done, description=line
        )
        self._bar.refresh()


def progress_line(progress: Progress) -> str:
    """How far it is, the time left, what comes next, and every arm's running rate."""
    parts = [f"{progress.num_done}/{progress.num_pairs}"]
    if progress.next_prompt is None:
        parts.append("done")
    else:
        parts.append(f"{console.format_seconds(progress.left_s)} left")
        parts.append(progress.next_prompt.id)
    rates = [f"{name} {rate:.1f}" for name, rate in progress.rates if rate is not None]
    if rates:
        parts.append(f"tok/s: {', '.join(rates)}")
    return " · ".join(parts)


def print_result(result: DemoResult) -> None:
    """The tables, their conditions and the verdict, on stdout."""
    out = console.stdout()
    for mode in result.modes:
        out.print(mode_table(result, mode))
    if any(row.ratio is not None for row in result.categories):
        out.print(category_table(result))
    else:
        few = f"ratios by category need {MIN_PER_CATEGORY} prompts of one; give it more --minutes"
        out.print(Text(few, style="dim"), soft_wrap=True)
    out.print(Text(shapes_line(result), style="dim"), soft_wrap=True)
    out.print(Text(conditions_line(result), style="dim"), soft_wrap=True)
    out.print(Text(verdict(result), style="bold" if result.is_lossless else ""), soft_wrap=True)
    if not result.is_lossless:
        out.print(Text(difference_line(result), style="bold red"), soft_wrap=True)


def mode_table(result: DemoResult, mode: str) -> Table:
    """One sampling mode, all prompts: plain decoding, then a line for each method."""
    rows = [row for row in result.rows if (row.mode, row.group) == (mode, ALL)]
    columns = ("method", "tok/s", "ratio\n(95 % interval)", "accept.\nlength", "same\ntexts")
    plain = (PLAIN, _rate(rows[0].plain_rate), "", "", "")
    title = f"{mode}, {rows[0].num_pairs} prompts"
    return console.table(columns, [plain, *(_cells(row) for row in rows)], title=title)


def category_table(result: DemoResult) -> Table:
    """Each method's ratio by category, all sampling modes together; groups with their interval."""
    by_category: dict[str, list[CategoryRow]] = {}
    for row in result.categories:
        by_category.setdefault(row.category, []).append(row)
    cells = [
        (
            name if rows[0].is_group else f"  {name}",
            str(max(row.num_prompts for row in rows)),
            *(_ratio(row) for row in rows),
        )
        for name, rows in by_category.items()
    ]
    names = (name.replace("+", "\n+") for name in result.methods)  # two lines are narrower
    title = f"ratio by category, {' and '.join(result.modes)} together"
    return console.table(("prompts", "number", *names), cells, title=title)


def shapes_line(result: DemoResult) -> str:
    """How much each method drafted at most, and by which head, in one line."""
    return " · ".join(
        f"{name}: {_shape(known)}" for name, known in result.conditions["speculation"].items()
    )


def conditions_line(result: DemoResult) -> str:
    """What the figures hold for, in one line."""
    known = result.conditions
    return " · ".join(
        (
            known["conditions"],
            f"{known['num_prompts']} of {known['num_prompts_available']} bundled prompts "
            f"(set {known['prompt_set_hash']}, {known['num_categories']} categories)",
            f"{known['max_tokens']} tokens at most",
            "one request at a time",
            f"outrider {known['version']}",
            known["date"],
            f"{console.format_seconds(result.elapsed_s)} in all",
            f"peak memory {console.format_bytes(result.peak_memory_bytes)}",
        )
    )


def verdict(result: DemoResult) -> str:
    """One sentence: what each method bought, and whether the texts are the same."""
    ratios = {(row.method, row.mode): row.ratio for row in result.rows if row.group == ALL}

    def speeds(method: str) -> str:
        found = [(ratios[method, mode], _when(mode)) for mode in result.modes]
        return f"{method} ran {' and '.join(_speed(ratio, when) for ratio, when in found)}"

    num_same, num_pairs = len(result.pairs) - len(result.differing), len(result.pairs)
    same = f"all {num_pairs}" if num_same == num_pairs else f"only {num_same} of {num_pairs}"
    return (
        f"Against plain decoding, {'; '.join(speeds(method) for method in result.methods)}; "
        f"{same} texts were the same."
    )


def difference_line(result: DemoResult) -> str:
    """Which answers differ, and what that means at this exactness level."""
    names = ", ".join(
        f"{pair.prompt_id} ({pair.method}, {pair.mode})" for pair in result.differing[:5]
    )
    more = f" and {len(result.differing) - 5} more" if len(result.differing) > 5 else ""
    level = result.conditions["fingerprint"].get("level")
    meaning = (
        "expected only as numeric near ties at exactness L3"
        if level == "L3"
        else "this breaks the promise of identical text: please report it with the --json output"
    )
    return f"DIFFERENT TEXTS: {names}{more}; {meaning}."


def to_json(result: DemoResult) -> dict[str, Any]:
    """The result as one JSON document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "conditions": result.conditions,
        "elapsed_s": result.elapsed_s,
        "peak_memory_bytes": result.peak_memory_bytes,
        "is_lossless": result.is_lossless,
        "verdict": verdict(result),
        "rows": [_row_json(row) for row in result.rows],
        "categories": [_category_json(row) for row in result.categories],
        "pairs": [_pair_json(pair) for pair in result.pairs],
    }


def _when(mode: str) -> str:
    return "when greedy" if mode == "greedy" else f"at {mode}"


def _speed(ratio: RatioInterval | None, when: str) -> str:
    """A ratio with the word that its interval allows."""
    if ratio is None:
        return f"at an unknown speed {when}"
    word = "faster" if ratio.is_faster else "slower" if ratio.is_slower else "no clear difference"
    return f"{ratio.ratio:.2f}x as fast {when} ({word})"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.method,
        _rate(row.speculative_rate),
        "-" if row.ratio is None else str(row.ratio),
        f"{row.acceptance_length:.2f}",
        f"{row.num_same}/{row.num_pairs}",
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(row: CategoryRow) -> str:
    """A dash where there is too little, and a category's ratio without its interval.

    Two or three prompts' interval is so wide that it hides the table.
    """
    ratio = row.ratio
    if ratio is None:
        return "-"
    return (
        f"{ratio.ratio:.2f}\n{ratio.low:.2f}-{ratio.high:.2f}"
        if row.is_group
        else f"{ratio.ratio:.2f}"
    )


def _shape(speculation: Mapping[str, Any]) -> str:
    """A configuration's bounds in words."""
    nodes, depth = speculation["max_total_draft_tokens"], speculation["max_draft_len"]
    is_tree = speculation["use_dynamic_tree"]
    shape = f"tree of {nodes} tokens, {depth} deep" if is_tree else f"chain of {depth} tokens"
    head = speculation["head"]
    return shape if head is None else f"{shape} (head {head})"


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "mode": row.mode,
        "method": row.method,
        "group": row.group,
        "num_pairs": row.num_pairs,
        "num_same": row.num_same,
        "plain_tokens_per_s": row.plain_rate,
        "speculative_tokens_per_s": row.speculative_rate,
        "ratio": None if row.ratio is None else row.ratio.to_json(),
        "acceptance_length": row.acceptance_length,
    }


def _category_json(row: CategoryRow) -> dict[str, Any]:
    return {
        "method": row.method,
        "category": row.category,
        "is_group": row.is_group,
        "num_prompts": row.num_prompts,
        "ratio": None if row.ratio is None else row.ratio.to_json(),
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "prompt_id": pair.prompt_id,
        "category": pair.category,
        "group": pair.group,
        "mode": pair.mode,
        "method": pair.method,
        "is_same": pair.is_same,
        "plain": _completion_json(pair.plain),
        "speculative": _completion_json(pair.speculative),
    }


def _completion_json(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "finish_reason": completion.finish_reason.value,
        "first_token_s": completion.timing.first_token_s,
        "decode_s": completion.timing.decode_s,
        "total_s": completion.timing.total_s,
        "verify_steps": completion.speculation.verify_steps,
        "drafted": completion.speculation.drafted,
        "accepted": completion.speculation.accepted,
        "acceptance_length": completion.speculation.acceptance_length,
        "error": completion.error,
    }
