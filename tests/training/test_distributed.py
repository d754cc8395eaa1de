"""Several processes reach what one reaches, and each goes on from the other's checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import Method
from outrider.errors import CheckpointError, ParameterError
from outrider.training import data as data_module
from outrider.training import distributed
from outrider.training.distributed import ALONE, Processes, join_processes, world_size
from outrider.training.log import LOG, read_log
from outrider.training.loop import CHECKPOINTS, LoopSettings, TrainingLoop
from outrider.training.run import EVALUATION, HEAD, TrainSettings, answer_only
from outrider.training.store import latest_valid, load_state, sole_writer, verify_folder
from tests.tiny import write_hf_checkpoint
from tests.training.training_process import (
    OPTIONS,
    Sequences,
    recipe_of,
    train,
    train_whole,
)

ROOT = Path(__file__).parents[2]
NUM_STEPS, HALF = 8, 4  # fifteen batches, two to a step


def half_a_run(whole: Path, folder: Path) -> None:
    """A run that was killed half-way."""
    name = f"step-{HALF:07d}"
    shutil.copytree(whole / CHECKPOINTS / name, folder / CHECKPOINTS / name)
    shutil.copyfile(whole / LOG, folder / LOG)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``alone/METHOD``, ``two/METHOD``, and ``two/METHOD-resumed``, which one process began."""
    root = tmp_path_factory.mktemp("runs")
    for method in OPTIONS:
        train(root / "alone" / method, method)
        (root / "two" / method).mkdir(parents=True)
        half_a_run(root / "alone" / method, root / "two" / f"{method}-resumed")
    launch("loops", root / "two")
    return root


def launch(what: str, *folders: Path) -> None:
    """Have torchrun start two processes, and wait for their end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.training.training_process", what, *map(str, folders)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]


def assert_same_end(expected: Path, folder: Path) -> None:
    """Weights, optimiser and log, but for rounding."""
    before, after = (
        load_state(latest_valid(path / CHECKPOINTS, "step-*")[0]) for path in (expected, folder)
    )  # type: ignore[index]

    assert before.state["step"] == after.state["step"] == NUM_STEPS
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        torch.testing.assert_close(after.tensors[name], tensor, atol=1e-9, rtol=0)
    assert_close(before.state["optimizer"], after.state["optimizer"])
    assert_close(read_log(expected / LOG), read_log(folder / LOG))


def assert_close(expected: Any, value: Any) -> None:
    if isinstance(expected, torch.Tensor | float):
        torch.testing.assert_close(value, expected, atol=1e-9, rtol=1e-9)
    elif isinstance(expected, dict):
        assert list(expected) == list(value)
        for key in expected:
            assert_close(expected[key], value[key])
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(value)
        for one, other in zip(expected, value, strict=True):
            assert_close(one, other)
    else:
        assert expected == value


@pytest.mark.parametrize("method", OPTIONS)
def test_two_processes_train_as_one_that_takes_their_batches_in_one_step(runs, method):
    first, second = ((runs / "two" / method / f"rank-{r}.txt").read_text() for r in range(2))

    assert_same_end(runs / "alone" / method, runs / "two" / method)
    assert first == second
    assert first.startswith(f"{NUM_STEPS} ")
    whole = {name: tuple(tensor.shape) for name, tensor in recipe_of(method).weights().items()}
    assert first.endswith(f" {whole}")


@pytest.mark.parametrize("method", OPTIONS)
def test_two_processes_go_on_from_the_checkpoint_of_one(runs, method):
    assert_same_end(runs / "alone" / method, runs / "two" / f"{method}-resumed")


@pytest.mark.parametrize("method", OPTIONS)
def test_one_process_goes_on_from_the_checkpoint_of_two(runs, method, tmp_path):
    half_a_run(runs / "two" / method, tmp_path)
    train(tmp_path, method)

    assert_same_end(runs / "alone" / method, tmp_path)


def test_one_process_does_not_go_on_with_smaller_steps(runs, tmp_path):
    half_a_run(runs / "two" / Method.MTP, tmp_path)
    with pytest.raises(CheckpointError, match=r"loop\.batches_per_step was 2, is None"):
        train(tmp_path, Method.MTP, batches_per_step=1)


def test_batches_of_a_step_count_by_their_rows(tmp_path):
    """Two batches in one step, of many rows and of few, are as one batch of them all."""
    shapes, ends = ((38, 3), (9, 5), (17, 4)), []
    for changes in ({"tokens_per_batch": 64}, {"tokens_per_batch": 40, "batches_per_step": 2}):
        recipe = recipe_of(Method.MEDUSA)
        features = Sequences(shapes)
        folder = tmp_path / str(len(ends))
        loop = TrainingLoop(
            recipe,
            features,
            features,
            folder,
            LoopSettings(**{"epochs": 3, "autocast": False, **changes}),
            about={},
        )
        with sole_writer(folder):
            steps = loop.run().steps
        ends.append(recipe.weights())

        assert steps == 3
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, atol=1e-7, rtol=0)


def test_two_processes_run_all_stages_and_the_first_alone_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    for name in ("MIN_TOKENS", "HELD_OUT"):  # the run sets them; they are put back afterwards
        monkeypatch.setattr(data_module, name, getattr(data_module, name))
    write_hf_checkpoint(tmp_path / "model", scale=0.15, num_layers=4)
    for name in ("prompts", "eval"):
        count = 16 if name == "prompts" else 2
        rows = [
            {"id": f"{name}{i}", "category": "road", "prompt": f"Where does road {i} go?"}
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone, two = tmp_path / "alone", tmp_path / "two"
    result = train_whole(tmp_path, alone)
    launch("run", tmp_path, two)
    before, after = read_log(alone / LOG), read_log(two / LOG)

    assert result is not None
    assert ["True", "False"] == [(two / f"told-{rank}").read_text() for rank in range(2)]
    assert (alone / "data" / "responses.jsonl").read_bytes() == (
        two / "data" / "responses.jsonl"
    ).read_bytes()
    assert len(before) == len(after) == result.training.steps + 1
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        if "losses" in one:
            assert pytest.approx(one["losses"], rel=1e-3) == other["losses"]
    assert {HEAD, EVALUATION} <= {path.name for path in two.iterdir()}
    assert verify_folder(two / HEAD).meta["training"]["steps"] == result.training.steps


def test_every_process_computes_as_often_and_each_item_counts_once():
    items = list("abcde")
    shares = [list(Processes(rank, 3).divide(items)) for rank in range(3)]
    counted = sorted(item for share in shares for item, counts in share if counts)

    assert [2, 2, 2] == [len(share) for share in shares]
    assert items == counted
    assert [("a", True), ("b", True)] == list(ALONE.divide("ab"))


def test_a_step_must_be_shared_evenly(tmp_path):
    with pytest.raises(ParameterError, match=r"batches_per_step: 2 .* 3 processes.*multiple"):
        train(tmp_path, Method.MTP, Processes(0, 3))


def test_one_process_needs_no_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes("cpu") as processes:
        found = processes

    assert found is ALONE
    assert world_size() == 1


@pytest.mark.parametrize("value", ["0", "two", "-1", ""])
def test_an_environment_that_torchrun_does_not_make_is_named(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ParameterError, match=rf"WORLD_SIZE is '{value}'; start it with: torchrun"):
        world_size()


def test_a_missing_variable_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ParameterError, match="RANK is not set"), join_processes("cpu"):
        pass


@pytest.mark.parametrize(
    ("device", "message"), [("cuda:1", "names one GPU"), ("cuda", "has no GPU: there are 1")]
)
def test_more_processes_than_gpus_are_refused(monkeypatch, device, message):
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ParameterError, match=message), join_processes(device):
        pass


def test_answers_are_not_shared_by_torchrun(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ParameterError, match="--part"):
        answer_only(TrainSettings(method=Method.MTP, out=tmp_path))
