"""What ``outrider train`` shows: the estimate before, the figures after, the picture.

Owns words and tables; the work is :mod:`outrider.training.run`'s. Stands between
:mod:`outrider.cli` and that.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from outrider.commands import console
from outrider.commands.console import format_bytes, format_seconds, table
from outrider.errors import FailureError
from outrider.models.memory import MemoryItem
from outrider.report.curve import draw_curve
from outrider.training.estimate import Estimate
from outrider.training.log import LOG, TIMES, read_log
from outrider.training.run import RunResult, answer_only, train_head
from outrider.training.settings import TrainSettings

CURVE = "curve.svg"
SCHEMA_VERSION = 1


def train(settings: TrainSettings, *, only_answers: bool) -> RunResult | None:
    """Run all stages, or the answers alone, with a live display.

    None where there is nothing more to tell: after the answers, and in all but the first of several
    processes that train together.

    Raises:
        OutriderError: as the stages.
    """
    with console.Stages() as stages:
        if only_answers:
            console.note(answer_only(settings, on_progress=stages))
            return None
        result = train_head(
            settings, on_progress=stages, on_notice=console.note, on_estimate=_show_estimate
        )
    if result is not None:
        _draw(settings, result)
    return result


def result_table(result: RunResult) -> list[Table]:
    """What was reached, for people."""
    training = result.training
    heads, *rows = result.report.rows()
    lossless = {True: "the same as plain decoding's", False: "DIFFERENT", None: "replayed"}
    facts = [
        ("head", str(result.head)),
        ("trained", f"{training.steps:,} steps, {training.tokens:,} tokens"),
        ("time", format_seconds(training.seconds)),
        ("predicted acceptance length", f"{training.acceptance:.2f} (held-out answers)"),
        ("texts", lossless[result.report.is_lossless]),
    ]
    if result.coverage is not None:
        facts.append(("vocabulary", f"{result.coverage:.1%} of held-out answers"))
    return [
        table(("", ""), facts, numbers_from=2),
        table(heads, rows, title="acceptance length by category", numbers_from=2),
    ]


def result_json(result: RunResult) -> dict[str, Any]:
    """The same as one document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "head": str(result.head),
        "steps": result.training.steps,
        "tokens": result.training.tokens,
        "seconds": result.training.seconds,
        "predicted_acceptance_length": result.training.acceptance,
        "coverage": result.coverage,
        "manifest": result.manifest,
        "evaluation": result.report.to_json(),
    }


def _show_estimate(plan: Estimate) -> None:
    """Disk and memory, before anything big is computed."""
    parts = (
        ("disk", plan.disk, plan.disk_bytes, plan.free_disk_bytes),
        ("memory", plan.memory, plan.memory_bytes, plan.available_bytes),
    )
    rows: list[tuple[str, str, str]] = []
    for name, items, total, free in parts:
        rows += [_row(item) for item in items]
        there = "" if free is None else f"of {format_bytes(free)} free"
        rows.append((f"{name}, in all", there, format_bytes(total)))
    console.stderr().print(table(("", "", "takes"), rows, numbers_from=2))


def _row(item: MemoryItem) -> tuple[str, str, str]:
    return item.what, item.detail, format_bytes(item.size_bytes)


def _draw(settings: TrainSettings, result: RunResult) -> None:
    """The curve; a missing plot library costs the picture only."""
    path = settings.out / CURVE
    title = f"{settings.method} for {settings.model}: {result.training.tokens:,} tokens"
    try:
        log, times = read_log(settings.out / LOG), read_log(settings.out / TIMES)
        draw_curve(log, times, path, title=title)
        console.note(f"curve: {path}")
    except FailureError as problem:
        console.note(f"warning: {problem}")
