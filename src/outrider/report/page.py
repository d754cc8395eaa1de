"""The page of a judged run: one HTML file that needs nothing else.

Owns the filling of ``page.html.j2``: charts are inlined, styles too, there is no script and no
address to load anything from. Reads :mod:`outrider.bench.judgement`.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from outrider.bench.judgement import Judgement
from outrider.bench.verdict import Verdict
from outrider.report.charts import charts, conditions_line
from outrider.report.tables import (
    acceptance_table,
    category_table,
    conditions_tables,
    contrast_table,
    findings_table,
    latency_table,
    power_table,
    published_table,
    run_table,
    verdict_table,
    workload_title,
)


def page(judgement: Judgement) -> str:
    """The whole document.

    Raises:
        FailureError: matplotlib is not installed.
    """
    run = judgement.data.run
    environment = Environment(
        loader=PackageLoader("outrider.report", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
    )
    tables = [
        category_table(judgement, groups_only=False),
        latency_table(judgement),
        acceptance_table(judgement),
        contrast_table(judgement),
        power_table(judgement),
        findings_table(judgement),
        *conditions_tables(judgement),
        run_table(judgement),
        published_table(judgement),
    ]
    drawn = charts(judgement)
    return environment.get_template("page.html.j2").render(
        verdict=str(judgement.verdict),
        verdicts=[str(verdict) for verdict in Verdict],
        headline=judgement.headline,
        remarks=judgement.remarks,
        workload=workload_title(judgement),
        decision=verdict_table(judgement),
        lists=[
            (
                "Not GO, and why",
                [
                    f"{cell.arm.name} at {cell.load.text} is {cell.verdict}: "
                    f"{'; '.join(cell.reasons)}"
                    for cell in judgement.cells
                    if cell.verdict is not Verdict.GO
                ],
            ),
            (
                "Answers compared with plain decoding's",
                [
                    f"{arm.name}: {judgement.same_answers(arm)}"
                    for arm in run.arms
                    if not arm.is_baseline
                ],
            ),
            (
                "Break-even",
                [f"{name}: {found.text}" for name, found in judgement.break_evens.items()],
            ),
        ],
        conditions=conditions_line(judgement),
        charts=[chart for chart in drawn if chart.svg],
        not_drawn=[f"{chart.title}. {chart.caption}" for chart in drawn if not chart.svg],
        tables=[table for table in tables if table.rows],
        margin=f"{judgement.settings.margin:.0%}",
    )
