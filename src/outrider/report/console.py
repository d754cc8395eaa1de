"""A judged run on a terminal: the verdict's sentence first, then the table, then what to know.

Owns the layout for :mod:`rich`; the cells come from :mod:`outrider.report.tables`. The command
prints what :func:`console_report` returns.
"""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from outrider.bench.costmodel import MIN_LOADS
from outrider.bench.findings import Severity
from outrider.bench.judgement import Judgement
from outrider.bench.verdict import Verdict
from outrider.report.tables import (
    Table,
    category_table,
    contrast_table,
    latency_table,
    verdict_table,
)

_STYLES = {
    Verdict.GO: "bold green",
    Verdict.NO_GO: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
    Verdict.INVALID: "bold magenta",
}


def console_report(judgement: Judgement) -> list[RenderableType]:
    """Everything to print, in order; each part ends its own line."""
    parts: list[RenderableType] = [
        Text(judgement.headline, style=_STYLES[judgement.verdict]),
        *(Text(f"note: {remark}") for remark in judgement.remarks),
        Text(),
        *_rich(verdict_table(judgement)),
        *_rich(category_table(judgement, groups_only=True)),
        *_rich(contrast_table(judgement, all_pairs=False)),
        *_rich(latency_table(judgement)),
    ]
    parts += [
        Text(f"{arm.name}: {judgement.same_answers(arm)}")
        for arm in judgement.data.run.arms
        if not arm.is_baseline
    ]
    parts += [Text(f"{name}: {found.text}") for name, found in judgement.break_evens.items()]
    parts += [
        Text(f"{load.text}: {judgement.noise[load.name].text}")
        for load in judgement.data.run.loads
        if load.name in judgement.noise
    ]
    parts += [
        Text(f"{name}: projection hidden: {projection.reason}")
        for name, projection in judgement.projections.items()
        if not projection.is_shown and len(judgement.data.run.loads) >= MIN_LOADS
    ]
    parts += _findings(judgement)
    return parts


def _findings(judgement: Judgement) -> list[RenderableType]:
    """Every finding once; those that void first."""
    found = {
        (finding.severity is Severity.WARNING, finding.text): finding
        for cell in judgement.cells
        for finding in cell.findings
    }
    return [
        Text(f"{finding.severity}: {finding.text}") for _, finding in sorted(found.items())
    ]  # fmt: skip


def _rich(table: Table) -> list[RenderableType]:
    """A table whose cells are taken literally and fold rather than vanish when space is short.

    With its note as text below, which has the whole width; nothing of an empty table.
    """
    if not table.rows:
        return []
    drawn = RichTable(
        title=Text(table.title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(table.columns):
        justify: Literal["left", "right"] = "right" if table.is_number(index) else "left"
        drawn.add_column(Text(name, justify=justify), justify=justify, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return [drawn, Text(table.note, style="dim"), Text()]
