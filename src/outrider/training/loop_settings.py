"""How the training loop runs: its settings, their checks, and the learning rate they give.

Read by :mod:`outrider.training.settings`, which holds all of a run, and by
:mod:`outrider.training.loop`, which follows them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from outrider.errors import ParameterError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How the loop runs.

    Attributes:
        epochs: passes over the data.
        tokens_per_batch: most tokens that are computed at once.
        batches_per_step: batches of one optimiser step, which several processes share.
        learning_rate: at its peak; AdamW's, warmed up linearly, then a half cosine.
        warmup_steps: of the linear part, at most a tenth of all steps.
        final_rate: fraction of the peak at the last step.
        weight_decay: on matrices; norms and biases have none.
        betas: AdamW's.
        clip_norm: largest norm of the whole gradient.
        autocast: products in bfloat16, weights and sums in float32.
        seed: of the order of the data.
        log_every: steps averaged into one line of the log.
        validate_every: steps between two looks at the held-out sequences.
        checkpoint_every: steps between two checkpoints; the last step always is one.
        keep: checkpoints that stay.

    Raises:
        ParameterError: a value is out of range.
    """

    epochs: int = 3
    tokens_per_batch: int = 4096
    batches_per_step: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_rate: float = 0.02
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 0.5
    autocast: bool = True
    seed: int = 0
    log_every: int = 10
    validate_every: int = 200
    checkpoint_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        counts = ("epochs", "tokens_per_batch", "log_every", "validate_every", "checkpoint_every")
        for name in (*counts, "batches_per_step", "keep"):
            value = getattr(self, name)
            if value < 1:
                raise ParameterError(f"{name}: {value} is below 1; give a whole number from 1 on")
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ParameterError(f"{name}: {value} is not a number above 0, such as 0.001")
        if not 0 <= self.final_rate <= 1:
            raise ParameterError(f"final_rate: {self.final_rate} is outside [0, 1]; 0.02 is usual")
        for name in ("warmup_steps", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ParameterError(f"{name}: {value} is not a number from 0 on; 0 is none")

    def deciding(self) -> dict[str, Any]:
        """What of the settings decides the result, as it comes back from JSON."""
        fields = asdict(self)
        fields["betas"] = list(fields["betas"])
        for name in ("checkpoint_every", "keep"):
            del fields[name]
        if self.batches_per_step == 1:  # what it always was before there was a choice
            del fields["batches_per_step"]
        return fields


def learning_rate(step: int, num_steps: int, settings: LoopSettings) -> float:
    """Linear warm-up, then half a cosine down to ``final_rate`` of the peak at the last step."""
    warmup = min(settings.warmup_steps, num_steps // 10)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - 1 - warmup)
    low = settings.final_rate
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
