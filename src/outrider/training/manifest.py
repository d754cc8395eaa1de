"""What a run says of itself: what decides its weights, and what its head is published with.

Owns the two records as JSON values: a checkpoint carries the first, so that it is not continued
with other settings; the head's ``manifest.json`` and ``run.json`` hold the second. Written by
:mod:`outrider.training.run`.
"""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import asdict
from typing import Any

import outrider
from outrider.models.machine import Fingerprint
from outrider.selfcheck import RECORDED_CHAIN
from outrider.training.acceptance import ALL, EvaluationReport
from outrider.training.data import TrainingData
from outrider.training.identity import TargetIdentity
from outrider.training.loop import TrainingResult
from outrider.training.recipes import Options, step_weights
from outrider.training.settings import TrainSettings
from outrider.vocabulary import DraftVocabulary

_OF_EVALUATION = (
    "num_prompts",
    "prompt_set_hash",
    "temperatures",
    "max_tokens",
    "seed",
    "is_simulated",
)


def describe_weights(
    settings: TrainSettings,
    data: TrainingData,
    identity: TargetIdentity,
    options: Options,
    vocabulary: DraftVocabulary | None,
) -> dict[str, Any]:
    """What decides the weights beside the loop's settings, as JSON gives it back."""
    weights = step_weights(settings.method, settings.num_steps, settings.step_decay)
    about = {
        "method": settings.method.value,
        "target": asdict(identity),
        "data": data.describe(),
        "options": asdict(options),
        "objective": {
            "step_weights": weights,
            "loss": settings.loss,
            "loss_on": settings.loss_on,
            "draft_vocab_size": None if vocabulary is None else vocabulary.size,
        },
    }
    return json.loads(json.dumps(about))


def describe_run(
    about: dict[str, Any],
    settings: TrainSettings,
    result: TrainingResult,
    *,
    coverage: float | None,
    machine: Fingerprint,
) -> dict[str, Any]:
    """What a head's manifest says of its training, but for what was measured then.

    ``about`` is :func:`describe_weights`' account; the manifest names the target itself.
    """
    return {
        **{name: value for name, value in about.items() if name != "target"},
        "command": settings.command,
        "loop": asdict(settings.loop),
        "prompts": [file.name for file in settings.data_settings.files] or "prompt book",
        "answers": asdict(settings.data_settings.responses),
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": round(result.seconds),
        "predicted_acceptance_length": result.acceptance,
        "coverage": coverage,
        "machine": machine.text,
        "python": platform.python_version(),
        "outrider": outrider.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe_evaluation(report: EvaluationReport) -> dict[str, Any]:
    """What a head's manifest says of its evaluation: rounded lengths, and what they hold for."""
    lengths: dict[str, dict[str, dict[str, float]]] = {}
    for entry in report.acceptances:
        temperature = f"{entry.temperature:g}"
        by_category = lengths.setdefault(entry.setting, {}).setdefault(temperature, {})
        by_category[entry.category] = round(entry.acceptance_length, 3)
    return {
        "acceptance_length": lengths,
        "evaluation": {name: report.conditions[name] for name in _OF_EVALUATION},
    }


def recorded_chain(report: EvaluationReport) -> float | None:
    """The greedy chain's acceptance length, which the self-check compares with later."""
    for entry in report.acceptances:
        setting = entry.setting.endswith(f" chain {RECORDED_CHAIN}")
        if setting and entry.temperature == 0 and entry.category == ALL:
            return entry.acceptance_length
    return None
