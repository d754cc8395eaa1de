"""What ``torchrun`` starts in the tests: several tiny runs, one after the other, over processes.

Arguments: ``loops`` and a folder, each of whose sub-folders is named after a method and trained in
to the end, from the checkpoint that is there, if any; or ``run``, a folder with a model and
prompts, and a run folder: all stages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.config import Method
from outrider.training import data as data_module
from outrider.training.data import DataSettings
from outrider.training.distributed import ALONE, Processes, join_processes
from outrider.training.loop import LoopSettings, TrainingLoop, TrainingResult
from outrider.training.packing import TrainingSequence
from outrider.training.recipes import (
    DraftOptions,
    Eagle3Options,
    MedusaOptions,
    MtpOptions,
    Options,
    Recipe,
    create_recipe,
)
from outrider.training.responses import ResponseSettings
from outrider.training.run import RunResult, TrainSettings, train_head
from outrider.training.store import sole_writer
from tests.models import random_weights
from tests.training.tiny_training import (
    CAPTURES,
    objective,
    tiny_ends,
    tiny_sequences,
    tiny_target,
    tiny_vocabulary,
)

# Five batches to an epoch, fifteen in all: in the last step one process has none of its own. One
# sequence is all prompt, so in each epoch a batch has nothing to learn from.
LEARNT = ((19, 7), (21, 4), (40, 40), (38, 5), (21, 9), (19, 2), (35, 6))
HELD_OUT = ((25, 6), (23, 4), (30, 3))
OPTIONS: dict[Method, Options] = {
    Method.EAGLE3: Eagle3Options(capture_layers=CAPTURES, train_head=True),
    Method.MTP: MtpOptions(),
    Method.MEDUSA: MedusaOptions(),
    Method.DRAFT: DraftOptions(layers=(0, 3)),
}
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "tokens_per_batch": 40,
    "learning_rate": 3e-3,
    "log_every": 3,
    "validate_every": 4,
    "checkpoint_every": 4,
    "keep": 100,
    "autocast": False,
}


class Sequences:
    """Sequences in memory, their states in float64."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._sequences = [
            replace(
                sequence, states_TC=sequence.states_TC.double(), final_TD=sequence.final_TD.double()
            )
            for sequence in tiny_sequences(tiny_target(), shapes=shapes)
            if sequence.states_TC is not None
        ]
        self.lengths = [length for length, _ in shapes]

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, index: int) -> TrainingSequence:
        return self._sequences[index]


def recipe_of(method: Method) -> Recipe:
    """In float64: Adam makes much of the last digits of a gradient that is nearly 0."""
    weights = random_weights(tiny_target().config)
    goal = objective(1) if method is Method.DRAFT else objective(vocabulary=tiny_vocabulary())
    ends = tiny_ends(torch.float64)
    return create_recipe(OPTIONS[method], ends, weights, goal, seed=0).double()


def train(
    folder: Path, method: Method, processes: Processes = ALONE, **changes: Any
) -> tuple[Recipe, TrainingResult]:
    """One run in a folder."""
    recipe = recipe_of(method)
    loop = TrainingLoop(
        recipe,
        Sequences(LEARNT),
        Sequences(HELD_OUT),
        folder,
        LoopSettings(**{**SETTINGS, "batches_per_step": 2, **changes}),
        about={"method": method.value},
        processes=processes,
    )
    if not processes.is_first:
        return recipe, loop.run()
    with sole_writer(folder):
        return recipe, loop.run()


def train_loops(root: Path) -> None:
    with join_processes("cpu") as processes:
        for folder in sorted(root.iterdir()):
            recipe, result = train(folder, Method(folder.name.partition("-")[0]), processes)
            ends = {name: tuple(tensor.shape) for name, tensor in recipe.weights().items()}
            text = f"{result.steps} {result.tokens} {result.acceptance:.12f} {ends}"
            (folder / f"rank-{processes.rank}.txt").write_text(text)


def train_whole(place: Path, out: Path) -> RunResult | None:
    """All stages of a tiny run; its limits on data are those of a test."""
    data_module.MIN_TOKENS, data_module.HELD_OUT = 100, 4
    settings = TrainSettings(
        method=Method.EAGLE3,
        out=out,
        model=str(place / "model"),
        data_settings=DataSettings(
            files=(place / "prompts.jsonl",),
            responses=ResponseSettings(max_tokens=16),
            batch_size=8,
            max_model_len=128,
            threads=1,
        ),
        loop=LoopSettings(
            epochs=2, tokens_per_batch=128, batches_per_step=2, log_every=1, autocast=False
        ),
        draft_vocab_size=100,
        eval_prompts=place / "eval.jsonl",
        eval_tokens=8,
    )
    result = train_head(settings)
    (out / f"told-{os.environ.get('RANK', 'alone')}").write_text(str(result is not None))
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    folders = [Path(folder) for folder in sys.argv[2:]]
    if sys.argv[1] == "loops":
        train_loops(*folders)
    else:
        train_whole(*folders)
