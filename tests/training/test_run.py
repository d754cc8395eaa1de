"""A whole tiny run of every method, by function and by command, and what stops one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outrider
from outrider import LLM, EngineConfig, FinishReason, SamplingParams, cli
from outrider.config import Method, SpeculationConfig
from outrider.errors import CheckpointError, ParameterError, UnsupportedModelError
from outrider.training import data as data_module
from outrider.training import loop as loop_module
from outrider.training import run as run_module
from outrider.training.data import DataSettings
from outrider.training.log import LOG, read_log
from outrider.training.loop import CHECKPOINTS
from outrider.training.loop_settings import LoopSettings
from outrider.training.responses import ResponseSettings
from outrider.training.run import (
    EVALUATION,
    HEAD,
    RUN,
    RunResult,
    answer_only,
    train_head,
)
from outrider.training.settings import TrainSettings, capture_layers, vocabulary_size
from outrider.training.store import verify_folder
from tests.tiny import write_hf_checkpoint

METHODS = (Method.EAGLE3, Method.MTP, Method.MEDUSA, Method.DRAFT)
LIMITS = {"MIN_TOKENS": 100, "HELD_OUT": 4}  # of the data, small enough for a test
NUM_PROMPTS = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, prompts to learn from, prompts to measure on, and data."""
    folder = tmp_path_factory.mktemp("run")
    write_hf_checkpoint(folder / "model", scale=0.15, num_layers=4)
    rows = [{"id": f"q{i}", "prompt": f"Where does road {i} go?"} for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"id": f"e{i}", "category": "ab"[i % 2], "prompt": f"Road {i}?"} for i in range(3)]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        for name, value in LIMITS.items():
            patch.setattr(data_module, name, value)
        yield folder


def settings(place: Path, method: Method, out: Path, **changes: Any) -> TrainSettings:
    usual: dict[str, Any] = {
        "method": method,
        "out": out,
        "model": str(place / "model"),
        "data": place / "data",
        "data_settings": DataSettings(
            files=(place / "prompts.jsonl",),
            responses=ResponseSettings(max_tokens=16),
            batch_size=8,
            max_model_len=128,
            threads=1,
        ),
        "loop": LoopSettings(
            epochs=2, tokens_per_batch=128, log_every=2, validate_every=3, checkpoint_every=2
        ),
        "draft_vocab_size": 100,
        "eval_prompts": place / "eval.jsonl",
        "eval_limit": 2,
        "eval_tokens": 12,
    }
    return TrainSettings(**{**usual, **changes})


def weights_of(head: Path) -> dict[str, torch.Tensor]:
    (file,) = head.glob("*.safetensors")
    return load_file(file)


def assert_same_head(expected: Path, head: Path) -> None:
    before, after = weights_of(expected), weights_of(head)

    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[Method, RunResult]:
    """One run of each method over one data folder."""
    found = {}
    for method in METHODS:
        result = train_head(settings(place, method, place / method))
        assert result is not None
        found[method] = result
    return found


@pytest.fixture(scope="module")
def llm(place: Path) -> LLM:
    engine = EngineConfig(max_batch_size=2, max_model_len=128, self_test="off")
    off = SpeculationConfig(method=Method.OFF)
    return LLM(place / "model", speculation=off, engine=engine)


@pytest.mark.parametrize("method", METHODS)
def test_the_head_is_served_and_texts_are_plain_decodings(place, runs, llm, method):
    drafting = llm.with_speculation(
        SpeculationConfig(method=method, head=str(runs[method].head), max_draft_len=3)
    )
    params = [SamplingParams(temperature=t, seed=4, max_tokens=20) for t in (0.0, 1.0)]
    plain = llm.generate(["The outrider left", "Road 3"], params)
    drafted = drafting.generate(["The outrider left", "Road 3"], params)

    assert place / method / HEAD == runs[method].head
    assert [c.token_ids for c in plain] == [c.token_ids for c in drafted]
    assert sum(c.speculation.drafted for c in drafted) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_run_leaves_what_it_promises(place, runs, method):
    result, folder = runs[method], place / method
    manifest = verify_folder(folder / HEAD).meta
    about = manifest["training"]
    evaluation = json.loads((folder / EVALUATION).read_text())
    run = json.loads((folder / RUN).read_text())

    assert {HEAD, EVALUATION, RUN, LOG, "times.jsonl", CHECKPOINTS} <= {
        path.name for path in folder.iterdir()
    }
    assert json.loads(json.dumps(result.manifest)) == about
    assert method.value == manifest["method"] == about["method"]
    assert (result.training.steps, result.training.tokens) == (about["steps"], about["tokens"])
    assert NUM_PROMPTS == about["data"]["num_responses"] + about["data"]["num_held_out"]
    assert ["prompts.jsonl"] == about["prompts"]
    assert (0, 0, 1) == tuple(about[name]["seed"] for name in ("loop", "answers", "evaluation"))
    assert about["machine"] == evaluation["conditions"]["conditions"]
    assert datetime.fromisoformat(about["date"]).tzinfo is not None
    assert about["command"] is None
    assert (2, 12) == tuple(about["evaluation"][name] for name in ("num_prompts", "max_tokens"))
    assert outrider.__version__ == about["outrider"]
    assert result.report.is_lossless
    assert evaluation["acceptance"] == result.report.to_json()["acceptance"]
    chain = about["acceptance_length"][f"{method} chain 5"]
    assert {"0", "1"} == chain.keys()
    assert {"all", "a", "b"} >= chain["0"].keys()
    assert all(1.0 <= length <= 6.0 for length in chain["0"].values() if length)
    assert about["steps"] == run["steps"]
    assert read_log(folder / LOG)[-1]["step"] == result.training.steps


def test_a_measured_chain_is_recorded_for_the_self_check(runs):
    for method, result in runs.items():
        recorded = verify_folder(result.head).meta["acceptance"]
        assert recorded == result.report.by_category(f"{method} chain 5", 0.0)["all"]


def test_the_four_methods_share_one_data_folder(place, runs):
    lines = (place / "data" / "responses.jsonl").read_text().splitlines()

    assert NUM_PROMPTS == len(lines)
    assert 1 == len({run.manifest["data"]["responses_hash"] for run in runs.values()})


@pytest.mark.parametrize("method", [Method.EAGLE3, Method.MEDUSA])
def test_the_same_command_again_computes_nothing_anew(place, runs, monkeypatch, method):
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("this was done already")

    before = {path: path.read_bytes() for path in (place / method).glob("*.jsonl")}
    monkeypatch.setattr(loop_module.TrainingLoop, "_train", fail)
    monkeypatch.setattr("outrider.training.features._ShardWriter.write", fail)
    monkeypatch.setattr("outrider.training.responses.append", fail)
    monkeypatch.setattr(LLM, "generate", fail)
    kept = place / f"{method}-kept"
    shutil.copytree(place / method / HEAD, kept)
    again = train_head(settings(place, method, place / method))

    assert again is not None
    assert_same_head(kept, again.head)
    assert runs[method].training == again.training
    assert runs[method].report.acceptances == again.report.acceptances
    assert runs[method].report.elapsed_s == again.report.elapsed_s
    assert verify_folder(kept).meta["acceptance"] == verify_folder(again.head).meta["acceptance"]
    assert before == {path: path.read_bytes() for path in (place / method).glob("*.jsonl")}


def test_a_finished_head_is_measured_again_where_its_report_does_not_hold(
    place, runs, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(place / Method.MEDUSA, out)
    measured: list[int] = []
    generate = LLM.generate

    def counting(self: LLM, prompts: Any, *arguments: Any, **options: Any) -> Any:
        measured.append(len(prompts))
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", counting)
    wanted = settings(place, Method.MEDUSA, out)
    train_head(wanted)
    assert [] == measured
    for damage in ('{"schema_version": 1}', "[]", "{", None):
        measured.clear()
        if damage is None:
            (out / EVALUATION).unlink()
        else:
            (out / EVALUATION).write_text(damage)
        result = train_head(wanted)
        assert result is not None
        assert {2} == set(measured)
        assert runs[Method.MEDUSA].report.acceptances == result.report.acceptances
    for changes in ({"eval_limit": 3}, {"eval_tokens": 11}):
        measured.clear()
        result = train_head(replace(wanted, **changes))
        assert result is not None
        assert measured
        stored = json.loads((out / EVALUATION).read_text())
        assert result.report.elapsed_s == stored["elapsed_s"]


def test_the_report_of_another_head_is_not_taken(place, runs, tmp_path):
    out = tmp_path / "out"
    wanted = settings(place, Method.MEDUSA, out)
    other = replace(wanted, loop=replace(wanted.loop, seed=5))
    out.mkdir()
    shutil.copy(place / Method.MEDUSA / EVALUATION, out / EVALUATION)
    before = json.loads((out / EVALUATION).read_text())["conditions"]
    train_head(other)
    after = json.loads((out / EVALUATION).read_text())["conditions"]

    assert before["head_sha256"] != after["head_sha256"]
    assert before["prompt_set_hash"] == after["prompt_set_hash"]


def test_heads_of_other_vocabularies_share_the_features(place, runs, llm, tmp_path):
    shards = sorted((place / "data" / "features").glob("*/*"))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in shards}
    for size in (60, 0):
        wanted = settings(place, Method.EAGLE3, tmp_path / f"{size}", draft_vocab_size=size)
        result = train_head(wanted)
        assert result is not None
        drafting = llm.with_speculation(
            SpeculationConfig(method=Method.EAGLE3, head=str(result.head), max_draft_len=3)
        )
        (completion,) = drafting.generate(["Road 3"], SamplingParams(max_tokens=12))
        assert completion.speculation.drafted > 0
        assert (size or None) == result.manifest["objective"]["draft_vocab_size"]
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in shards}

    assert shards
    assert before == after
    assert shards == sorted((place / "data" / "features").glob("*/*"))


def test_prompts_at_which_the_target_failed_are_told_and_asked_again(
    place, runs, tmp_path, monkeypatch
):
    generate_each = LLM.generate_each

    def failing(self: LLM, jobs: Iterator[Any], **options: Any) -> Iterator[Any]:
        for index, completion in generate_each(self, jobs, **options):
            reason = FinishReason.ERROR if index < 3 else completion.finish_reason
            yield index, replace(completion, finish_reason=reason)

    told: list[str] = []
    wanted = settings(place, Method.MEDUSA, tmp_path / "out", data=tmp_path / "data")
    words = "at 3 prompts the target's logits were not finite; the next run asks them again"
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate_each", failing)
        assert answer_only(wanted).endswith(words)
        patch.setattr(run_module._Run, "choose", lambda *_: pytest.fail("enough"))
        with pytest.raises(pytest.fail.Exception):
            train_head(wanted, on_notice=told.append)
    lines = [path.read_text().splitlines() for path in tmp_path.glob("data/responses.jsonl")]

    assert f"warning: {words}: passed over" in told
    assert [NUM_PROMPTS - 3] == [len(each) for each in lines]
    assert answer_only(wanted).startswith("3 prompts answered")


STAGES = ("answer", "choose", "features", "train", "finish")


@pytest.mark.parametrize("stage", STAGES)
def test_an_interruption_before_any_stage_changes_nothing(place, runs, tmp_path, stage):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    wanted = settings(place, Method.MEDUSA, tmp_path / "out", data=tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module._Run, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_head(wanted)
    result = train_head(wanted)

    assert result is not None
    assert_same_head(runs[Method.MEDUSA].head, result.head)
    assert runs[Method.MEDUSA].report.acceptances == result.report.acceptances


def test_live_features_train_the_same_head(place, runs, tmp_path):
    for method in (Method.EAGLE3, Method.MTP):
        result = train_head(
            settings(place, method, tmp_path / method, features="live", simulated=True)
        )
        assert result is not None
        assert_same_head(runs[method].head, result.head)
        assert result.report.is_lossless is None
    assert not list(tmp_path.glob("*/data"))


def test_other_settings_in_the_same_folder_are_refused(place, runs):
    wanted = settings(place, Method.MEDUSA, place / Method.MEDUSA)
    for changes, named in (
        ({"loss": "tv"}, "objective.loss was ce, is tv"),
        ({"loop": replace(wanted.loop, epochs=3)}, "loop.epochs was 2, is 3"),
        ({"method": Method.MTP}, "method was medusa, is mtp"),
    ):
        with pytest.raises(CheckpointError, match="another run folder") as caught:
            train_head(replace(wanted, **changes))
        assert named in str(caught.value)


def test_two_processes_cannot_train_in_one_folder(place, runs, tmp_path):
    wanted = settings(place, Method.MEDUSA, tmp_path)
    with (
        run_module.sole_writer(tmp_path),
        pytest.raises(ParameterError, match="is being written by process"),
    ):
        train_head(wanted)


def test_notices_name_the_data_the_vocabulary_and_damaged_checkpoints(place, runs, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(place / Method.EAGLE3, out)
    newest = max((out / CHECKPOINTS).glob("step-*"))
    (newest / "state.json").write_bytes(b"{}")
    told: list[str] = []
    train_head(settings(place, Method.EAGLE3, out), on_notice=told.append)

    num_learnt = runs[Method.EAGLE3].manifest["data"]["num_responses"]
    assert any(line.startswith(f"data: {num_learnt} answers with") for line in told)
    assert any("100 of 320 tokens" in line for line in told)
    assert any(line.startswith("at this size expect an acceptance length of") for line in told)
    assert any("are few; more prompts are worth it" in line for line in told)
    assert any(line.startswith(f"{newest.name} is not whole") for line in told)
    assert_same_head(runs[Method.EAGLE3].head, out / HEAD)


def test_a_target_with_too_few_layers_has_no_eagle3_head(place, tmp_path):
    write_hf_checkpoint(tmp_path / "flat", num_layers=2)
    wanted = settings(place, Method.EAGLE3, tmp_path / "out", model=str(tmp_path / "flat"))
    with pytest.raises(UnsupportedModelError, match="2 layers"):
        train_head(wanted)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(4, (1, 2)), (5, (2,)), (6, (2, 3)), (30, (2, 15, 27)), (80, (2, 40, 77))],
)
def test_the_captured_layers_are_the_published_ones(num_layers, expected):
    assert expected == capture_layers(num_layers)


@pytest.mark.parametrize(
    ("asked", "target_size", "expected"),
    [
        (None, 49152, 12288),
        (None, 32000, 8192),
        (None, 152000, 32768),
        (None, 8192, None),
        (0, 49152, None),
        (500, 49152, 500),
        (49152, 49152, None),
    ],
)
def test_the_vocabulary_is_a_quarter_within_bounds(place, asked, target_size, expected):
    wanted = settings(place, Method.MTP, place / "none", draft_vocab_size=asked)
    config = run_module.load(place / "model").config

    assert expected == vocabulary_size(wanted, replace(config, vocab_size=target_size))


# --- the command ---------------------------------------------------------------------------------


def arguments(place: Path, method: str, out: Path, *more: str) -> list[str]:
    flags = {
        "--model": place / "model",
        "--out": out,
        "--data": place / "data",
        "--prompts": place / "prompts.jsonl",
        "--max-response-tokens": 16,
        "--batch-size": 8,
        "--max-model-len": 128,
        "--threads": 1,
        "--epochs": 2,
        "--tokens-per-batch": 128,
        "--checkpoint-every": 2,
        "--validate-every": 3,
        "--draft-vocab": 100,
        "--eval-prompts": place / "eval.jsonl",
        "--eval-limit": 2,
        "--eval-tokens": 12,
    }
    given = dict(zip(more[::2], more[1::2], strict=True))
    words = [[name, str(value)] for name, value in {**flags, **given}.items()]
    return ["train", method, *(word for pair in words for word in pair)]


def test_the_command_trains_measures_draws_and_prints(place, runs, tmp_path, capsys):
    status = cli.main([*arguments(place, "mtp", tmp_path / "out"), "--json"])
    printed = capsys.readouterr()
    document = json.loads(printed.out)

    assert 0 == status
    assert document["evaluation"]["is_lossless"] is True
    assert str(tmp_path / "out" / HEAD) == document["head"]
    assert "curve:" in printed.err
    assert b"<svg" in (tmp_path / "out" / "curve.svg").read_bytes()
    command = verify_folder(tmp_path / "out" / HEAD).meta["training"]["command"]
    assert command.startswith("outrider train mtp --model model --out out --data data --prompts")
    assert command.endswith("--eval-tokens 12 --json")
    assert str(place) not in (tmp_path / "out" / HEAD / "manifest.json").read_text()


def test_the_command_answers_parts(place, tmp_path, capsys):
    words = arguments(place, "mtp", tmp_path / "out", "--data", str(tmp_path / "data"))
    for part in ("1/2", "2/2"):
        assert 0 == cli.main([*words, "--part", part, "--only-answers"])
    printed = capsys.readouterr()
    lines = {
        line
        for path in (tmp_path / "data").glob("responses-*.jsonl")
        for line in path.read_text().splitlines()
    }

    assert "" == printed.out
    assert "8 prompts answered" in printed.err
    assert lines == set((place / "data" / "responses.jsonl").read_text().splitlines())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "more", "status", "words"),
    [
        ("eagle", (), 2, ("METHOD", "'eagle'", "eagle3, mtp, medusa, draft")),
        ("ngram", (), 2, ("METHOD", "'ngram'", "eagle3, mtp, medusa, draft")),
        ("mtp", ("--part", "3/2"), 2, ("--part", "'3/2'", "K/N", "1/2")),
        ("mtp", ("--part", "one"), 2, ("--part", "'one'", "K/N")),
        ("mtp", ("--temperatures", "0;1"), 2, ("--temperatures", "'0;1'", "0,1")),
        ("mtp", ("--temperatures", "-1"), 2, ("temperature", "-1")),
        ("mtp", ("--temperatures", ""), 2, ("--temperatures", "''")),
        ("mtp", ("--prompts", "EMPTY"), 2, ("EMPTY", "holds no prompts", "give one JSON")),
        ("mtp", ("--prompts", "missing.jsonl"), 2, ("missing.jsonl", "give a JSONL file")),
        ("mtp", ("--eval-prompts", "EMPTY"), 2, ("EMPTY", "holds no prompts")),
        ("mtp", ("--model", "no/such/folder"), 2, ("no/such/folder",)),
        ("mtp", ("--model", "EMPTY"), 1, ("EMPTY",)),
        ("eagle3", ("--layout", "vllm"), 2, ("layout", "'vllm'", "safeailab, speculators")),
        ("eagle3", ("--layout", "safeailab"), 2, ("safeailab", "use layout speculators")),
        ("draft", ("--layers", "0,9"), 2, ("layers", "[0, 9]", "0 .. 3")),
        ("draft", ("--layers", "0-3"), 2, ("--layers", "'0-3'", "0,29")),
        ("draft", ("--mlp-size", "5000"), 2, ("mlp_size", "5000", "1 .. 96")),
        ("draft", ("--steps", "3"), 2, ("num_steps", "3", "leave it out")),
        ("mtp", ("--device", "cuda"), 2, ("device", "'cuda'", "use cpu")),
        ("mtp", ("--device", "tpu"), 2, ("device", "'tpu'", "cpu, cuda")),
        ("mtp", ("--epochs", "0"), 2, ("epochs", "0", "from 1 on")),
        ("mtp", ("--epochs", "1.5"), 2, ("--epochs", "1.5", "whole number")),
        ("mtp", ("--learning-rate", "nan"), 2, ("learning_rate", "nan", "such as")),
        ("mtp", ("--eval-limit", "0"), 2, ("eval_limit", "0", "from 1 on")),
        ("mtp", ("--eval-tokens", "128"), 2, ("eval_tokens", "128", "max_model_len")),
        ("mtp", ("--draft-vocab", "-1"), 2, ("draft_vocab_size", "-1", "from 0 on")),
        ("mtp", ("--features", "ram"), 2, ("features", "'ram'", "disk, live")),
        ("mtp", ("--loss", "mse"), 2, ("mse", "ce")),
        ("mtp", ("--loss-on", "prompt"), 2, ("loss_on", "'prompt'", "response, all")),
        ("mtp", ("--init", "zero"), 2, ("init", "'zero'", "target, random")),
        ("mtp", ("--num-prompts", "0"), 2, ("num_prompts", "0")),
        ("mtp", ("--batch-size", "0"), 2, ("max_batch_size", "0")),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_answered(
    place, tmp_path, capsys, monkeypatch, method, more, status, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # wherever the test runs
    (tmp_path / "EMPTY").write_text("\n")
    called = arguments(place, method, tmp_path / "out", "--data", str(tmp_path / "data"), *more)

    assert status == cli.main(called)
    printed = capsys.readouterr()
    *_, last = printed.err.splitlines()
    assert "" == printed.out
    assert last.startswith("outrider: error: ")
    assert 1 == printed.err.count("outrider: error: ")
    assert "Traceback" not in printed.err
    for word in words:
        assert word in last
    assert not list(tmp_path.glob("data/responses*"))


def test_too_little_data_ends_with_its_numbers(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data_module, "MIN_TOKENS", 10**6)

    assert 1 == cli.main(arguments(place, "mtp", tmp_path / "out"))
    last = capsys.readouterr().err.splitlines()[-1]
    assert "response tokens from" in last
    assert "--num-prompts" in last
    assert "expect an acceptance length of about" in last


INTERRUPTED = """
import sys
from outrider.training import data, loop
data.MIN_TOKENS, data.HELD_OUT = {min_tokens}, {held_out}
train = loop.TrainingLoop._train
def slow(self, *arguments):
    import time
    time.sleep({delay_s})
    train(self, *arguments)
loop.TrainingLoop._train = slow
from outrider import cli
sys.exit(cli.main({arguments!r}))
"""


@pytest.mark.alone
def test_ctrl_c_ends_with_130_and_the_same_command_goes_on(place, runs, tmp_path, capsys):
    out = tmp_path / "out"
    called = arguments(place, "medusa", out)
    code = INTERRUPTED.format(
        min_tokens=LIMITS["MIN_TOKENS"],
        held_out=LIMITS["HELD_OUT"],
        delay_s=1.0,
        arguments=called,
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(out.glob(f"{CHECKPOINTS}/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    steps = [int(path.name[5:]) for path in (out / CHECKPOINTS).glob("step-*")]

    assert 130 == process.returncode
    assert "Traceback" not in told
    assert 0 < max(steps) < runs[Method.MEDUSA].training.steps
    assert 0 == cli.main(called)
    assert_same_head(runs[Method.MEDUSA].head, out / HEAD)
