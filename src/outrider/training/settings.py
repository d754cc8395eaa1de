"""Everything that decides a training run, checked, and what it means for a given target.

Owns the options of a run as a whole; those of a stage are the stage's. Filled by ``outrider
train``, followed by :mod:`outrider.training.run`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from outrider.config import Method
from outrider.errors import ParameterError, UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.loading.heads import LAYOUTS
from outrider.models.loading.hub import DEFAULT_MODEL
from outrider.training.data import DataSettings
from outrider.training.loop_settings import LoopSettings
from outrider.training.losses import LossConfig
from outrider.training.recipes import (
    DraftOptions,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
    Options,
    default_layers,
    step_weights,
)
from outrider.training.recipes.draft import check_fit
from outrider.training.tensorboard import require_tensorboard


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
        command: as it was typed, for the head's manifest, which is published; None where none was.
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
    command: str | None = None

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
