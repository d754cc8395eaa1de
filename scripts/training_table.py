"""What training a head takes for targets of several sizes: the tables in ``docs/training.md``.

Sizes follow from the architectures by the formulas of :mod:`outrider.training.estimate` and, for
the target that answers, by the engine's own memory plan. Hours are rates measured on one machine
with the embedded model, scaled by the operations per token; ``--speedup`` is how many times as fast
another machine is, and a GPU, which trains the head only, is given by what it sustains.

    python scripts/training_table.py
    python scripts/training_table.py --methods eagle3,mtp,medusa,draft --response-tokens 1000000

Loads no weights; prints Markdown to stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider import EngineConfig, Method, SpeculationConfig
from outrider.commands.console import format_bytes
from outrider.llm import plan_pair
from outrider.models.architecture import DecoderConfig
from outrider.training.data import DataSettings
from outrider.training.estimate import (
    METHODS,
    StageFigures,
    TrainingSizes,
    estimate,
    hours,
    scale_rates,
    work_per_token,
)
from outrider.training.recipes import step_weights
from outrider.training.settings import TrainSettings, vocabulary_size

_LLAMA = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=14_336,
    norm_eps=1e-5,
    max_position=131_072,
)
# What the rates were measured with: the embedded model, EAGLE-3, five steps.
MEASURED_TARGET = replace(
    _LLAMA,
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_size=1536,
    tied_embeddings=True,
)
TARGETS = {
    "135M (SmolLM2, embedded)": MEASURED_TARGET,
    "1B (Llama 3.2)": replace(
        _LLAMA,
        hidden_size=2048,
        num_layers=16,
        head_dim=64,
        mlp_size=8192,
        tied_embeddings=True,
    ),
    "8B (Llama 3.1)": _LLAMA,
    "70B (Llama 3.3)": replace(
        _LLAMA, hidden_size=8192, num_layers=80, num_heads=64, mlp_size=28_672
    ),
}
MEASURED_SIZES = TrainingSizes(num_steps=5, draft_vocab_size=12_288)
MEASURED_RATES = StageFigures(generation=320, features=900, training=1150)  # 2 AMX cores, bfloat16

COLUMNS = (
    "target",
    "head",
    "trained",
    "disk: features",
    "checkpoints, head",
    "memory: target answering",
    "training beside it",
    "hours: answers",
    "features",
    "training",
    "training on the GPU",
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the table is for."""

    response_tokens: int
    num_tokens: int
    epochs: int
    rates: StageFigures
    speedup: float
    gpu_tflops: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each target and method."""
    args = _arguments(arguments)
    conditions = Conditions(
        args.response_tokens,
        round(args.response_tokens * (1 + args.prompt_share)),
        args.epochs,
        StageFigures(args.answer_rate, args.feature_rate, args.training_rate),
        args.speedup,
        args.gpu_tflops,
    )
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---:|" * (len(COLUMNS) - 2))
    for name, config in TARGETS.items():
        for method in args.methods.split(","):
            print("| " + " | ".join((name, method, *_cells(config, method, conditions))) + " |")


def _cells(config: DecoderConfig, method: str, conditions: Conditions) -> tuple[str, ...]:
    """What a run with the command's default settings takes."""
    settings = TrainSettings(method=Method(method), out=Path())
    sizes = TrainingSizes(
        num_steps=len(step_weights(settings.method)),
        draft_vocab_size=vocabulary_size(settings, config),
        tokens_per_batch=settings.loop.tokens_per_batch,
        checkpoints_kept=settings.loop.keep,
    )
    plan = estimate(config, method, conditions.num_tokens, Path(), sizes=sizes)
    disk = {item.what: item.size_bytes for item in plan.disk}
    time = _hours(config, method, sizes, conditions)
    work = work_per_token(config, method, sizes).training
    on_gpu = conditions.epochs * conditions.num_tokens * work / (conditions.gpu_tflops * 1e12)
    trained = disk["head"] // 2  # two bytes each
    return (
        f"{trained / 1e6:,.0f} M",
        format_bytes(disk["features"]),
        format_bytes(disk["checkpoints"] + disk["head"]),
        format_bytes(_answering_bytes(config)),
        format_bytes(plan.memory_bytes),
        _hour(time.generation),
        _hour(time.features),
        _hour(time.training),
        _hour(on_gpu / 3600),
    )


def _hours(
    config: DecoderConfig, method: str, sizes: TrainingSizes, conditions: Conditions
) -> StageFigures:
    """The measured rates, scaled to another target."""
    rates = scale_rates(
        conditions.rates,
        work_per_token(MEASURED_TARGET, "eagle3", MEASURED_SIZES),
        work_per_token(config, method, sizes),
        conditions.speedup,
    )
    return hours(
        response_tokens=conditions.response_tokens,
        num_tokens=conditions.num_tokens,
        epochs=conditions.epochs,
        rates=rates,
    )


def _answering_bytes(config: DecoderConfig) -> int:
    """The target with its caches as it answers prompts, which stays while the head trains."""
    data = DataSettings()
    engine = EngineConfig(
        max_batch_size=data.batch_size, max_model_len=data.max_model_len, dtype="bfloat16"
    )
    return plan_pair(config, SpeculationConfig(method=Method.OFF), engine, None).total_bytes


def _hour(hours_: float) -> str:
    if hours_ < 0.1:
        return "< 0.1"
    return f"{hours_:,.0f}" if hours_ >= 10 else f"{hours_:.1f}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    rates = MEASURED_RATES
    parser = argparse.ArgumentParser(description="What training a head takes, as a table.")
    parser.add_argument("--methods", default="eagle3", help=",".join(METHODS))
    parser.add_argument("--response-tokens", type=int, default=3_000_000)
    parser.add_argument(
        "--prompt-share", type=float, default=0.9, help="prompt tokens for each response token"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--answer-rate", type=float, default=rates.generation, help="tokens/s")
    parser.add_argument("--feature-rate", type=float, default=rates.features, help="tokens/s")
    parser.add_argument("--training-rate", type=float, default=rates.training, help="tokens/s")
    parser.add_argument("--speedup", type=float, default=1.0, help="of another machine")
    parser.add_argument("--gpu-tflops", type=float, default=100.0, help="sustained in training")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
