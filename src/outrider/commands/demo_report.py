"""What the demonstration shows: the live display, the table, the verdict, the JSON document.

Owns words and layout; every figure comes from ``commands.demo``. Progress goes to stderr, the
result to stdout.
"""

from __future__ import annotations

import sys
from typing import Any, Self

from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from outrider.bench.statistics import RatioInterval
from outrider.commands import console
from outrider.commands.demo import REPEATING, REST, SCHEMA_VERSION, DemoResult, Pair, Progress, Row
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
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
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
    """How far it is, what comes next, both arms' running rates, and the time left."""
    parts = [f"{progress.num_done}/{progress.num_pairs}"]
    if progress.plain_rate is not None:
        parts.append(f"plain {progress.plain_rate:.1f}")
    if progress.speculative_rate is not None:
        parts.append(f"n-gram {progress.speculative_rate:.1f} tok/s")
    if progress.next_prompt is None:
        return " · ".join([*parts, "done"])
    parts.append(f"{console.format_seconds(progress.left_s)} left")
    parts.append(progress.next_prompt.id)
    return " · ".join(parts)


def print_result(result: DemoResult) -> None:
    """The table, its conditions and the verdict, on stdout."""
    out = console.stdout()
    columns = (
        "sampling",
        "prompts",
        "plain\ntok/s",
        "n-gram\ntok/s",
        "ratio\n(95 % interval)",
        "accept.\nlength",
        "same\ntext",
    )
    out.print(console.table(columns, [_cells(row) for row in result.rows], numbers_from=2))
    out.print(Text(conditions_line(result), style="dim"), soft_wrap=True)
    out.print(Text(verdict(result), style="bold" if result.is_lossless else ""), soft_wrap=True)
    if not result.is_lossless:
        out.print(Text(difference_line(result), style="bold red"), soft_wrap=True)


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
    """One sentence: what speculation bought where, and whether the texts are the same."""
    rows = {(row.mode, row.group): row for row in result.rows}
    modes = list(dict.fromkeys(row.mode for row in result.rows))

    def speeds(group: str) -> str:
        found = [(mode, rows[mode, group].ratio) for mode in modes]
        return " and ".join(_speed(ratio, _when(mode)) for mode, ratio in found)

    num_same, num_pairs = len(result.pairs) - len(result.differing), len(result.pairs)
    same = f"all {num_pairs}" if num_same == num_pairs else f"only {num_same} of {num_pairs}"
    return (
        f"Against plain decoding, n-gram speculation ran {speeds(REPEATING)} on prompts that "
        f"repeat their input, and {speeds(REST)} on the rest; {same} texts were the same."
    )


def difference_line(result: DemoResult) -> str:
    """Which answers differ, and what that means at this exactness level."""
    names = ", ".join(f"{pair.prompt_id} ({pair.mode})" for pair in result.differing[:5])
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
    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    return (
        row.mode.replace("temperature", "temp."),  # the table fits 80 columns
        row.group,
        rate(row.plain_rate),
        rate(row.speculative_rate),
        "-" if row.ratio is None else str(row.ratio),
        f"{row.acceptance_length:.2f}",
        f"{row.num_same}/{row.num_pairs}",
    )


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "mode": row.mode,
        "group": row.group,
        "num_pairs": row.num_pairs,
        "num_same": row.num_same,
        "plain_tokens_per_s": row.plain_rate,
        "speculative_tokens_per_s": row.speculative_rate,
        "ratio": None if row.ratio is None else row.ratio.to_json(),
        "acceptance_length": row.acceptance_length,
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "prompt_id": pair.prompt_id,
        "category": pair.category,
        "group": pair.group,
        "mode": pair.mode,
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
