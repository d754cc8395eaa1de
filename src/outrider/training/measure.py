"""The evaluation as a stage of a run: a finished head is measured once.

Owns whether an earlier report still holds, and which prompts a run measures on. Stands between
:mod:`outrider.training.run` and the measurement itself (:mod:`outrider.training.evaluate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.bench.prompts import Prompt
from outrider.errors import CheckpointError
from outrider.llm import LLM
from outrider.training.acceptance import EvaluationReport
from outrider.training.evaluate import evaluate, standard_settings
from outrider.training.files import read_json, write_json
from outrider.training.settings import TrainSettings
from outrider.types import ProgressCallback


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    settings: TrainSettings,
    *,
    head: Path,
    head_sha256: str,
    path: Path,
    on_progress: ProgressCallback | None,
) -> EvaluationReport:
    """The head's figures; those at ``path`` where they are of the same head and conditions.

    Args:
        llm: the target.
        prompts: all that may be measured on; ``settings.eval_limit`` chooses among them.
        settings: the run's.
        head: the exported folder.
        head_sha256: names its tensors.
        path: of the report, which is read and written.
        on_progress: told the setting and the fraction done.

    Raises:
        OutriderError: as :func:`~outrider.training.evaluate.evaluate`.
        CapacityError, CheckpointError: the report cannot be written.
    """
    known = _read(path)
    report = evaluate(
        llm,
        _selected(prompts, settings.eval_limit),
        standard_settings(settings.method, str(head)),
        max_tokens=settings.eval_tokens,
        simulated=settings.simulated,
        head_sha256=head_sha256,
        known=known,
        on_progress=on_progress,
    )
    if report is not known:
        write_json(path, report.to_json())
    return report


def _selected(prompts: Sequence[Prompt], limit: int | None) -> Sequence[Prompt]:
    if limit is None or limit >= len(prompts):
        return prompts
    stride = len(prompts) / limit  # all over the file, so of all categories
    return [prompts[int(i * stride)] for i in range(limit)]


def _read(path: Path) -> EvaluationReport | None:
    """The report of an earlier run; None where there is none that can be read."""
    try:
        document = read_json(path)
        return None if document is None else EvaluationReport.from_json(document)
    except CheckpointError:  # damaged, or of another version: measured again and replaced
        return None
