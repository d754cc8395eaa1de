"""A judged run as one JSON document, and its rows as CSV.

Owns the schema of ``summary.json``: verdict, cells, figures, conditions; everything that the page
shows and nothing that the records beside it do not hold. Reads :mod:`outrider.bench.judgement`.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.categories import category_ratios
from outrider.bench.judgement import ArmAtLoad, Judgement
from outrider.bench.metrics import distribution, pooled
from outrider.bench.plan import make_plan
from outrider.bench.reference import published_figures
from outrider.errors import FailureError

SCHEMA_VERSION = 1
SERIES = ("ttft_s", "tpot_s", "chunk_gap_s", "latency_s", "rate")


def summary(judgement: Judgement) -> dict[str, Any]:
    """Plain values; ratios only inside speed-ups, which carry their conditions."""
    run = judgement.data.run
    plan = make_plan(judgement)
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": str(judgement.verdict),
        "exit_status": judgement.verdict.exit_status,
        "headline": judgement.headline,
        "remarks": list(judgement.remarks),
        "winner": None if judgement.winner is None else judgement.winner.name,
        "thresholds": judgement.settings.to_json(),
        "run": {
            "started": run.started,
            "workload": asdict(run.workload),
            "sampling": asdict(run.sampling),
            "loads": [load.name for load in run.loads],
            "arms": [asdict(arm) for arm in run.arms],
            "machine": dict(run.machine),
            "versions": dict(run.versions),
            "seeds": dict(run.seeds),
            "settings": dict(run.settings),
            "settings_hash": run.settings_hash,
            "client": None if run.client is None else asdict(run.client),
            "num_blocks": len(judgement.data.blocks),
            "num_requests": len(judgement.data.requests),
        },
        "cells": [
            cell.to_json() | {"categories": [one.to_json() for one in category_ratios(cell)]}
            for cell in judgement.cells
        ],
        "figures": [_figures(judgement, entry) for entry in judgement.arms],
        "noise": {name: floor.to_json() for name, floor in judgement.noise.items()},
        "break_even": {name: found.to_json() for name, found in judgement.break_evens.items()},
        "projections": {name: found.to_json() for name, found in judgement.projections.items()},
        "contrasts": [contrast.to_json() for contrast in judgement.contrasts],
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "published": [
            figure.to_json()
            for figure in published_figures(arm.method for arm in run.arms if not arm.is_baseline)
        ],
    }


def _figures(judgement: Judgement, entry: ArmAtLoad) -> dict[str, Any]:
    """One arm at one load: distributions, rates by block, acceptance, time."""
    level = judgement.settings.level
    found = entry.acceptance
    series = {name: distribution(pooled(entry.blocks, name)) for name in SERIES}
    split = entry.time_split
    return {
        "arm": entry.arm.name,
        "load": entry.load.name,
        **{name: None if values is None else values.to_json() for name, values in series.items()},
        "blocks": [
            {
                "index": block.block.index,
                "num_requests": len(block.requests),
                "num_failed": len(block.requests) - len(block.sound),
                "num_tokens": block.num_tokens,
                "elapsed_s": block.elapsed_s,
                "whole_rate": block.whole_rate,
                "steady_rate": block.steady_rate,
                "user_rate": block.user_rate,
                "goodput": block.goodput(level) if level.is_set else None,
                "attainment": block.attainment(level) if level.is_set else None,
            }
            for block in entry.blocks
        ],
        "decode_rate": [block.decode_rate for block in entry.blocks],
        "acceptance": "unavailable" if found is None else found.to_json(),
        "acceptance_by_category": {
            name: of_category.to_json()
            for name, of_category in entry.acceptance_by_category.items()
        },
        "step_time": "unavailable" if split is None else split.to_json(),
    }


def requests_csv(judgement: Judgement) -> str:
    """One row per measured request; empty where a figure does not exist."""
    columns = ("arm", "load", "block", "position", "prompt_id", "category", "prompt_tokens",
               "completion_tokens", "token_source", "finish_reason", "error")  # fmt: skip
    derived = ("queue_wait_s", "ttft_s", "tpot_s", "latency_s", "rate")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*columns, *derived))
    for entry in judgement.arms:
        for block in entry.blocks:
            for request in block.requests:
                record = request.record
                plain = [
                    record.load.name if name == "load" else getattr(record, name)
                    for name in columns
                ]
                writer.writerow((*map(_cell, plain), *(getattr(request, name) for name in derived)))
    return out.getvalue()


def _cell(value: object) -> object:
    """Text that a spreadsheet would run as a formula is kept as text."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@")
    return f"'{value}" if is_formula else value


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        FailureError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise FailureError(f"{path}: cannot be written: {problem.strerror}") from None


def summary_text(judgement: Judgement) -> str:
    """The document as it is written; no number that JSON does not have."""
    return json.dumps(summary(judgement), indent=2, allow_nan=False) + "\n"
