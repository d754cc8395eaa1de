"""The training loop: batches in, a trained recipe out, whatever interrupts it.

Owns the optimiser, the schedule, validation and checkpoints. It knows no method: what a batch's
loss is, the recipe says (:mod:`outrider.training.recipes`). :mod:`outrider.training.run` calls it
between the features and the export.

A run is a pure function of data, settings and seed: the order of batches comes from (seed, epoch),
the learning rate from the step, and a checkpoint holds all else. So a run that is killed at any
moment and started again ends with the same weights and the same log, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import CheckpointError, ParameterError, TrainingError
from outrider.training.distributed import ALONE, Processes
from outrider.training.features import FeatureSource
from outrider.training.log import LOG
from outrider.training.loop_figures import Counts, LiveLine
from outrider.training.loop_settings import LoopSettings, learning_rate
from outrider.training.packing import pack, plan_batches
from outrider.training.recipes import Recipe, StepResults
from outrider.training.run_log import RunLog
from outrider.training.store import (
    SkipCallback,
    latest_valid,
    load_state,
    prune,
    random_state,
    restore_random_state,
    save_state,
)
from outrider.training.tensorboard import require_tensorboard
from outrider.types import ProgressCallback

CHECKPOINTS = "checkpoints"
_PATTERN = "step-*"


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended.

    ``acceptance`` is predicted on the held-out sequences (teacher-forced greedy chain, bonus
    included); ``seconds`` are of training alone, over all interruptions.
    """

    steps: int
    tokens: int
    seconds: float
    acceptance: float
    accuracy: tuple[float, ...]


class TrainingLoop:
    """Trains one recipe in one run folder.

    Args:
        recipe: on the device it trains on.
        features: the sequences to learn from.
        held_out: sequences to look at now and then, never learnt from.
        folder: of the run; checkpoints and logs go there.
        settings: how.
        about: what else decides the result (options, data, target): a checkpoint of other settings
            is refused rather than continued.
        on_progress: told loss, accuracy, predicted acceptance, rate and time left.
        on_skip: told of damaged checkpoints that are passed over, and of a log that lost lines.
        processes: those that train together, each with a loop of its own.
        tensorboard: also log for TensorBoard, into the run folder.

    Raises:
        ParameterError: a step's batches cannot be shared evenly, or TensorBoard is missing.
    """

    def __init__(
        self,
        recipe: Recipe,
        features: FeatureSource,
        held_out: FeatureSource,
        folder: Path,
        settings: LoopSettings,
        *,
        about: dict[str, Any],
        on_progress: ProgressCallback | None = None,
        on_skip: SkipCallback | None = None,
        processes: Processes = ALONE,
        tensorboard: bool = False,
    ) -> None:
        if settings.batches_per_step % processes.count:
            raise ParameterError(
                f"batches_per_step: {settings.batches_per_step} batches cannot be shared by "
                f"{processes.count} processes; give a multiple of that"
            )
        if tensorboard:
            require_tensorboard()
        self._recipe = recipe
        self._processes = processes
        self._tensorboard = tensorboard
        self._features = features
        self._held_out = held_out
        self._folder = folder
        self._settings = settings
        self._about = {**about, "loop": settings.deciding()}
        self._live = LiveLine(on_progress)
        self._on_skip = on_skip
        self._device = next(recipe.parameters()).device
        self._trained = processes.share(recipe)
        self._optimizer = _optimizer(recipe, settings)
        self._validation = plan_batches(
            held_out.lengths, tokens_per_batch=settings.tokens_per_batch, seed=0, epoch=0
        )
        self._plans = [
            plan_batches(
                features.lengths,
                tokens_per_batch=settings.tokens_per_batch,
                seed=settings.seed,
                epoch=epoch,
            )
            for epoch in range(settings.epochs)
        ]
        self._order = [batch for plan in self._plans for batch in plan]
        self._step = 0
        self._tokens = 0
        self._seconds = 0.0
        self._running = Counts.none()

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return math.ceil(len(self._order) / self._settings.batches_per_step)

    def run(self) -> TrainingResult:
        """Train to the end, from the newest sound checkpoint if there is one.

        Raises:
            TrainingError: loss or gradient is no longer finite; the last checkpoint stays.
            CheckpointError: the checkpoints are of a run with other settings or data, or none of
                them is sound.
            CapacityError: the disk is full; the checkpoints before stay.
        """
        self._resume()
        if not self._processes.is_same(self._step):
            raise CheckpointError(
                f"{self._folder / CHECKPOINTS}: the processes found different checkpoints there; "
                "they need one run folder that all of them see"
            )
        self._log = RunLog(
            self._folder,
            last_step=self._step,
            is_written=self._processes.is_first,
            tensorboard=self._tensorboard,
        )
        self._tell_of_lost_lines()
        try:
            started = time.perf_counter() - self._seconds
            self._live.begin(self._tokens)
            while self._step < self.num_steps:
                size = self._settings.batches_per_step
                self._train(self._order[self._step * size : (self._step + 1) * size])
                self._seconds = time.perf_counter() - started
                self._after_step()
            final = self._validate()
        finally:
            self._log.close()
        self._trained.make_whole()
        return TrainingResult(
            steps=self._step,
            tokens=self._tokens,
            seconds=self._seconds,
            acceptance=final.acceptance,
            accuracy=tuple(final.accuracy),
        )

    def _train(self, batches: Sequence[Sequence[int]]) -> None:
        """One optimiser step, over the sequences of one or more batches."""
        settings = self._settings
        rate = learning_rate(self._step, self.num_steps, settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._recipe.train()
        counts = self._backward(batches)
        if any(counts.rows):  # else there is nothing to learn from, nor a gradient
            self._require_finite("gradient", self._trained.clip_gradient(settings.clip_norm))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        self._tokens += sum(self._features.lengths[i] for batch in batches for i in batch)
        self._running.merge(counts)
        self._live.step(self._step, self.num_steps, self._tokens, counts)

    def _backward(self, batches: Sequence[Sequence[int]]) -> Counts:
        """The gradient of the mean loss over all rows of all batches, and their counts.

        How many rows count is known after their forward pass: each batch's loss is divided by the
        rows of the first one, and in the end their sum is put right.
        """
        counts, scale = Counts.none(), 0
        for indices, is_own in self._processes.divide(batches):
            own = self._losses(self._features, indices, counts=is_own)
            results = self._processes.sum(own)
            counts.add(results)
            scale = scale or max(1, counts.rows[0])
            if bool(results.rows_S.any()):
                self._require_finite("loss", results.total / scale)
                # The processes' gradients are averaged, but are to be added up.
                (own.total * self._processes.count / scale).backward()
        rows = max(1, counts.rows[0])
        if rows != scale:
            for parameter in self._recipe.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale / rows)
        return counts

    def _require_finite(self, what: str, value: torch.Tensor) -> None:
        """Stop before a weight is touched by what is no number."""
        if not bool(torch.isfinite(value)):
            raise TrainingError(
                f"the {what} is {value.item()} at step {self._step + 1}; the checkpoints before it "
                f"are kept in {self._folder / CHECKPOINTS}: lower the learning rate "
                f"({self._settings.learning_rate:g}) and start a new run"
            )

    def _after_step(self) -> None:
        """Log, validate and save where they are due."""
        settings, step = self._settings, self._step
        is_last = step == self.num_steps
        if step % settings.log_every == 0 or is_last:
            self._log.add_figures(step, {"tokens": self._tokens, **self._running.to_json()})
            self._log.add_times(step, {"seconds": self._seconds, "tokens": self._tokens})
            self._running = Counts.none()
        if step % settings.validate_every == 0 or is_last:
            self._log.add_figures(step, {"validation": self._validate().to_json()})
        if step % settings.checkpoint_every == 0 or is_last:
            self._save()

    @torch.no_grad()
    def _validate(self) -> Counts:
        """Look at all held-out sequences."""
        self._recipe.eval()
        counts = Counts.none()
        for indices, is_own in self._processes.divide(self._validation):
            results = self._losses(self._held_out, indices, counts=is_own)
            counts.add(self._processes.sum(results))
        self._live.validated(counts)
        return counts

    def _losses(
        self, source: FeatureSource, indices: Sequence[int], *, counts: bool
    ) -> StepResults:
        """One batch's results, of this process alone."""
        batch = pack([source.sequence(index) for index in indices]).to(self._device)
        autocast = self._settings.autocast
        with torch.autocast(self._device.type, torch.bfloat16, enabled=autocast):
            return self._trained.losses(batch, counts=counts)

    def _save(self) -> None:
        weights, optimizer_state = self._trained.state(self._optimizer)
        if not self._processes.is_first:
            return
        self._log.sync()
        parent = self._folder / CHECKPOINTS
        folder = parent / f"step-{self._step:07d}"
        state = {
            "step": self._step,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "running": asdict(self._running),
            "optimizer": optimizer_state,
            "random": random_state(),
        }
        save_state(folder, weights, state, {"about": self._about})
        prune(parent, _PATTERN, keep=self._settings.keep, current=folder)

    def _resume(self) -> None:
        parent, damaged = self._folder / CHECKPOINTS, []

        def skip(folder: Path, reason: str) -> None:
            damaged.append(reason)
            if self._on_skip is not None:
                self._on_skip(folder, reason)

        found = latest_valid(parent, _PATTERN, skip)
        if found is None and damaged:
            raise CheckpointError(
                f"{parent}: none of the {len(damaged)} checkpoints is sound, the newest because of "
                f"{damaged[0]}; remove {parent} to train from the beginning again, or choose "
                "another run folder"
            )
        if found is None:
            return
        folder, manifest = found
        require_same_run(manifest.meta.get("about", {}), self._about, folder)
        saved = load_state(folder)
        self._trained.load(saved.tensors, self._optimizer, saved.state["optimizer"])
        restore_random_state(saved.state["random"])
        self._step, self._tokens = saved.state["step"], saved.state["tokens"]
        self._seconds = saved.state["seconds"]
        self._running = Counts(**saved.state["running"])

    def _tell_of_lost_lines(self) -> None:
        """A log that ends before the checkpoint has lost lines, which nothing brings back."""
        due = self._step - self._step % self._settings.log_every
        if self._log.kept_step < due and self._on_skip is not None:
            self._on_skip(
                self._folder / LOG,
                f"its lines between step {self._log.kept_step} and the checkpoint's {self._step} "
                "are lost",
            )


def require_same_run(recorded: dict[str, Any], current: dict[str, Any], folder: Path) -> None:
    """Refuse to continue what was begun with other settings or data.

    Raises:
        CheckpointError: names what differs.
    """
    names = sorted(recorded.keys() | current.keys())
    changed = []
    for name in names:
        old, new = recorded.get(name), current.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            keys = sorted(old.keys() | new.keys())
            pairs = [(f"{name}.{key}", old.get(key), new.get(key)) for key in keys]
        else:
            pairs = [(name, old, new)]
        changed += [f"{key} was {a}, is {b}" for key, a, b in pairs if a != b]
    if changed:
        raise CheckpointError(
            f"{folder}: of a run with other settings: {'; '.join(changed)}; use them again, or "
            "another run folder"
        )


def _optimizer(recipe: Recipe, settings: LoopSettings) -> torch.optim.AdamW:
    """AdamW over everything trained, with weight decay on matrices only."""
    parameters = [p for p in recipe.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )
