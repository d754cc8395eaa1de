"""Does training work on this machine's GPUs: right, how fast, with how much memory, and together?

Trains an EAGLE-3 head of SmolLM2-135M's sizes on made-up states, through the trainer's own loop,
and prints one JSON document:

    checks     a batch's gradient and the first steps' losses on the GPU against those on the CPU,
               in float32 and under bfloat16 autocast; a resumed run against an undisturbed one;
               two GPUs against one
    speed      tokens per second of each kind of run, and the most GPU memory that was taken

    python scripts/gpu_check.py                 # a few minutes; needs an installed package only
    python scripts/gpu_check.py --device cpu --tokens 256 --speed-steps 2   # a rehearsal

Exit status 0: all checks passed, or there is no GPU to check, which it says; 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.models.architecture import DecoderConfig
from outrider.training.distributed import ALONE, Processes, join_processes
from outrider.training.log import LOG, TIMES, read_log
from outrider.training.loop import CHECKPOINTS, LoopSettings, TrainingLoop
from outrider.training.packing import TrainingSequence, pack
from outrider.training.recipes import Eagle3Options, Objective, Recipe, TargetEnds, create_recipe
from outrider.vocabulary import DraftVocabulary

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_size=1536,
    norm_eps=1e-5,
    max_position=8192,
    tied_embeddings=True,
)
CAPTURES = (2, 15, 27)
DRAFT_VOCAB = 12288
STEP_WEIGHTS = (1.0, 0.8, 0.64)
SEQUENCE_TOKENS = 256
DISTINCT_TOKENS = 64  # few, so that the first steps already learn something
FIRST_STEPS = 6  # that are compared, and resumed in the middle of
# Relative. Float32 differs by the order of sums, bfloat16 keeps 8 bits. The losses fall by a
# twentieth or more within the steps that are compared.
LOSS_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-3}
GRADIENT_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
# A row of the embedding, times this, is its token's final state: the target then gives that token
# about two thirds of its probability, which a head can learn.
EMBEDDING_STD = 0.02


class MadeUpStates:
    """Sequences of random tokens whose final states point at their own tokens.

    The captured states are that state with noise. Each sequence follows from its index alone.
    """

    def __init__(self, embedding_VD: torch.Tensor, count: int, *, seed: int) -> None:
        self._embedding_VD = embedding_VD
        self._seed = seed
        self.lengths = [SEQUENCE_TOKENS] * count

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, index: int) -> TrainingSequence:
        """One sequence, the first quarter of it prompt."""
        generator = torch.Generator().manual_seed(1000 * self._seed + index)
        token_T = torch.randint(DISTINCT_TOKENS, (SEQUENCE_TOKENS,), generator=generator)
        final_TD = self._embedding_VD[token_T] / EMBEDDING_STD
        noise_TC = torch.randn(SEQUENCE_TOKENS, 3 * CONFIG.hidden_size, generator=generator)
        states_TC = final_TD.repeat(1, 3) + noise_TC
        return TrainingSequence(
            token_T.tolist(), SEQUENCE_TOKENS // 4, states_TC.bfloat16(), final_TD.bfloat16()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the loop; JSON in a command line tells the processes of torchrun."""

    device: str
    tokens: int
    steps: int
    autocast: bool = True
    batches_per_step: int = 1

    def run(self, folder: Path, processes: Processes = ALONE) -> None:
        """Train in a folder; goes on from the checkpoint that is there."""
        embedding_VD = make_embedding()
        per_batch = self.tokens // SEQUENCE_TOKENS
        count = per_batch * self.batches_per_step * self.steps
        loop = TrainingLoop(
            make_recipe(embedding_VD, self.device, autocast=self.autocast),
            MadeUpStates(embedding_VD, count, seed=1),
            MadeUpStates(embedding_VD, per_batch, seed=2),
            folder,
            LoopSettings(
                epochs=1,
                tokens_per_batch=self.tokens,
                batches_per_step=self.batches_per_step,
                autocast=self.autocast,
                log_every=1,
                validate_every=10**6,
                checkpoint_every=FIRST_STEPS // 2,
                keep=100,
            ),
            about={},
            processes=processes,
        )
        loop.run()


def make_embedding() -> torch.Tensor:
    """The target's embedding, which is its output head too."""
    generator = torch.Generator().manual_seed(0)
    size = (CONFIG.vocab_size, CONFIG.hidden_size)
    return torch.randn(size, generator=generator) * EMBEDDING_STD


def make_recipe(embedding_VD: torch.Tensor, device: str, *, autocast: bool) -> Recipe:
    """A fresh head; the same on every device."""
    weights = {"embed.weight": embedding_VD}
    dtype = torch.bfloat16 if autocast else torch.float32
    ends = TargetEnds.of(CONFIG, weights, dtype=dtype, device=device)
    vocabulary = DraftVocabulary(np.arange(DRAFT_VOCAB), CONFIG.vocab_size)
    options = Eagle3Options(capture_layers=CAPTURES, init="random")
    objective = Objective(step_weights=STEP_WEIGHTS, vocabulary=vocabulary)
    return create_recipe(options, ends, weights, objective, seed=0)


def first_losses(folder: Path) -> list[float]:
    """Step 0's loss of each of the first optimiser steps."""
    lines = [line["losses"][0] for line in read_log(folder / LOG) if "losses" in line]
    return lines[:FIRST_STEPS]


def tokens_per_second(folder: Path) -> float:
    """Of the later half of a run: the first steps also load kernels."""
    times = read_log(folder / TIMES)
    first, last = times[(len(times) - 1) // 2], times[-1]
    return (last["tokens"] - first["tokens"]) / max(1e-9, last["seconds"] - first["seconds"])


def compare(expected: Sequence[float], found: Sequence[float], tolerance: float) -> dict[str, Any]:
    """A check: two series of losses, and whether each pair is close enough."""
    pairs = list(zip(expected, found, strict=True))
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    return {
        "passed": difference <= tolerance,  # False for what is no number
        "largest_relative_difference": difference,
        "tolerance": tolerance,
        "expected": list(expected),
        "found": list(found),
    }


def check_losses(root: Path, device: str, tokens: int) -> dict[str, Any]:
    """The first steps here and on the CPU, in both precisions."""
    checks = {}
    for name, tolerance in LOSS_TOLERANCES.items():
        for where in dict.fromkeys(("cpu", device)):
            job = Job(device=where, tokens=tokens, steps=FIRST_STEPS, autocast=name == "bfloat16")
            job.run(root / name / where)
        on_cpu, here = (first_losses(root / name / where) for where in ("cpu", device))
        checks[f"{name} losses against the CPU"] = compare(on_cpu, here, tolerance)
    return checks


def check_gradients(device: str, tokens: int) -> dict[str, Any]:
    """The whole gradient of one batch here and on the CPU, in both precisions."""
    checks = {}
    for name, tolerance in GRADIENT_TOLERANCES.items():
        on_cpu, here = (
            gradient(where, tokens, autocast=name == "bfloat16") for where in ("cpu", device)
        )
        difference = float((here - on_cpu).norm() / on_cpu.norm())
        checks[f"{name} gradient against the CPU"] = {
            "passed": difference <= tolerance,
            "relative_difference": difference,
            "tolerance": tolerance,
        }
    return checks


def gradient(device: str, tokens: int, *, autocast: bool) -> torch.Tensor:
    """Of the mean loss of one batch, all parameters end to end."""
    embedding_VD = make_embedding()
    recipe = make_recipe(embedding_VD, device, autocast=autocast)
    features = MadeUpStates(embedding_VD, tokens // SEQUENCE_TOKENS, seed=3)
    batch = pack([features.sequence(index) for index in range(len(features))]).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        results = recipe.losses(batch)
    (results.total / results.rows_S[0]).backward()
    parts = [p.grad.flatten().cpu() for p in recipe.parameters() if p.grad is not None]
    return torch.cat(parts)


def check_resuming(root: Path, device: str, tokens: int) -> dict[str, Any]:
    """The run of :func:`check_losses` again, from its checkpoint half-way."""
    whole, again = root / "bfloat16" / device, root / "again"
    name = f"step-{FIRST_STEPS // 2:07d}"
    shutil.copytree(whole / CHECKPOINTS / name, again / CHECKPOINTS / name)
    shutil.copyfile(whole / LOG, again / LOG)
    Job(device=device, tokens=tokens, steps=FIRST_STEPS).run(again)
    check = compare(first_losses(whole), first_losses(again), LOSS_TOLERANCES["float32"])
    return {"resumed against undisturbed": check}


def check_two(root: Path, device: str, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two processes against one that takes their batches in one step; and their speed."""
    job = Job(device=device, tokens=tokens, steps=2 * FIRST_STEPS, batches_per_step=2)
    job.run(root / "one")
    fields = {name: getattr(job, name) for name in Job.__slots__}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, __file__, "--job", json.dumps(fields)]
    done = subprocess.run(
        [*command, "--folder", str(root / "two")],
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        return {"two against one": {"passed": False, "stderr": done.stderr[-3000:]}}, {}
    check = compare(
        first_losses(root / "one"), first_losses(root / "two"), LOSS_TOLERANCES["bfloat16"]
    )
    rates = {f"{name}_tokens_per_second": tokens_per_second(root / name) for name in ("one", "two")}
    return {"two against one": check}, {"two processes": {"tokens_per_batch": tokens, **rates}}


def measure_speed(root: Path, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """A longer run under autocast."""
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    Job(device=device, tokens=tokens, steps=steps).run(root / "speed")
    losses = [line["losses"][0] for line in read_log(root / "speed" / LOG) if "losses" in line]
    return {
        "tokens_per_batch": tokens,
        "tokens_per_second": tokens_per_second(root / "speed"),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """All checks, in one document."""
    device, tokens, started = arguments.device, arguments.tokens, time.monotonic()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    speed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        checks = check_gradients(device, tokens)
        checks |= check_losses(root, device, tokens)
        checks |= check_resuming(root, device, tokens)
        long = measure_speed(root, device, 4 * tokens, arguments.speed_steps)
        speed["one process"] = long
        checks["the loss falls"] = {"passed": long["last_loss"] < long["first_loss"]}
        if device == "cpu" or len(names) > 1:
            more, rates = check_two(root, device, tokens)
            checks |= more
            speed |= rates
    return {
        "device": device,
        "gpus": names,
        "torch": torch.__version__,
        "passed": all(result["passed"] for result in checks.values()),
        "checks": checks,
        "speed": speed,
        "seconds": time.monotonic() - started,
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=1024, help="of a batch that is compared")
    parser.add_argument("--speed-steps", type=int, default=60, help="of the run that is timed")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # of the processes started above
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tokens < SEQUENCE_TOKENS or arguments.speed_steps < 2:
        parser.error(f"--tokens from {SEQUENCE_TOKENS} on, --speed-steps from 2 on")
    if arguments.job is not None:
        job = Job(**json.loads(arguments.job))
        with join_processes(job.device) as processes:
            job.run(arguments.folder, processes)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        message = "no CUDA device here (or a torch without CUDA): nothing was checked"
        print(json.dumps({"passed": None, "message": message}))
        return 0
    document = check(arguments)
    print(json.dumps(document, indent=1))
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
