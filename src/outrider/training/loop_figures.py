"""What the training loop counts, and what a person sees of it while it runs.

Owns sums over batches and the live line; the loop (:mod:`outrider.training.loop`) fills them, the
log keeps ``Counts.to_json``.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from outrider.training.recipes import StepResults, predicted_acceptance
from outrider.types import ProgressCallback

_REPORT_EVERY_S = 0.5
_SMOOTHING = 0.95  # of the figures that are shown, not of those that are logged


@dataclass(slots=True)
class Counts:
    """Sums of ``StepResults`` over batches."""

    loss: list[float]
    rows: list[int]
    hits: list[int]
    tested: list[int]
    joint: list[int]

    @classmethod
    def none(cls) -> Counts:
        """Before any batch."""
        return cls([], [], [], [], [])

    def add(self, results: StepResults) -> None:
        """Count a batch."""
        self.merge(Counts(*(getattr(results, f"{name}_S").tolist() for name in self.__slots__)))

    def merge(self, other: Counts) -> None:
        """Count what another counted."""
        for name in self.__slots__:
            sums, new = getattr(self, name), getattr(other, name)
            sums += [0] * (len(new) - len(sums))
            setattr(self, name, [a + b for a, b in zip(sums, new, strict=True)])

    @property
    def accuracy(self) -> list[float]:
        """Share of rows predicted right, by step, in 0..1."""
        return [hits / max(1, rows) for hits, rows in zip(self.hits, self.rows, strict=True)]

    @property
    def acceptance(self) -> float:
        """Predicted acceptance length, bonus included."""
        return predicted_acceptance(self.tested, self.joint)

    def to_json(self) -> dict[str, Any]:
        """The means, for the log."""
        return {
            "losses": [x / max(1, n) for x, n in zip(self.loss, self.rows, strict=True)],
            "accuracy": self.accuracy,
            "acceptance": self.acceptance,
        }


class LiveLine:
    """What a person sees while it runs."""

    def __init__(self, on_progress: ProgressCallback | None) -> None:
        self._on_progress = on_progress
        self._accuracy: list[float] = []
        self._loss = math.nan
        self._acceptance = math.nan
        self._due_s = 0.0

    def begin(self, tokens: int) -> None:
        """Training goes on from so many tokens."""
        self._tokens_before, self._began_s = tokens, time.perf_counter()

    def step(self, step: int, num_steps: int, tokens: int, counts: Counts) -> None:
        """An optimiser step is done; shown if enough time has gone by."""
        if self._on_progress is None:
            return
        accuracy, loss = counts.accuracy, counts.loss[0] / max(1, counts.rows[0])
        if self._accuracy:
            old = zip(self._accuracy, accuracy, strict=True)
            accuracy = [_SMOOTHING * a + (1 - _SMOOTHING) * b for a, b in old]
            loss = _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
        self._accuracy, self._loss = accuracy, loss
        now = time.perf_counter()
        if now < self._due_s and step < num_steps:
            return
        self._due_s = now + _REPORT_EVERY_S
        rate = (tokens - self._tokens_before) / max(1e-9, now - self._began_s)
        left = (num_steps - step) * (now - self._began_s) * tokens / max(1, step)
        left /= max(1, tokens - self._tokens_before)
        shown = " ".join(f"{value:.2f}" for value in accuracy)
        parts = [f"step {step:,}/{num_steps:,}", f"loss {loss:.3f}", f"right {shown}"]
        if not math.isnan(self._acceptance):
            parts.append(f"acceptance {self._acceptance:.2f}")
        parts += [f"{rate:,.0f} tokens/s", f"{_duration(left)} left"]
        self._on_progress("training: " + ", ".join(parts), step / num_steps)

    def validated(self, counts: Counts) -> None:
        """The held-out sequences were looked at."""
        self._acceptance = counts.acceptance


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
