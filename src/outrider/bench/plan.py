"""The decision as a file: which method, with which settings, up to which load, on what evidence.

Owns the schema of ``plan.json`` and how it follows from a judged run. Written beside a run's
report; read by whatever deploys it. A plan of the method ``off`` says that plain decoding is to be
deployed. A run that decided nothing has no plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.bench.judgement import Judgement
from outrider.bench.verdict import Cell, Verdict, lossless_sentence
from outrider.errors import FailureError

SCHEMA_VERSION: Literal[1] = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedLoad(_Strict):
    """The verdict on the planned method at one load."""

    load: str = Field(description="name of the load, such as closed:4 for four users")
    verdict: Verdict
    speedup: dict[str, Any] | None = Field(description="ratio, interval and all its conditions")
    reasons: list[str]


class PlanEvidence(_Strict):
    """Where the decision comes from."""

    started: str = Field(description="when the run began, ISO time in UTC")
    settings_hash: str = Field(description="names everything that was asked of the run")
    workload: str
    prompt_hash: str
    machine: dict[str, Any]
    versions: dict[str, str]


class Plan(_Strict):
    """What to deploy. ``loads`` are those the method was measured at, whatever came of it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    target: str = Field(description="the model whose distribution is served")
    method: str = Field(description="as in --methods; off is plain decoding")
    speculation: dict[str, Any] = Field(description="the method's settings, as far as known")
    engine: str | None
    engine_version: str | None
    precision: str | None
    temperature: float = Field(description="sampling of the measurement")
    top_p: float
    loads: list[PlannedLoad]
    break_even: dict[str, Any] | None = Field(description="where the ratio falls to 1")
    losslessness: Literal["exact", "audited", "not_audited"]
    losslessness_text: str
    headline: str
    evidence: PlanEvidence


def make_plan(judgement: Judgement) -> Plan | None:
    """The winner's plan, plain decoding's after a NO-GO; None if nothing was decided."""
    if judgement.verdict not in (Verdict.GO, Verdict.NO_GO):
        return None
    run = judgement.data.run
    arm = judgement.winner or run.baseline
    cells = list(judgement.cells) if judgement.winner is None else judgement.cells_of(arm)
    found = judgement.break_evens.get(arm.name)
    return Plan(
        target=arm.model,
        method=arm.method,
        speculation=dict(arm.speculation),
        engine=arm.engine,
        engine_version=arm.engine_version,
        precision=arm.precision,
        temperature=run.sampling.temperature,
        top_p=run.sampling.top_p,
        loads=[_planned(cell) for cell in cells],
        break_even=None if found is None else found.to_json(),
        losslessness=arm.losslessness.value,
        losslessness_text="plain decoding" if arm.is_baseline else lossless_sentence(arm),
        headline=judgement.headline,
        evidence=PlanEvidence(
            started=run.started,
            settings_hash=run.settings_hash,
            workload=run.workload.source,
            prompt_hash=run.workload.prompt_hash,
            machine=dict(run.machine),
            versions=dict(run.versions),
        ),
    )


def _planned(cell: Cell) -> PlannedLoad:
    return PlannedLoad(
        load=cell.load.name,
        verdict=cell.verdict,
        speedup=None if cell.speedup is None else cell.speedup.to_json(),
        reasons=list(cell.reasons),
    )


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan as JSON, whole or not at all.

    Raises:
        FailureError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(plan.model_dump(mode="json"), indent=2) + "\n", "utf-8")
        partial.replace(path)
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise FailureError(f"{path}: cannot be written: {problem.strerror}") from None
