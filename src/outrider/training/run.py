"""One training run from a model without a head to a head with its measured acceptance length.

Owns the order of the stages and what each leaves in the two folders::

    data folder      prompts.jsonl  responses*.jsonl  features/     shared by all four recipes
    run folder       run.json  checkpoints/  log.jsonl  times.jsonl
                     head/  evaluation.json  curve.svg

Every stage goes on where it was interrupted and is passed over when it is done. Where several
processes train together, the first one answers, captures, measures and exports; the others wait and
read what it wrote. ``outrider train`` calls it; stands above the stages and
:mod:`outrider.training.loop`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.prompts import load_prompts
from outrider.errors import ParameterError
from outrider.llm import LLM
from outrider.models.loading import load
from outrider.models.loading.hub import resolve
from outrider.models.machine import preferred_dtype
from outrider.training.acceptance import EvaluationReport
from outrider.training.data import (
    FEATURES,
    TrainingData,
    answer_part,
    choose_vocabulary,
    coverage,
    open_target,
    prepare_data,
    read_prepared,
)
from outrider.training.distributed import ALONE, Processes, join_processes, world_size
from outrider.training.estimate import Estimate, TrainingSizes, estimate
from outrider.training.expectation import describe_expectation, warn_of_few
from outrider.training.export import export_head
from outrider.training.features import (
    FeaturePart,
    FeatureSource,
    FeatureStore,
    LiveFeatures,
    capture_features,
)
from outrider.training.files import write_json
from outrider.training.identity import TargetIdentity
from outrider.training.loop import TrainingLoop, TrainingResult
from outrider.training.losses import LossConfig
from outrider.training.manifest import (
    describe_evaluation,
    describe_run,
    describe_weights,
    recorded_chain,
)
from outrider.training.measure import measure
from outrider.training.prompts import load_training_prompts
from outrider.training.recipes import (
    DraftOptions,
    Eagle3Options,
    Objective,
    Recipe,
    TargetEnds,
    create_recipe,
    step_weights,
)
from outrider.training.responses import AnswerCounts
from outrider.training.settings import TrainSettings, make_options, vocabulary_size
from outrider.training.store import sole_writer
from outrider.types import ProgressCallback
from outrider.vocabulary import DraftVocabulary

HEAD, EVALUATION, RUN = "head", "evaluation.json", "run.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind."""

    head: Path
    training: TrainingResult
    report: EvaluationReport
    coverage: float | None
    manifest: dict[str, Any]


Notice = Callable[[str], None]
"""Told a sentence that should stay on the screen."""


def train_head(
    settings: TrainSettings,
    *,
    on_progress: ProgressCallback | None = None,
    on_notice: Notice | None = None,
    on_estimate: Callable[[Estimate], None] | None = None,
) -> RunResult | None:
    """All stages, from where an earlier run of the same command stopped.

    None in a process that trained along, but leaves telling and writing to the first.

    Raises:
        OutriderError: as the stages; what was done before stays.
    """
    with ExitStack() as held:
        processes = held.enter_context(join_processes(settings.device))
        if processes.is_first:
            held.enter_context(sole_writer(settings.out))
            run = _Run(settings, on_progress, on_notice or _ignore, processes)
        else:
            run = _Run(settings, None, _ignore, processes)
        with processes.first_alone():
            data = run.answer()
            run.choose(data)
            if processes.is_first:
                plan = run.plan(data)
                if on_estimate is not None:
                    on_estimate(plan)
                plan.check()
            features = run.features(data, held)
        trained = run.train(data, features)
        with processes.first_alone():
            return run.finish(data, trained) if processes.is_first else None


def answer_only(settings: TrainSettings, *, on_progress: ProgressCallback | None = None) -> str:
    """The data stages up to the answers, for one part of the prompts; says what there is now.

    Several processes may do this on one data folder at once, each its part.

    Raises:
        OutriderError: as the stages; what was answered stays.
    """
    if world_size() > 1:
        raise ParameterError(
            "--only-answers: torchrun's processes would answer the same prompts; run one process "
            "for each --part instead"
        )
    run = _Run(settings, on_progress, _ignore, ALONE)
    counts = run.answer_part()
    message = f"{counts.answered:,} prompts answered, {counts.tokens:,} tokens"
    if counts.waiting:
        message += f"; {counts.waiting:,} wait for answers of other parts: run this one again after"
    if counts.failed:
        message += f"; {_describe_failed(counts.failed)}"
    return message


def _ignore(_: str) -> None:
    """Tell nobody."""


def _describe_failed(count: int) -> str:
    return f"at {count:,} prompts the target's logits were not finite; the next run asks them again"


class _Run:
    """One run's target, options and folders, stage by stage."""

    def __init__(
        self,
        settings: TrainSettings,
        on_progress: ProgressCallback | None,
        notice: Notice,
        processes: Processes,
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._on_progress = on_progress
        self._notice = notice
        # Read before anything long begins, so that a wrong file is noticed now.
        self._eval_prompts = load_prompts(settings.eval_prompts)
        load_training_prompts(settings.data_settings.files)
        self._path = resolve(settings.model, pull=True, on_progress=on_progress)
        checkpoint = load(self._path, on_progress=on_progress)
        try:
            self.config = checkpoint.config
            self.identity = TargetIdentity.of(checkpoint, preferred_dtype())
            self.options = make_options(settings, self.config)
            self._eos_ids = checkpoint.tokenizer.eos_ids
        finally:
            checkpoint.weights.close()
        self._target: LLM | None = None
        if processes.is_first or settings.features == "live":
            self._target = open_target(settings.model, settings.data_settings, on_progress)
        self.vocabulary: DraftVocabulary | None = None
        self.coverage: float | None = None

    @property
    def _llm(self) -> LLM:
        """The target, in a process that has to run it: it takes as much memory again in each."""
        assert self._target is not None, "only the first process runs the target"
        return self._target

    def answer(self) -> TrainingData:
        """Prompts and the target's answers."""
        settings = self._settings
        if not self._processes.is_first:
            return read_prepared(settings.data_folder, settings.data_settings)
        data = prepare_data(
            self._llm,
            settings.data_folder,
            settings.data_settings,
            self.identity,
            self._on_progress,
        )
        self._notice(
            f"data: {len(data.responses):,} answers with {data.num_response_tokens:,} tokens, "
            f"{len(data.held_out):,} answers held out"
        )
        self._tell_of_data(data)
        return data

    def _tell_of_data(self, data: TrainingData) -> None:
        """What is missing in it, and what it is worth."""
        if data.too_long:
            room = self._settings.data_settings.max_model_len
            self._notice(f"{data.too_long:,} prompts do not fit a context of {room:,}: passed over")
        if data.failed:
            self._notice(f"warning: {_describe_failed(data.failed)}: passed over")
        self._notice(describe_expectation(data.num_response_tokens))
        few = warn_of_few(data.num_response_tokens, len(data.responses))
        if few is not None:
            self._notice(few)

    def answer_part(self) -> AnswerCounts:
        """This process' part of the answers."""
        settings = self._settings
        return answer_part(
            self._llm,
            settings.data_folder,
            settings.data_settings,
            self.identity,
            self._on_progress,
        )[1]

    def choose(self, data: TrainingData) -> None:
        """The draft vocabulary, from what the target wrote."""
        size = vocabulary_size(self._settings, self.config)
        if size is None:
            return
        eos = [id_ for id_ in self._eos_ids if id_ < self.config.vocab_size]
        self.vocabulary = choose_vocabulary(data.responses, size, self.config.vocab_size, eos)
        self.coverage = coverage(self.vocabulary, data.held_out)
        self._notice(
            f"vocabulary: {size:,} of {self.config.vocab_size:,} tokens, which are "
            f"{self.coverage:.1%} of what the target wrote in held-out answers"
        )

    def plan(self, data: TrainingData) -> Estimate:
        """What the rest will take."""
        settings = self._settings
        count = len(data.responses) + len(data.held_out)
        options = self.options
        sizes = TrainingSizes(
            # The other methods read the final state alone, whatever stands here.
            num_captures=len(options.capture_layers) if isinstance(options, Eagle3Options) else 1,
            num_steps=len(step_weights(settings.method, settings.num_steps, settings.step_decay)),
            draft_vocab_size=None if self.vocabulary is None else self.vocabulary.size,
            trains_head=settings.train_head,
            num_layers=len(options.layers) if isinstance(options, DraftOptions) else 1,
            mlp_size=settings.mlp_size,
            tokens_per_batch=settings.loop.tokens_per_batch,
            mean_length=max(1, data.num_tokens // count),
            stores_features=settings.features == "disk",
            checkpoints_kept=settings.loop.keep,
        )
        return estimate(
            self.config,
            settings.method.value,
            data.num_tokens,
            settings.data_folder,
            sizes=sizes,
            device=settings.device,
        )

    def train(
        self, data: TrainingData, features: tuple[FeatureSource, FeatureSource]
    ) -> tuple[Recipe, TrainingResult]:
        """The loop."""
        settings = self._settings
        learnt, held_out = features
        recipe = self._recipe()
        loop = TrainingLoop(
            recipe,
            learnt,
            held_out,
            settings.out,
            settings.loop,
            about=self._about(data),
            on_progress=self._on_progress,
            on_skip=lambda folder, why: self._notice(f"{folder.name} is not whole: {why}"),
            processes=self._processes,
            tensorboard=settings.tensorboard,
        )
        return recipe, loop.run()

    def finish(self, data: TrainingData, trained: tuple[Recipe, TrainingResult]) -> RunResult:
        """Export, measure, and export again with what was measured."""
        settings = self._settings
        recipe, result = trained
        folder = settings.out / HEAD
        manifest = describe_run(
            self._about(data),
            settings,
            result,
            coverage=self.coverage,
            machine=self._llm.fingerprint,
        )
        sha256 = self._export(recipe, folder, manifest, None)
        report = measure(
            self._llm,
            self._eval_prompts,
            settings,
            head=folder,
            head_sha256=sha256,
            path=settings.out / EVALUATION,
            on_progress=self._on_progress,
        )
        manifest |= describe_evaluation(report)
        self._export(recipe, folder, manifest, recorded_chain(report))
        write_json(settings.out / RUN, {"schema_version": SCHEMA_VERSION, **manifest})
        return RunResult(folder, result, report, self.coverage, manifest)

    def features(self, data: TrainingData, held: ExitStack) -> tuple[FeatureSource, FeatureSource]:
        """The target's states of what is learnt from, and of what is held out."""
        options = self.options
        captures = options.capture_layers if isinstance(options, Eagle3Options) else ()
        folder = self._settings.data_folder / FEATURES
        if self._settings.features == "live":
            target = self._llm.target
            return (
                LiveFeatures(target, data.responses, captures),
                LiveFeatures(target, data.held_out, captures),
            )
        # Both in one call: each must find the other's shards sound, not superfluous.
        both = [*data.responses, *data.held_out]
        if self._processes.is_first:
            store = capture_features(
                self._llm.target,
                both,
                captures,
                folder,
                self.identity,
                on_progress=self._on_progress,
            )
        else:  # the first has just checked the shards
            ids = [response.id for response in both]
            store = FeatureStore(folder, captures, ids, is_verified=True)
        held.callback(store.close)
        cut = len(data.responses)
        return FeaturePart(store, range(cut)), FeaturePart(store, range(cut, len(both)))

    def _recipe(self) -> Recipe:
        settings = self._settings
        checkpoint = load(self._path)
        try:
            ends = TargetEnds.of(
                self.config,
                checkpoint.weights,
                dtype=preferred_dtype() if settings.loop.autocast else torch.float32,
                device=settings.device,
            )
            objective = Objective(
                step_weights=step_weights(settings.method, settings.num_steps, settings.step_decay),
                loss=LossConfig.parse(settings.loss),
                loss_on=settings.loss_on,
                vocabulary=self.vocabulary,
            )
            torch.manual_seed(settings.loop.seed)
            recipe = create_recipe(
                self.options, ends, checkpoint.weights, objective, seed=settings.loop.seed
            )
        finally:
            checkpoint.weights.close()
        return recipe.to(settings.device)

    def _about(self, data: TrainingData) -> dict[str, Any]:
        """What decides the weights beside the loop's settings."""
        return describe_weights(self._settings, data, self.identity, self.options, self.vocabulary)

    def _export(
        self, recipe: Recipe, folder: Path, manifest: dict[str, Any], acceptance: float | None
    ) -> str:
        settings = self._settings
        return export_head(
            settings.method,
            recipe.head_config(),
            recipe.weights(),
            folder,
            target=self._llm.files,
            manifest=manifest,
            acceptance=acceptance,
            self_contained=settings.self_contained,
            layout=settings.layout,
        )
