"""What a judged run leaves in its folder: summary, plan, page, and CSV on request.

Owns the file names. The records beside them are :mod:`outrider.bench.store`'s; everything here can
be written again from those.
"""

from __future__ import annotations

from pathlib import Path

from outrider.bench.judgement import Judgement
from outrider.bench.plan import make_plan, write_plan
from outrider.report.page import page
from outrider.report.summary import requests_csv, summary_text, write_text

SUMMARY, PLAN, PAGE, REQUESTS = "summary.json", "plan.json", "report.html", "requests.csv"


def write_report(judgement: Judgement, folder: Path, *, csv: bool = False) -> list[Path]:
    """Write everything into an existing folder; the paths, in the order written.

    A plan that an earlier judgement left is removed when this one decides nothing.

    Raises:
        FailureError: a file cannot be written, or matplotlib is not installed; what does not need
            it is there by then.
    """
    written = [folder / SUMMARY]
    write_text(folder / SUMMARY, summary_text(judgement))
    plan = make_plan(judgement)
    if plan is None:
        (folder / PLAN).unlink(missing_ok=True)
    else:
        write_plan(plan, folder / PLAN)
        written.append(folder / PLAN)
    if csv:
        write_text(folder / REQUESTS, requests_csv(judgement))
        written.append(folder / REQUESTS)
    write_text(folder / PAGE, page(judgement))
    return [*written, folder / PAGE]
