"""The flags of ``outrider train``, in groups, and their translation into settings.

Owns names, help and defaults, which are those of :mod:`outrider.training.settings` where
these can be read without torch. Used by :mod:`outrider.cli` only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from outrider.commands.options import flag, whole
from outrider.commands.typed import published_command
from outrider.config import Method
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.training.settings import TrainSettings

TRAINED = (Method.EAGLE3, Method.MTP, Method.MEDUSA, Method.DRAFT)


@Parameter(name="*", group=Group("Data", sort_key=2))
@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What the target answers, and how."""

    data: Annotated[
        Path | None,
        flag("Folder of prompts, answers and features; several heads may share it. OUT/data."),
    ] = None
    prompts: Annotated[
        list[Path],
        flag(
            "Prompt file (JSONL); may be repeated. Without it: written from the prompt book, some "
            "of them by the target itself.",
            negative="",
            show_default=False,
        ),
    ] = field(default_factory=list)
    num_prompts: Annotated[int | None, whole("How many prompts (book: 2000; files: all).")] = None
    response_tokens: Annotated[
        int | None, whole("Stop answering when there are so many response tokens.")
    ] = None
    max_response_tokens: Annotated[int, whole("Most tokens of one answer.")] = 192
    temperatures: Annotated[str, flag("Answers are drawn at one of these each, such as 0,0,1.")] = (
        "0,1"
    )
    part: Annotated[
        str, flag("K/N: answer only every N-th prompt from the K-th; run one process for each K.")
    ] = "1/1"
    batch_size: Annotated[int, whole("Prompts answered at once.")] = 32
    max_model_len: Annotated[int, whole("Most tokens of a prompt and its answer.")] = 1280
    features: Annotated[
        str, flag("disk: store the target's states; live: recompute them in every epoch.")
    ] = "disk"


@Parameter(name="*", group=Group("Recipe", sort_key=3))
@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """What is trained, towards what."""

    steps: Annotated[
        int | None, whole("Tokens ahead in training: test-time steps, or MEDUSA heads.")
    ] = None
    step_decay: Annotated[float | None, flag("Weight of each step over the one before.")] = None
    loss: Annotated[str, flag("ce, kl, tv, or a mixture such as ce:0.1+tv:0.9.")] = "ce"
    loss_on: Annotated[str, flag("response, or all: prompts too.")] = "response"
    draft_vocab: Annotated[
        int | None, whole("Tokens that are learnt, the most frequent; 0: all. A quarter.")
    ] = None
    init: Annotated[str, flag("target: begin as its last layer; random.")] = "target"
    train_head: Annotated[
        bool, flag("eagle3: an output head of its own instead of the target's.", negative="")
    ] = False
    fc_norm: Annotated[bool, flag("eagle3: norms before fc (3.1).", negative="")] = False
    norm_output: Annotated[bool, flag("eagle3: feed back normed states (3.1).", negative="")] = (
        False
    )
    layers: Annotated[
        str | None, flag("draft: layers of the target it begins as, such as 0,1,29.")
    ] = None
    mlp_size: Annotated[int | None, whole("draft: units of each MLP that stay.")] = None


@Parameter(name="*", group=Group("Training", sort_key=4))
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How the loop runs."""

    epochs: Annotated[int, whole("Passes over the data.")] = 3
    tokens_per_batch: Annotated[int, whole("Most tokens of one batch.")] = 4096
    batches_per_step: Annotated[
        int | None,
        whole("Batches of one optimiser step: as many as torchrun starts processes, else one."),
    ] = None
    learning_rate: Annotated[float, flag("AdamW's, at its peak; then a half cosine.")] = 1e-3
    weight_decay: Annotated[float, flag("On matrices.")] = 0.0
    clip_norm: Annotated[float, flag("Largest norm of the gradient.")] = 0.5
    autocast: Annotated[
        bool, flag("Products in bfloat16, weights in float32.", negative="--no-autocast")
    ] = True
    seed: Annotated[int, whole("Of prompts, answers and the order of training.")] = 0
    checkpoint_every: Annotated[int, whole("Steps between two checkpoints.")] = 100
    validate_every: Annotated[int, whole("Steps between two looks at held-out answers.")] = 200
    keep: Annotated[int, whole("Checkpoints that stay.")] = 2
    device: Annotated[str, flag("Where the head trains: cpu or cuda.")] = "cpu"
    threads: Annotated[int | None, whole("Compute threads.")] = None
    tensorboard: Annotated[bool, flag("Also log for TensorBoard, to OUT.", negative="")] = False


@Parameter(name="*", group=Group("Evaluation and export", sort_key=5))
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """How the head is measured and written."""

    eval_prompts: Annotated[
        Path | None, flag("Prompts to measure on, never trained on; the bundled ones.")
    ] = None
    eval_limit: Annotated[int | None, whole("Most prompts to measure on.")] = None
    eval_tokens: Annotated[int, whole("Most tokens of each answer.")] = 128
    simulate: Annotated[
        bool, flag("Replay recorded answers instead of decoding them: quicker.", negative="")
    ] = False
    layout: Annotated[str, flag("eagle3: speculators or safeailab.")] = "speculators"
    self_contained: Annotated[
        bool, flag("Export what is the target's own too, for other engines.", negative="")
    ] = False


def train_settings(
    method: str,
    model: str,
    out: Path,
    *,
    data: DataOptions,
    recipe: RecipeOptions,
    loop: LoopOptions,
    evaluation: EvaluationOptions,
    typed: Sequence[str] = (),
) -> TrainSettings:
    """The checked settings of a run; ``typed`` are the words that asked for it.

    Raises:
        ParameterError: a value is out of range.
    """
    if method not in TRAINED:
        raise ParameterError(f"METHOD: {method!r} is not one of {', '.join(TRAINED)}")
    from outrider.training.data import DataSettings
    from outrider.training.distributed import world_size
    from outrider.training.loop_settings import LoopSettings
    from outrider.training.responses import ResponseSettings
    from outrider.training.settings import TrainSettings

    answers = ResponseSettings(
        temperatures=_numbers("--temperatures", data.temperatures),
        max_tokens=data.max_response_tokens,
        seed=loop.seed,
    )
    return TrainSettings(
        method=Method(method),
        model=model,
        out=out,
        data=data.data,
        data_settings=DataSettings(
            files=tuple(data.prompts),
            num_prompts=data.num_prompts,
            responses=answers,
            max_tokens=data.response_tokens,
            batch_size=data.batch_size,
            max_model_len=data.max_model_len,
            threads=loop.threads,
            part=_part(data.part),
        ),
        loop=LoopSettings(
            epochs=loop.epochs,
            tokens_per_batch=loop.tokens_per_batch,
            batches_per_step=(
                world_size() if loop.batches_per_step is None else loop.batches_per_step
            ),
            learning_rate=loop.learning_rate,
            weight_decay=loop.weight_decay,
            clip_norm=loop.clip_norm,
            autocast=loop.autocast,
            seed=loop.seed,
            checkpoint_every=loop.checkpoint_every,
            validate_every=loop.validate_every,
            keep=loop.keep,
        ),
        num_steps=recipe.steps,
        step_decay=recipe.step_decay,
        loss=recipe.loss,
        loss_on=recipe.loss_on,  # type: ignore[arg-type]  # checked there
        draft_vocab_size=recipe.draft_vocab,
        layers=None if recipe.layers is None else _whole_numbers("--layers", recipe.layers),
        mlp_size=recipe.mlp_size,
        init=recipe.init,  # type: ignore[arg-type]  # checked there
        train_head=recipe.train_head,
        fc_norm=recipe.fc_norm,
        norm_output=recipe.norm_output,
        features=data.features,  # type: ignore[arg-type]  # checked there
        device=loop.device,
        tensorboard=loop.tensorboard,
        eval_prompts=evaluation.eval_prompts,
        eval_limit=evaluation.eval_limit,
        eval_tokens=evaluation.eval_tokens,
        simulated=evaluation.simulate,
        layout=evaluation.layout,
        self_contained=evaluation.self_contained,
        command=published_command(typed) if typed else None,
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"{name}: {text!r} is not a list of numbers such as 0,1") from None


def _whole_numbers(name: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ParameterError(f"{name}: {text!r} is not a list of whole numbers such as 0,29")
    return tuple(int(part) for part in text.split(","))


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ParameterError(f"--part: {text!r} is not K/N with 1 <= K <= N, such as 1/2")
    return int(match[1]), int(match[2])
