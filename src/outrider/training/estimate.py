"""What training a head will take: disk, memory and hours, before anything is computed.

Owns the arithmetic and the refusal; allocates nothing. The train command prints it first. All
formulas are here, so that a figure in the documentation can be traced. Per token, with D the
target's hidden size, V and W the target's and the draft vocabulary, P the trained parameters:

disk
    features    2 (n + 1) D + 5 bytes: n captured states and the final one in bfloat16, a token id
                and a mark
    checkpoints 12 P bytes each, one more than are kept: a new one is complete before one goes
    head        2 P bytes
memory
    target      its embedding and output head; where features are not stored, all of it
    parameters, gradients, AdamW's two moments: 4 + 4 + 8 bytes for each of P, and under bfloat16
                autocast 2 for the copies that products run on
    activations what autograd keeps per row, layer and step (:func:`_layer_bytes`)
    loss        one chunk of rows: logits, probabilities and slopes of W tokens
    batch       features of the batch at work and of the next
work            2 operations per parameter and token forward, 6 with the way back
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from outrider.errors import CapacityError, ParameterError
from outrider.models.architecture import DecoderConfig
from outrider.models.heads.config import Eagle3Config, MedusaConfig, MtpConfig
from outrider.models.memory import MemoryItem, available_memory, weights_item
from outrider.training.losses import CHUNK_ROWS

Method: TypeAlias = Literal["eagle3", "mtp", "medusa", "draft"]
METHODS: tuple[Method, ...] = ("eagle3", "mtp", "medusa", "draft")
_LOSS_COPIES = 5  # of a chunk's logits: teacher's and student's, their softmaxes, the slope


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSizes:
    """The settings of a run that decide what it takes.

    Attributes:
        num_captures: captured layers beside the final state; EAGLE-3 alone needs any.
        num_steps: training-time steps (EAGLE-3, MTP) or heads (MEDUSA).
        draft_vocab_size: tokens the loss is over; None for all of the target's.
        trains_head: EAGLE-3's output head is trained, not the target's own.
        num_layers: of a draft model.
        mlp_size: of a draft model; None for the target's.
        tokens_per_batch: rows of one pass forward and back.
        mean_length: of a sequence, prompt and answer.
        stores_features: on disk, rather than recomputed by the target.
        checkpoints_kept: complete ones at any time.
    """

    num_captures: int = 3
    num_steps: int = 5
    draft_vocab_size: int | None = None
    trains_head: bool = False
    num_layers: int = 2
    mlp_size: int | None = None
    tokens_per_batch: int = 4096
    mean_length: int = 384
    stores_features: bool = True
    checkpoints_kept: int = 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run takes, line by line, and what there is (None: unknown)."""

    disk: tuple[MemoryItem, ...]
    memory: tuple[MemoryItem, ...]
    free_disk_bytes: int | None
    available_bytes: int | None
    folder: Path

    @property
    def disk_bytes(self) -> int:
        """Sum of the lines for disk."""
        return sum(item.size_bytes for item in self.disk)

    @property
    def memory_bytes(self) -> int:
        """Sum of the lines for memory."""
        return sum(item.size_bytes for item in self.memory)

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            CapacityError: with the numbers and what to lower.
        """
        problems = []
        if self.free_disk_bytes is not None and self.disk_bytes > self.free_disk_bytes:
            problems.append(
                f"{_short(self.disk, self.free_disk_bytes)} free in {self.folder}; take another "
                "folder or fewer responses, or recompute features instead of storing them"
            )
        if self.available_bytes is not None and self.memory_bytes > self.available_bytes:
            problems.append(
                f"{_short(self.memory, self.available_bytes)} available; lower the tokens per "
                "batch, the training-time steps or the draft vocabulary, or take a smaller target"
            )
        if problems:
            raise CapacityError("training does not fit: " + ". And ".join(problems))


def estimate(
    config: DecoderConfig,
    method: str,
    num_tokens: int,
    folder: Path,
    *,
    sizes: TrainingSizes | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Estimate:
    """What training takes; see the module for the formulas.

    Args:
        config: the target.
        method: one of ``METHODS``.
        num_tokens: of prompts and answers that have no features yet.
        folder: where features and checkpoints go; its disk is looked at.
        sizes: the run's settings; defaults where None.
        dtype: of products and of the target.
        device: whose memory is looked at.

    Raises:
        ParameterError: an unknown method, or a size below its least.
    """
    sizes = sizes or TrainingSizes()
    shapes = trained_shapes(config, method, sizes)
    trained = sum(map(prod, shapes.values()))
    hidden, rows = config.hidden_size, sizes.tokens_per_batch
    vocabulary = sizes.draft_vocab_size or config.vocab_size
    per_token = 2 * (_num_captures(method, sizes) + 1) * hidden
    copies = sizes.checkpoints_kept + 1
    disk = [
        MemoryItem("checkpoints", f"{copies} x {trained:,} parameters", 12 * trained * copies),
        MemoryItem("head", f"{trained:,} parameters, bfloat16", 2 * trained),
    ]
    if sizes.stores_features:
        what = f"{num_tokens:,} tokens, {per_token + 5:,} bytes each"
        disk.insert(0, MemoryItem("features", what, num_tokens * (per_token + 5)))
    casts = 2 * trained if dtype != torch.float32 else 0
    memory = (
        _target_item(config, dtype, is_whole=not sizes.stores_features),
        MemoryItem("parameters", f"{trained:,}, float32", 4 * trained + casts),
        MemoryItem("gradients", "float32", 4 * trained),
        MemoryItem("optimiser", "AdamW, two moments, float32", 8 * trained),
        MemoryItem(
            "activations", f"{rows:,} rows", rows * _row_bytes(config, method, sizes, dtype)
        ),
        MemoryItem(
            "loss",
            f"{CHUNK_ROWS} rows x {vocabulary:,} tokens",
            CHUNK_ROWS * vocabulary * 4 * _LOSS_COPIES + vocabulary * hidden * dtype.itemsize,
        ),
        MemoryItem("batch", "features of two batches", 2 * rows * per_token),
    )
    return Estimate(tuple(disk), memory, _free_disk(folder), _available(device), folder)


def trained_shapes(
    config: DecoderConfig, method: str, sizes: TrainingSizes
) -> dict[str, tuple[int, ...]]:
    """The parameters that are trained, with their shapes: what is the target's own is not.

    Raises:
        ParameterError: an unknown method, or a size below its least.
    """
    if method not in METHODS:
        raise ParameterError(f"method: {method!r} is not one of {', '.join(METHODS)}")
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ParameterError(f"{field.name}: {value} is below 1")
    layers = replace(
        config, num_layers=1, sliding_window=None, sliding_layers=(), no_rope_layers=()
    )
    if method == "eagle3":
        head = Eagle3Config(
            layers=layers,
            target_hidden_size=config.hidden_size,
            capture_layers=tuple(range(sizes.num_captures)),
            draft_vocab_size=sizes.draft_vocab_size or config.vocab_size,
            has_own_head=sizes.trains_head,
        )
        shapes = head.weight_shapes()
        shapes.pop("d2t", None)
        return shapes
    if method == "mtp":
        return MtpConfig(layers=layers).weight_shapes()
    if method == "medusa":
        return MedusaConfig(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_heads=sizes.num_steps,
            has_own_head=False,
        ).weight_shapes()
    mlp_size = sizes.mlp_size or config.mlp_size
    draft = replace(layers, num_layers=sizes.num_layers, mlp_size=mlp_size, tied_embeddings=True)
    return {name: s for name, s in draft.weight_shapes().items() if name != "embed.weight"}


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One figure per stage: tokens per second, operations per token, or hours."""

    generation: float
    features: float
    training: float

    @property
    def total(self) -> float:
        """All stages together."""
        return self.generation + self.features + self.training


def hours(
    *, response_tokens: int, num_tokens: int, epochs: float, rates: StageFigures
) -> StageFigures:
    """Hours of each stage at given rates in tokens per second.

    ``response_tokens`` are generated; ``num_tokens``, prompts included, pass through the target
    once and through the head once an epoch.
    """
    return StageFigures(
        generation=response_tokens / rates.generation / 3600,
        features=num_tokens / rates.features / 3600,
        training=epochs * num_tokens / rates.training / 3600,
    )


def work_per_token(config: DecoderConfig, method: str, sizes: TrainingSizes) -> StageFigures:
    """Operations per token in each stage, products only.

    The target's layers and output head generate; its layers alone give features. Training runs
    what is trained once a step, forward and back, and both output heads over the draft vocabulary.
    """
    layers, head = _target_parameters(config)
    trained = sum(map(prod, trained_shapes(config, method, sizes).values()))
    vocabulary = (sizes.draft_vocab_size or config.vocab_size) * config.hidden_size
    steps = 1 if method == "draft" else sizes.num_steps
    runs = steps if method in ("eagle3", "mtp") else 1  # MEDUSA's heads run once each
    return StageFigures(
        generation=2 * (layers + head),
        features=2 * layers,
        training=6 * trained * runs + (2 + 4) * vocabulary * steps,
    )


def scale_rates(
    rates: StageFigures, measured: StageFigures, wanted: StageFigures, speedup: float = 1.0
) -> StageFigures:
    """Rates to expect for another target, from those measured, by the work per token.

    Args:
        rates: measured, tokens per second.
        measured: :func:`work_per_token` of what was measured.
        wanted: the same of what is asked about.
        speedup: how many times as many operations per second the other machine does.
    """
    return StageFigures(
        generation=rates.generation * speedup * measured.generation / wanted.generation,
        features=rates.features * speedup * measured.features / wanted.features,
        training=rates.training * speedup * measured.training / wanted.training,
    )


def _num_captures(method: str, sizes: TrainingSizes) -> int:
    return sizes.num_captures if method == "eagle3" else 0


def _target_parameters(config: DecoderConfig) -> tuple[int, int]:
    """Of the layers, and of the output head."""
    counts = {name: prod(shape) for name, shape in config.weight_shapes().items()}
    head = counts.pop("embed.weight")
    counts.pop("lm_head.weight", None)
    return sum(counts.values()), head


def _target_item(config: DecoderConfig, dtype: torch.dtype, *, is_whole: bool) -> MemoryItem:
    shapes = config.weight_shapes()
    if is_whole:
        return weights_item("target", shapes, dtype)
    ends = {name: shapes[name] for name in ("embed.weight", "lm_head.weight") if name in shapes}
    return weights_item("target's ends", ends, dtype)


def _row_bytes(config: DecoderConfig, method: str, sizes: TrainingSizes, dtype: torch.dtype) -> int:
    """What autograd keeps of one packed row until the way back, all steps and layers."""
    hidden = config.hidden_size
    output = 8 * hidden  # what the output head reads, and its gradient
    if method == "medusa":
        return sizes.num_steps * (4 * 3 * hidden + output)
    if method == "draft":
        layer = replace(config, mlp_size=sizes.mlp_size or config.mlp_size)
        return sizes.num_layers * _layer_bytes(layer, hidden, dtype) + output
    inputs = 2 * hidden if method == "eagle3" else hidden
    step = _layer_bytes(config, inputs, dtype) + 4 * 4 * hidden + output  # joining and leaving
    # Later steps attend by plain products: a row keeps its scores' softmax, masked and cast.
    scores = (4 + dtype.itemsize) * config.num_heads * sizes.mean_length
    return sizes.num_steps * step + (sizes.num_steps - 1) * scores


def _layer_bytes(config: DecoderConfig, inputs: int, dtype: torch.dtype) -> int:
    """What autograd keeps of one row in one layer.

    Float32: the residual in and behind attention and their normed forms, queries and keys around
    the rotation. In the products' type: what q, k, v read, queries, keys, values and attention's
    output, what gate and up read, and four MLP-wide tensors (gate, its silu, up, their product).
    """
    hidden, width = config.hidden_size, dtype.itemsize
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    exact = 4 * (4 * hidden + 2 * (queries + keys))
    return exact + width * (inputs + hidden + 2 * queries + 2 * keys + 4 * config.mlp_size)


def _free_disk(folder: Path) -> int | None:
    """Bytes free where the folder is or will be."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _available(device: str) -> int | None:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def _short(items: tuple[MemoryItem, ...], there_is: int) -> str:
    parts = ", ".join(f"{item.what} {_gib(item.size_bytes)}" for item in items)
    total = sum(item.size_bytes for item in items)
    return f"it needs {_gib(total)} ({parts}) but {_gib(there_is)} are"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
