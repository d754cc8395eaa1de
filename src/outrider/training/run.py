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

import datetime
import json
import platform
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import outrider
from outrider.bench.prompts import load_prompts
from outrider.config import Method
from outrider.errors import ParameterError, UnsupportedModelError
from outrider.llm import LLM
from outrider.models.architecture import DecoderConfig
from outrider.models.loading import load
from outrider.models.loading.cache import publish
from outrider.models.loading.heads import LAYOUTS
from outrider.models.loading.hub import DEFAULT_MODEL, resolve
from outrider.models.machine import preferred_dtype
from outrider.selfcheck import RECORDED_CHAIN
from outrider.training.acceptance import ALL, EvaluationReport
from outrider.training.data import (
    FEATURES,
    DataSettings,
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
from outrider.training.evaluate import evaluate, standard_settings
from outrider.training.export import export_head
from outrider.training.features import (
    FeatureSource,
    FeatureStore,
    LiveFeatures,
    capture_features,
)
from outrider.training.identity import TargetIdentity
from outrider.training.log import writing
from outrider.training.loop import LoopSettings, TrainingLoop, TrainingResult
from outrider.training.losses import LossConfig
from outrider.training.prompts import load_training_prompts
from outrider.training.recipes import (
    DraftOptions,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
    Objective,
    Options,
    Recipe,
    TargetEnds,
    create_recipe,
    default_layers,
    step_weights,
)
from outrider.training.recipes.draft import check_fit
from outrider.training.responses import AnswerCounts
from outrider.training.store import sole_writer
from outrider.training.tensorboard import require_tensorboard
from outrider.types import ProgressCallback
from outrider.vocabulary import DraftVocabulary

HEAD, EVALUATION, RUN = "head", "evaluation.json", "run.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Everything that decides a run.

    Attributes:
        method: ``eagle3``, ``mtp``, ``medusa`` or ``draft``.
        model: the target.
        out: the run folder.
        data: the data folder; None puts it into the run folder.
        data_settings: prompts and answers.
        loop: the training loop.
        num_steps: training-time steps, or heads; None takes the method's own.
        step_decay: weight of each further step over the one before; None as published.
        loss: such as ``ce`` or ``ce:0.1+tv:0.9``.
        loss_on: ``response`` or ``all``.
        draft_vocab_size: tokens that are learnt; for EAGLE-3 those that can be drafted. None
            chooses a quarter of the target's vocabulary, 8,192 .. 32,768; 0 takes all.
        layers: of a draft model, which of the target's it begins as; None the first and the last.
        mlp_size: of a draft model's layers; None the target's.
        init: ``target`` or ``random``.
        train_head: EAGLE-3 gets an output head of its own.
        fc_norm: EAGLE-3.1's norms before ``fc``.
        norm_output: EAGLE-3.1's normed feedback.
        features: ``disk`` or ``live``.
        device: where the recipe trains; the target's own passes run on the CPU. Of several
            processes on ``cuda``, each has a GPU of its own.
        tensorboard: log for TensorBoard too, into the run folder.
        eval_prompts: measured on; None takes the bundled ones.
        eval_limit: most prompts of them; None takes all.
        eval_tokens: most tokens of each answer.
        simulated: replay recorded texts in the evaluation instead of decoding them.
        layout: of the exported EAGLE-3 head.
        self_contained: export what is the target's own too.
    """

    method: Method
    out: Path
    model: str = DEFAULT_MODEL
    data: Path | None = None
    data_settings: DataSettings = field(default_factory=DataSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    num_steps: int | None = None
    step_decay: float | None = None
    loss: str = "ce"
    loss_on: Literal["response", "all"] = "response"
    draft_vocab_size: int | None = None
    layers: tuple[int, ...] | None = None
    mlp_size: int | None = None
    init: Literal["target", "random"] = "target"
    train_head: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    features: Literal["disk", "live"] = "disk"
    device: str = "cpu"
    tensorboard: bool = False
    eval_prompts: Path | None = None
    eval_limit: int | None = None
    eval_tokens: int = 128
    simulated: bool = False
    layout: str = "speculators"
    self_contained: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("features", ("disk", "live")),
            ("loss_on", ("response", "all")),
            ("init", ("target", "random")),
            ("layout", LAYOUTS),
        ):
            if getattr(self, name) not in allowed:
                raise ParameterError(
                    f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}"
                )
        for name, least in (
            ("draft_vocab_size", 0),
            ("mlp_size", 1),
            ("eval_limit", 1),
            ("eval_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ParameterError(
                    f"{name}: {value} is below {least}; give a whole number from {least} on"
                )
        _check_device(self.device)
        _check_layout(self)
        if self.method is Method.DRAFT and self.num_steps not in (None, 1):
            raise ParameterError(
                f"num_steps: {self.num_steps}; a draft model is trained on one: leave it out"
            )
        room = self.data_settings.max_model_len
        if self.eval_tokens >= room:
            raise ParameterError(
                f"eval_tokens: {self.eval_tokens} leaves no room for a prompt in a context of "
                f"{room} tokens; lower it or raise max_model_len"
            )
        if self.tensorboard:
            require_tensorboard()
        step_weights(self.method, self.num_steps, self.step_decay)
        LossConfig.parse(self.loss)

    @property
    def data_folder(self) -> Path:
        """Where prompts, answers and features are."""
        return self.out / "data" if self.data is None else self.data


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
    return message


def _ignore(_: str) -> None:
    """Tell nobody."""


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
        if data.too_long:
            room = settings.data_settings.max_model_len
            self._notice(f"{data.too_long:,} prompts do not fit a context of {room:,}: passed over")
        return data

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
        manifest = self._manifest(data, result)
        self._export(recipe, folder, manifest, None)
        report = self._measure(folder)
        _write_json(settings.out / EVALUATION, report.to_json())
        manifest["acceptance_length"] = measured_lengths(report)
        self._export(recipe, folder, manifest, recorded_chain(report))
        _write_json(settings.out / RUN, {"schema_version": SCHEMA_VERSION, **manifest})
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
        return _Part(store, range(cut)), _Part(store, range(cut, len(both)))

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
        """What decides the weights beside the loop's settings, as JSON gives it back."""
        settings = self._settings
        about = {
            "method": settings.method.value,
            "target": asdict(self.identity),
            "data": data.describe(),
            "options": asdict(self.options),
            "objective": {
                "step_weights": step_weights(
                    settings.method, settings.num_steps, settings.step_decay
                ),
                "loss": settings.loss,
                "loss_on": settings.loss_on,
                "draft_vocab_size": None if self.vocabulary is None else self.vocabulary.size,
            },
        }
        return json.loads(json.dumps(about))

    def _manifest(self, data: TrainingData, result: TrainingResult) -> dict[str, Any]:
        settings = self._settings
        about = self._about(data)
        del about["target"]
        return {
            **about,
            "loop": asdict(settings.loop),
            "prompts": [file.name for file in settings.data_settings.files] or "prompt book",
            "answers": asdict(settings.data_settings.responses),
            "steps": result.steps,
            "tokens": result.tokens,
            "seconds": round(result.seconds),
            "predicted_acceptance_length": result.acceptance,
            "coverage": self.coverage,
            "machine": self._llm.fingerprint.text,
            "python": platform.python_version(),
            "outrider": outrider.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _export(
        self, recipe: Recipe, folder: Path, manifest: dict[str, Any], acceptance: float | None
    ) -> None:
        settings = self._settings
        export_head(
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

    def _measure(self, folder: Path) -> EvaluationReport:
        settings = self._settings
        prompts = self._eval_prompts
        if settings.eval_limit is not None and settings.eval_limit < len(prompts):
            stride = len(prompts) / settings.eval_limit  # all over the file, so of all categories
            prompts = [prompts[int(i * stride)] for i in range(settings.eval_limit)]
        return evaluate(
            self._llm,
            prompts,
            standard_settings(settings.method, str(folder)),
            max_tokens=settings.eval_tokens,
            simulated=settings.simulated,
            on_progress=self._on_progress,
        )


class _Part:
    """Some of a source's sequences."""

    def __init__(self, source: FeatureSource, indices: range) -> None:
        self._source = source
        self._indices = indices
        self.lengths = [source.lengths[index] for index in indices]

    def __len__(self) -> int:
        return len(self._indices)

    def sequence(self, index: int) -> Any:
        """One of them."""
        return self._source.sequence(self._indices[index])


def make_options(settings: TrainSettings, config: DecoderConfig) -> Options:
    """The recipe's options from the run's settings.

    Raises:
        ParameterError: the method is not trained, or an option is out of range.
        UnsupportedModelError: the target has too few layers.
    """
    method = settings.method
    if method is Method.EAGLE3:
        if config.num_layers < 4:
            raise UnsupportedModelError(
                f"the target has {config.num_layers} layers; EAGLE-3 reads three states between "
                "at least 4"
            )
        return Eagle3Options(
            capture_layers=capture_layers(config.num_layers),
            fc_norm=settings.fc_norm,
            norm_output=settings.norm_output,
            train_head=settings.train_head,
            init=settings.init,
        )
    if method is Method.MTP:
        return MtpOptions(init=settings.init)
    if method is Method.MEDUSA:
        return MedusaOptions()
    layers = settings.layers or default_layers(config.num_layers)
    draft = DraftOptions(layers=layers, mlp_size=settings.mlp_size)
    check_fit(draft, config)
    return draft


def capture_layers(num_layers: int) -> tuple[int, ...]:
    """The published choice (Li et al. 2025): an early, a middle and a late state."""
    return tuple(sorted({min(2, num_layers - 3), num_layers // 2, num_layers - 3}))


def vocabulary_size(settings: TrainSettings, config: DecoderConfig) -> int | None:
    """Tokens of the draft vocabulary; None for all."""
    size = settings.draft_vocab_size
    if size is None:
        size = min(32768, max(8192, config.vocab_size // 4))
    return None if size == 0 or size >= config.vocab_size else size


def measured_lengths(report: EvaluationReport) -> dict[str, dict[str, dict[str, float]]]:
    """Acceptance lengths by setting, temperature and category, rounded for a manifest."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for entry in report.acceptances:
        temperature = f"{entry.temperature:g}"
        by_category = found.setdefault(entry.setting, {}).setdefault(temperature, {})
        by_category[entry.category] = round(entry.acceptance_length, 3)
    return found


def recorded_chain(report: EvaluationReport) -> float | None:
    """The greedy chain's acceptance length, which the self-check compares with later."""
    for entry in report.acceptances:
        setting = entry.setting.endswith(f" chain {RECORDED_CHAIN}")
        if setting and entry.temperature == 0 and entry.category == ALL:
            return entry.acceptance_length
    return None


def _check_device(device: str) -> None:
    """Refuse what torch does not find on this machine."""
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise ParameterError(f"device: {device!r} is not one of cpu, cuda, cuda:N")
    count = torch.cuda.device_count()
    if device != "cpu" and int(match[1] or 0) >= count:
        raise ParameterError(
            f"device: {device!r} is not here: torch finds {count} CUDA devices; use cpu"
        )


def _check_layout(settings: TrainSettings) -> None:
    """Refuse an EAGLE-3 head that its layout has no words for, before it is trained."""
    if settings.method is not Method.EAGLE3 or settings.layout != "safeailab":
        return
    unfit = {
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        "the target's output head (train_head or self_contained would do)": not (
            settings.train_head or settings.self_contained
        ),
    }
    found = [what for what, is_there in unfit.items() if is_there]
    if found:
        raise ParameterError(
            f"layout: 'safeailab' cannot express {', '.join(found)}; use layout speculators"
        )


def _write_json(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        publish(partial, path)
