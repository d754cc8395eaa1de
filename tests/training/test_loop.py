"""The loop: the same weights and log after any kill, and a clear end where it cannot go on."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from outrider.config import Method
from outrider.errors import (
    CapacityError,
    CheckpointError,
    FailureError,
    ParameterError,
    TrainingError,
)
from outrider.report.curve import draw_curve
from outrider.training import log, store
from outrider.training.log import LOG, TIMES, JsonLines, read_log
from outrider.training.loop import (
    CHECKPOINTS,
    TrainingLoop,
    TrainingResult,
    require_same_run,
)
from outrider.training.loop_settings import LoopSettings, learning_rate
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
from outrider.training.store import STATE, TENSORS, latest_valid, load_state
from tests.models import random_weights
from tests.training.tiny_training import (
    CAPTURES,
    objective,
    tiny_ends,
    tiny_sequences,
    tiny_target,
    tiny_vocabulary,
)

NUM_KILLS = 30
# Two to a batch, so that an epoch has four steps and the order matters.
LEARNT = ((19, 7), (14, 4), (11, 3), (16, 5), (21, 9), (9, 2), (12, 6), (17, 4))
HELD_OUT = ((15, 6), (13, 4))
OPTIONS: dict[Method, Options] = {
    Method.EAGLE3: Eagle3Options(capture_layers=CAPTURES),
    Method.MTP: MtpOptions(),
    Method.MEDUSA: MedusaOptions(),
    Method.DRAFT: DraftOptions(layers=(0, 3)),
}
ABOUT = {"method": "mtp", "data": {"responses_hash": "aa"}, "target": {"weights_hash": "bb"}}


class Sequences:
    """Sequences in memory; ``on_read`` may interrupt."""

    def __init__(
        self, sequences: Sequence[TrainingSequence], on_read: Callable[[], None] = lambda: None
    ) -> None:
        self._sequences = list(sequences)
        self._on_read = on_read
        self.lengths = [len(sequence.token_ids) for sequence in sequences]

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, index: int) -> TrainingSequence:
        self._on_read()
        return self._sequences[index]


def settings(**changes: Any) -> LoopSettings:
    usual = {
        "epochs": 4,
        "tokens_per_batch": 40,
        "learning_rate": 3e-3,
        "log_every": 3,
        "validate_every": 5,
        "checkpoint_every": 2,
    }
    return LoopSettings(**{**usual, **changes})


@cache
def known(shapes: tuple[tuple[int, int], ...]) -> list[TrainingSequence]:
    return tiny_sequences(tiny_target(), shapes=shapes)


def recipe_of(method: Method = Method.MTP) -> Recipe:
    torch.manual_seed(0)
    weights = random_weights(tiny_target().config)
    goal = objective(vocabulary=tiny_vocabulary())
    if method is Method.DRAFT:
        goal = objective(1)
    return create_recipe(OPTIONS[method], tiny_ends(), weights, goal, seed=0)


def loop_of(
    folder: Path,
    recipe: Recipe | None = None,
    *,
    shapes: tuple[tuple[int, int], ...] = LEARNT,
    about: dict[str, Any] | None = None,
    on_read: Callable[[], None] = lambda: None,
    on_progress: Callable[[str, float | None], None] | None = None,
    on_skip: Callable[[Path, str], None] | None = None,
    **changes: Any,
) -> TrainingLoop:
    return TrainingLoop(
        recipe_of() if recipe is None else recipe,
        Sequences(known(shapes), on_read),
        Sequences(known(HELD_OUT)),
        folder,
        settings(**changes),
        about=ABOUT if about is None else about,
        on_progress=on_progress,
        on_skip=on_skip,
    )


def train(folder: Path, **changes: Any) -> TrainingResult:
    return loop_of(folder, **changes).run()


def newest(folder: Path) -> Path:
    found = latest_valid(folder / CHECKPOINTS, "step-*")
    assert found is not None
    return found[0]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / CHECKPOINTS).glob("step-*"))


def assert_same_end(expected: Path, folder: Path) -> None:
    """Weights, optimiser, position and log, bit for bit."""
    before, after = load_state(newest(expected)), load_state(newest(folder))
    for state in (before, after):
        del state.state["seconds"], state.state["random"]["python"]  # this process', not the run's

    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor, after.tensors[name]), name
    assert_equal(before.state, after.state)
    assert (expected / LOG).read_bytes() == (folder / LOG).read_bytes()


def assert_equal(expected: Any, value: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, value)
    elif isinstance(expected, dict):
        assert expected.keys() == value.keys()
        for key in expected:
            assert_equal(expected[key], value[key])
    else:
        assert expected == value


def damage(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def interrupt_after(count: int) -> Callable[[], None]:
    """A Ctrl-C at the call after so many."""
    left = iter(range(count))

    def call() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return call


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return folder


WRITE_FILE = store._write_file


def start(folder: Path) -> tuple[int, int]:
    """A process of its own that trains: its id, and where it ticks.

    It ticks at every sequence that it reads and at every half of a file that it saves, so that a
    kill can be aimed at any of these moments however busy the machine is.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading

    def tick() -> None:
        os.write(writing, b".")

    def write_in_halves(path: Path, content: store.Content) -> tuple[int, str]:
        if not isinstance(content, bytes):
            content(path)
            content = path.read_bytes()
        with path.open("wb") as file:
            for part in (content[: len(content) // 2], content[len(content) // 2 :]):
                tick()
                time.sleep(0.002)
                file.write(part)
                file.flush()
        return WRITE_FILE(path, content)

    status = 1
    try:
        store._write_file = write_in_halves
        with store.sole_writer(folder):
            train(folder, on_read=tick)
        status = 0
    finally:
        os._exit(status)


def kill(child: int, ticks: int, after: int, delay_s: float) -> bool:
    """Kill it a moment behind so many ticks; whether it was still running."""
    seen = 0
    while seen < after and (read := os.read(ticks, after - seen)):
        seen += len(read)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.close(ticks)
    _, status = os.waitpid(child, 0)

    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_any_moment_change_neither_weights_nor_log(undisturbed, tmp_path):
    chance = random.Random(7)
    folder = tmp_path / "run"
    num_kills, num_in_save, resumed_from = 0, 0, set()
    while num_kills < NUM_KILLS:
        if kill(*start(folder), chance.randrange(40), chance.uniform(0.0, 0.004)):
            num_kills += 1
            num_in_save += bool(list(folder.glob(f"{CHECKPOINTS}/.*.partial")))
            resumed_from.add(max(steps_in(folder), default=0))
        else:
            assert_same_end(undisturbed, folder)
            shutil.rmtree(folder)
    with store.sole_writer(folder):
        train(folder)

    assert_same_end(undisturbed, folder)
    assert num_in_save >= 5
    assert len(resumed_from) >= 4
    assert not list(folder.glob(f"{CHECKPOINTS}/.*"))


@pytest.mark.parametrize("method", OPTIONS)
def test_every_recipe_learns_and_resumes_bit_for_bit(tmp_path, method):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    result = train(whole, recipe=recipe_of(method))
    with pytest.raises(KeyboardInterrupt):
        train(halves, recipe=recipe_of(method), on_read=interrupt_after(25))
    before = steps_in(halves)
    again = train(halves, recipe=recipe_of(method))
    looks = [line["validation"] for line in read_log(whole / LOG) if "validation" in line]

    assert 0 < max(before) < result.steps
    assert_same_end(whole, halves)
    assert (result.steps, result.tokens, result.acceptance, result.accuracy) == (
        again.steps,
        again.tokens,
        again.acceptance,
        again.accuracy,
    )
    assert looks[-1]["losses"][0] < looks[0]["losses"][0]
    assert looks[-1]["acceptance"] == result.acceptance
    assert 1.0 <= result.acceptance <= 1 + 5


def test_a_finished_run_is_only_looked_at_again(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    recipe = recipe_of()
    result = train(folder, recipe=recipe)
    saved = load_state(newest(undisturbed)).tensors

    assert_same_end(undisturbed, folder)
    assert result.steps == max(steps_in(folder))
    for name, tensor in recipe.state_dict().items():
        assert torch.equal(saved[name], tensor)


def test_only_so_many_checkpoints_stay(undisturbed, tmp_path):
    train(tmp_path, keep=3)
    steps = max(steps_in(undisturbed))

    assert [steps - 2, steps] == steps_in(undisturbed)
    assert [steps - 4, steps - 2, steps] == steps_in(tmp_path)


@pytest.mark.parametrize("every", [1, 5, 1000])
def test_how_often_it_saves_changes_nothing(undisturbed, tmp_path, every):
    train(tmp_path, checkpoint_every=every)

    assert_same_end(undisturbed, tmp_path)


@pytest.mark.parametrize("file", [TENSORS, STATE, "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(undisturbed, tmp_path, file):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    last = newest(folder)
    damage(last / file)
    skipped: list[tuple[Path, str]] = []
    train(folder, on_skip=lambda path, why: skipped.append((path, why)))

    ((path, why),) = skipped
    assert last == path
    assert str(last / file) in why
    assert_same_end(undisturbed, folder)


def test_when_all_checkpoints_are_damaged_nothing_is_begun_anew_in_silence(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    for path in (folder / CHECKPOINTS).glob("step-*"):
        damage(path / TENSORS)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is sound") as caught:
        train(folder)

    assert str(newest(undisturbed).name) in str(caught.value)
    assert "remove" in str(caught.value)
    assert (undisturbed / LOG).read_bytes() == (folder / LOG).read_bytes()
    shutil.rmtree(folder / CHECKPOINTS)
    train(folder)
    assert_same_end(undisturbed, folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 1e-3}, "loop.learning_rate was 0.003, is 0.001"),
        ({"epochs": 5}, "loop.epochs was 4, is 5"),
        ({"autocast": False}, "loop.autocast was True, is False"),
        (
            {"about": {**ABOUT, "data": {"responses_hash": "cc"}}},
            "data.responses_hash was aa, is cc",
        ),
        (
            {"about": {**ABOUT, "target": {"weights_hash": "dd"}}},
            "target.weights_hash was bb, is dd",
        ),
        ({"about": {**ABOUT, "method": "medusa"}}, "method was mtp, is medusa"),
    ],
)
def test_a_run_with_other_settings_is_refused_by_name(undisturbed, tmp_path, changes, named):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    with pytest.raises(CheckpointError, match="another run folder") as caught:
        train(folder, **changes)

    assert named in str(caught.value)
    assert 1 == str(caught.value).count(" was ")
    assert_same_end(undisturbed, folder)


def test_settings_that_decide_nothing_may_change(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    train(folder, checkpoint_every=7, keep=1)

    assert_same_end(undisturbed, folder)


def test_every_difference_is_named_at_once(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        require_same_run({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": 4}}, tmp_path)

    for named in ("a was 1, is None", "b.c was 2, is 3", "b.d was None, is 4"):
        assert named in str(caught.value)


class _Spoiled(torch.autograd.Function):
    """Hands a value through; its slope is infinite."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * math.inf


@pytest.mark.parametrize(
    ("what", "spoil"),
    [("loss is nan", lambda total: total * math.nan), ("gradient is", _Spoiled.apply)],
)
def test_a_loss_or_gradient_that_is_no_number_stops_the_run(
    undisturbed, tmp_path, monkeypatch, what, spoil
):
    """Before a weight is touched: else the next checkpoint would hold it."""
    recipe = recipe_of()
    losses, num_calls = recipe.losses, 0

    def spoiled(batch):
        nonlocal num_calls
        num_calls += recipe.training
        results = losses(batch)
        if num_calls < 8:
            return results
        return replace(results, total=spoil(results.total))

    monkeypatch.setattr(recipe, "losses", spoiled)
    with pytest.raises(TrainingError, match=f"the {what}.* at step 8.*learning rate"):
        train(tmp_path, recipe=recipe, checkpoint_every=1)

    assert [6, 7] == steps_in(tmp_path)
    assert all(bool(parameter.isfinite().all()) for parameter in recipe.parameters())
    train(tmp_path)
    assert_same_end(undisturbed, tmp_path)


@pytest.mark.parametrize("method", OPTIONS)
def test_a_batch_with_nothing_to_learn_from_changes_no_weight(tmp_path, method):
    """Prompts alone, and single tokens: no row counts, and the optimiser's momentum must rest."""
    recipe = recipe_of(method)
    nothing = ((12, 12), (1, 1))
    train(tmp_path / "a", recipe=recipe, shapes=LEARNT, epochs=1)
    before = recipe.weights()
    loop = loop_of(tmp_path / "b", recipe, shapes=nothing, epochs=2, weight_decay=0.1)
    result = loop.run()

    assert result.steps == 2
    assert result.tokens == 2 * 13
    for name, tensor in recipe.weights().items():
        assert torch.equal(before[name], tensor), name


def test_a_full_disk_leaves_the_checkpoint_before(undisturbed, tmp_path, monkeypatch):
    num_left = 2 * 3  # files of two checkpoints

    def write(path: Path, content: store.Content) -> tuple[int, str]:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return WRITE_FILE(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_file", write)
        with pytest.raises(CapacityError, match=r"step-0000006.*make room"):
            train(tmp_path)

    assert [2, 4] == steps_in(tmp_path)
    train(tmp_path)
    assert_same_end(undisturbed, tmp_path)


def test_a_disk_too_full_for_the_log_is_named(undisturbed, tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(log.os, "fsync", full)
        with pytest.raises(CapacityError, match=r"jsonl: .*make room"):
            train(tmp_path)
    train(tmp_path)

    assert_same_end(undisturbed, tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")

    with pytest.raises(CheckpointError, match="run"):
        train(tmp_path / "run")


def test_what_stands_in_the_log_behind_the_checkpoint_is_cut_off(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    damage(newest(folder) / TENSORS)
    with (folder / LOG).open("ab") as file:
        file.write(b'{"step":999,"losses":[1.0]}\n{"step":1000,"los')
    train(folder)

    assert_same_end(undisturbed, folder)


def test_lines_that_the_log_has_lost_are_told_of(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    lines = (folder / LOG).read_bytes().splitlines(keepends=True)
    (folder / LOG).write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    told: list[tuple[Path, str]] = []
    train(folder, on_skip=lambda path, why: told.append((path, why)))

    ((path, why),) = told
    assert folder / LOG == path
    assert f"checkpoint's {max(steps_in(folder))}" in why
    assert lines[:2] == (folder / LOG).read_bytes().splitlines(keepends=True)


def test_the_log_holds_what_the_steps_gave(undisturbed):
    entries = read_log(undisturbed / LOG)
    times = read_log(undisturbed / TIMES)
    learnt = [entry for entry in entries if "losses" in entry]
    num_steps = max(steps_in(undisturbed))

    assert [*range(3, num_steps, 3), num_steps] == [entry["step"] for entry in learnt]
    assert [*range(5, num_steps, 5), num_steps] == [
        entry["step"] for entry in entries if "validation" in entry
    ]
    assert 4 * sum(length for length, _ in LEARNT) == learnt[-1]["tokens"]
    assert [entry["step"] for entry in learnt] == [entry["step"] for entry in times]
    assert sorted(entry["seconds"] for entry in times) == [entry["seconds"] for entry in times]
    for entry in learnt:
        assert 3 == len(entry["losses"]) == len(entry["accuracy"])
        assert all(0 <= share <= 1 for share in entry["accuracy"])


def test_a_log_that_begins_anew_forgets_what_was_there(tmp_path):
    path = tmp_path / LOG
    path.write_bytes(b'{"step":1}\n')
    fresh = JsonLines(path, last_step=0)
    fresh.append(4, {"a": 1})
    fresh.close()

    assert 0 == fresh.kept_step
    assert [{"step": 4, "a": 1}] == read_log(path)
    with pytest.raises(CheckpointError, match="missing"):
        read_log(tmp_path / "missing")


def test_progress_names_step_loss_rate_and_time_left(tmp_path):
    told: list[tuple[str, float | None]] = []
    result = train(tmp_path, on_progress=lambda what, fraction: told.append((what, fraction)))

    assert (1.0, True) == (told[-1][1], f"step {result.steps}/{result.steps}" in told[-1][0])
    for word in ("loss", "right", "tokens/s", "left"):
        assert word in told[-1][0]
    assert sorted(fraction for _, fraction in told) == [fraction for _, fraction in told]


def test_the_learning_rate_climbs_then_falls_to_its_final_part():
    wanted = settings(learning_rate=2.0, warmup_steps=10, final_rate=0.1)
    rates = [learning_rate(step, 1000, wanted) for step in range(1000)]
    half = 10 + (999 - 10) / 2

    assert [2.0 * (step + 1) / 11 for step in range(10)] == rates[:10]
    assert 2.0 == max(rates) == rates[10]
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert math.isclose(0.2, rates[-1])
    assert math.isclose(1.1, (rates[int(half)] + rates[int(half + 1)]) / 2, rel_tol=1e-3)


@pytest.mark.parametrize("num_steps", [1, 2, 9, 30])
def test_a_short_run_warms_up_for_a_tenth_of_it_at_most(num_steps):
    rates = [learning_rate(step, num_steps, LoopSettings()) for step in range(num_steps)]

    assert num_steps // 10 == rates.index(max(rates))
    assert 0 < min(rates)
    assert math.isclose(1e-3 if num_steps == 1 else 2e-5, rates[-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("tokens_per_batch", -1),
        ("log_every", 0),
        ("validate_every", 0),
        ("checkpoint_every", 0),
        ("keep", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("clip_norm", -1.0),
        ("final_rate", 1.5),
        ("weight_decay", math.nan),
        ("weight_decay", -0.1),
        ("warmup_steps", -1),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ParameterError, match=f"^{name}: {value}"):
        LoopSettings(**{name: value})


def test_the_curve_shows_what_the_log_says(undisturbed, tmp_path):
    entries, times = read_log(undisturbed / LOG), read_log(undisturbed / TIMES)
    path = tmp_path / "curve.svg"
    draw_curve(entries, times, path, title="mtp for tiny: <1 & 2> tokens")
    drawn = path.read_bytes()
    draw_curve([], [], path, title="nothing yet")

    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn.count(b"<path") > path.read_bytes().count(b"<path")
    assert [path] == list(tmp_path.iterdir())


def test_a_curve_that_cannot_be_written_is_an_error(undisturbed, tmp_path):
    with pytest.raises(FailureError, match="cannot be written"):
        draw_curve(read_log(undisturbed / LOG), [], tmp_path / "no" / "curve.svg", title="t")
