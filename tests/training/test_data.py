"""The data folder: what is learnt from and held out, which tokens count, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import CheckpointError, ParameterError, PromptError, TrainingError
from outrider.models.loading import load
from outrider.training import data as data_module
from outrider.training.answers import Response, read_responses
from outrider.training.data import (
    PROMPTS,
    SETTINGS,
    DataSettings,
    TrainingData,
    answer_part,
    choose_vocabulary,
    coverage,
    open_target,
    prepare_data,
    read_data,
    responses_hash,
)
from outrider.training.expectation import describe_goal
from outrider.training.identity import TargetIdentity
from outrider.training.prompts import TrainingPrompt, read_prompts
from outrider.training.responses import ResponseSettings
from tests.tiny import write_hf_checkpoint

ANSWERS = ResponseSettings(temperatures=(1.0,), max_tokens=16)


def response(id_: str, token_ids: tuple[int, ...] = (5, 6, 7, 8), category: str = "qa") -> Response:
    return Response(
        id=id_,
        category=category,
        prompt_ids=(1, 2, 3),
        response_ids=token_ids,
        temperature=0.0,
        seed=0,
        finish_reason="stop",
    )


def write_answers(folder: Path, answers: list[Response], name: str = "responses.jsonl") -> None:
    lines = [json.dumps(asdict(answer)) + "\n" for answer in answers]
    (folder / name).write_text("".join(lines))


def conversations(count: int, *, turns: int = 1) -> list[TrainingPrompt]:
    return [TrainingPrompt(f"p{i}", "qa", ("text",) * turns) for i in range(count)]


def answers_to(prompts: list[TrainingPrompt], token_ids=tuple(range(5, 15))) -> list[Response]:
    return [
        response(prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}", token_ids)
        for prompt in prompts
        for turn in range(len(prompt.turns))
    ]


# --- draft vocabulary ----------------------------------------------------------------------------


def test_the_vocabulary_is_what_is_written_most_ties_to_the_lowest_id():
    answers = [response("a", (9, 9, 9, 4, 4)), response("b", (7, 7, 30, 2))]

    assert [9] == choose_vocabulary(answers, 1, 40).ids_W.tolist()
    assert [4, 9] == choose_vocabulary(answers, 2, 40).ids_W.tolist()
    assert [4, 7, 9] == choose_vocabulary(answers, 3, 40).ids_W.tolist()
    assert [2, 4, 7, 9] == choose_vocabulary(answers, 4, 40).ids_W.tolist()
    assert [0, 1, 2, 4, 7, 9, 30] == choose_vocabulary(answers, 7, 40).ids_W.tolist()


def test_prompts_do_not_count():
    answers = [replace(response("a", (9, 9, 9, 9)), prompt_ids=(3,) * 50)]

    assert 3 not in choose_vocabulary(answers, 3, 40).ids_W


def test_tokens_that_end_an_answer_are_in_it_whatever_their_count():
    answers = [response("a", (9, 9, 9, 4, 4, 7))]
    chosen = choose_vocabulary(answers, 3, 40, required=(39, 39, 0))

    assert [0, 9, 39] == chosen.ids_W.tolist()
    assert 40 == chosen.target_size


@pytest.mark.parametrize("size", [0, -1, 40, 41])
def test_a_vocabulary_of_no_or_all_tokens_is_refused(size):
    with pytest.raises(ParameterError, match=rf"draft vocabulary: {size} of 40.* 1 \.\. 39"):
        choose_vocabulary([response("a")], size, 40)


def test_a_vocabulary_without_room_for_the_required_tokens_is_refused():
    with pytest.raises(ParameterError, match="1 tokens have no room for the 2"):
        choose_vocabulary([response("a")], 1, 40, required=(1, 2))


def test_coverage_is_the_share_of_written_tokens():
    vocabulary = choose_vocabulary([response("a", (9, 9, 4, 4))], 2, 40)

    assert 1.0 == coverage(vocabulary, [response("a", (9, 4, 9, 4))])
    assert 0.5 == coverage(vocabulary, [response("a", (9, 4)), response("b", (1, 2))])
    assert 0.0 == coverage(vocabulary, [response("b", (1, 2))])


def test_any_answer_changes_the_hash():
    answers = [response("a", (9, 9)), response("b", (4,))]
    others = [
        answers[:1],
        answers[::-1],
        [answers[0], response("b", (5,))],
        [answers[0], response("c", (4,))],
        [answers[0], replace(answers[1], prompt_ids=(1, 2))],
        [response("a", (9,)), response("b", (9, 4))],
    ]

    assert responses_hash(answers) == responses_hash(list(answers))
    assert 1 + len(others) == len({responses_hash(each) for each in (answers, *others)})


# --- learnt and held out -------------------------------------------------------------------------


def test_one_in_fifty_is_held_out_and_stays_so_with_more_prompts(tmp_path):
    prompts = conversations(3000)
    write_answers(tmp_path, answers_to(prompts))
    fewer = read_data(tmp_path, prompts[:1500], too_long=0)
    more = read_data(tmp_path, prompts, too_long=0)

    assert 15 <= len(fewer.held_out) <= 50
    assert fewer.held_out == more.held_out[: len(fewer.held_out)]
    assert 1500 == len(fewer.responses) + len(fewer.held_out)
    assert not {r.id for r in more.responses} & {r.id for r in more.held_out}


def test_a_conversation_is_on_one_side_as_a_whole_even_at_the_most(tmp_path, monkeypatch):
    prompts = conversations(400, turns=3)
    write_answers(tmp_path, answers_to(prompts))
    for most in (1, 2, 4, 5, 100):
        monkeypatch.setattr(data_module, "MAX_HELD_OUT", most)
        found = read_data(tmp_path, prompts, too_long=0)
        held_out = {r.id.partition("#")[0] for r in found.held_out}
        assert not held_out & {r.id.partition("#")[0] for r in found.responses}
        assert len(found.held_out) == 3 * len(held_out) < most + 3
        assert 1200 == len(found.held_out) + len(found.responses)


def test_answers_come_in_the_order_of_the_prompts_whoever_wrote_them(tmp_path):
    prompts = conversations(400)
    answers = answers_to(prompts)
    one, parts = tmp_path / "one", tmp_path / "parts"
    for folder in (one, parts):
        folder.mkdir()
    write_answers(one, answers)
    write_answers(parts, answers[1::2][::-1], "responses-2-of-2.jsonl")
    write_answers(parts, answers[::2], "responses-1-of-2.jsonl")

    assert read_data(one, prompts, too_long=0) == read_data(parts, prompts, too_long=0)
    learnt = read_data(parts, prompts, too_long=0).responses
    assert sorted(learnt, key=lambda answer: int(answer.id[1:])) == learnt


def both(found: TrainingData) -> list[Response]:
    return [*found.responses, *found.held_out]


def test_answers_that_are_too_short_or_not_asked_for_are_left_out(tmp_path):
    prompts = conversations(400)
    short = [response("p0", (1, 2, 3)), response("p1", ())]
    write_answers(tmp_path, [*short, response("other"), *answers_to(prompts)])
    ids = {r.id for r in both(read_data(tmp_path, prompts, too_long=0))}

    assert {prompt.id for prompt in prompts[2:]} == ids


def test_the_description_counts_what_is_learnt(tmp_path):
    prompts = conversations(400)
    answers = [replace(a, category=f"c{i % 3}") for i, a in enumerate(answers_to(prompts))]
    write_answers(tmp_path, answers)
    found = read_data(tmp_path, prompts, too_long=4)
    described = found.describe()

    assert 10 * len(found.responses) == found.num_response_tokens
    assert 13 * 400 == found.num_tokens
    assert ["c0", "c1", "c2"] == list(described["response_tokens_by_category"])
    assert found.num_response_tokens == sum(described["response_tokens_by_category"].values())
    assert (len(found.responses), len(found.held_out)) == (
        described["num_responses"],
        described["num_held_out"],
    )


def test_too_little_data_is_refused_with_its_numbers(tmp_path):
    prompts = conversations(10)
    write_answers(tmp_path, answers_to(prompts))
    with pytest.raises(TrainingError) as caught:
        read_data(tmp_path, prompts, too_long=7, failed=3)

    for word in (
        "100 response tokens from 10 answers",
        "0 held out",
        "at least 60",
        "--num-prompts",
        "7 prompts do not fit the context: --max-model-len",
        "at 3 prompts the target's logits were not finite",
        describe_goal(100),
    ):
        assert word in str(caught.value)
    with pytest.raises(TrainingError, match="0 response tokens from 0 answers"):
        read_data(tmp_path, [], too_long=0)


# --- the folder ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, TargetIdentity]]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        model = write_hf_checkpoint(folder / "tiny", scale=0.15)
        llm = open_target(str(model), settings(batch_size=8), None)
        checkpoint = load(model)
        identity = TargetIdentity.of(checkpoint, llm.target.dtype)
        checkpoint.weights.close()
        yield llm, identity


@pytest.fixture(autouse=True)
def _little_is_enough(monkeypatch):
    monkeypatch.setattr(data_module, "MIN_TOKENS", 60)


def settings(**changes: Any) -> DataSettings:
    return DataSettings(**{"responses": ANSWERS, "max_model_len": 256, "threads": 1, **changes})


def write_prompts_file(path: Path, count: int, first: str = "Where does road 0 go?") -> Path:
    rows = [{"id": f"q{i}", "prompt": f"Where does road {i} go?"} for i in range(count)]
    rows[0]["prompt"] = first
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_more_prompts_keep_the_answers_to_the_first_ones(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "HELD_OUT", 3)
    llm, identity = opened
    file = write_prompts_file(tmp_path / "prompts.jsonl", 16)
    folder = tmp_path / "data"
    first = prepare_data(llm, folder, settings(files=(file,), num_prompts=10), identity)
    lines = (folder / "responses.jsonl").read_bytes()
    more = prepare_data(llm, folder, settings(files=(file,)), identity)
    again = prepare_data(llm, folder, settings(files=(file,), num_prompts=10), identity)

    assert 10 == len(lines.splitlines())
    assert (folder / "responses.jsonl").read_bytes().startswith(lines)
    assert 16 == len(read_responses(folder)) == len(read_prompts(folder / PROMPTS))
    assert first == again
    assert {r.id for r in both(first)} < {r.id for r in both(more)}
    assert 0 < len(first.held_out)


def test_other_prompts_are_refused(opened, tmp_path):
    llm, identity = opened
    folder = tmp_path / "data"
    one = write_prompts_file(tmp_path / "one.jsonl", 2)
    other = write_prompts_file(tmp_path / "other.jsonl", 2, first="Which road?")
    answer_part(llm, folder, settings(files=(one,)), identity)
    before = (folder / "responses.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"prompts.jsonl: holds other prompts"):
        answer_part(llm, folder, settings(files=(other,)), identity)

    assert before == (folder / "responses.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperatures": (0.0,)}, "temperatures was [1.0], is [0.0]"),
        ({"max_tokens": 17}, "max_tokens was 16, is 17"),
        ({"seed": 1}, "seed was 0, is 1"),
    ],
)
def test_answers_drawn_otherwise_are_refused_by_name(opened, tmp_path, changes, named):
    llm, identity = opened
    file = write_prompts_file(tmp_path / "one.jsonl", 1)
    folder = tmp_path / "data"
    answer_part(llm, folder, settings(files=(file,)), identity)
    others = settings(files=(file,), responses=replace(ANSWERS, **changes))
    with pytest.raises(CheckpointError, match="another data folder") as caught:
        answer_part(llm, folder, others, identity)

    assert named in str(caught.value)
    assert 1 == str(caught.value).count(" was ")


def test_another_target_is_refused_by_name(opened, tmp_path):
    llm, identity = opened
    file = write_prompts_file(tmp_path / "one.jsonl", 1)
    answer_part(llm, tmp_path / "data", settings(files=(file,)), identity)
    other = replace(identity, weights_hash="ff")
    with pytest.raises(CheckpointError, match=r"weights_hash was .*, is ff"):
        answer_part(llm, tmp_path / "data", settings(files=(file,)), other)


@pytest.mark.parametrize("content", ["{", "[1]", "3", ""])
def test_a_damaged_record_is_named(opened, tmp_path, content):
    llm, identity = opened
    file = write_prompts_file(tmp_path / "one.jsonl", 1)
    tmp_path.joinpath(SETTINGS).write_text(content)
    with pytest.raises(CheckpointError, match=r"data.json: damaged"):
        answer_part(llm, tmp_path, settings(files=(file,)), identity)


def test_an_id_that_stands_for_a_later_turn_is_refused(opened, tmp_path):
    llm, identity = opened
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": "a", "turns": ["one", "two"]}, {"id": "a#2", "prompt": "three"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(PromptError, match="'a#2' stands for a later turn of 'a'"):
        answer_part(llm, tmp_path / "data", settings(files=(file,)), identity)

    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", ["", "\n", "not json\n", '{"id": "a"}\n'])
def test_a_prompt_file_that_is_none_is_refused(opened, tmp_path, content):
    llm, identity = opened
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError, match=r"prompts.jsonl"):
        answer_part(llm, tmp_path / "data", settings(files=(file,)), identity)


def test_prompts_are_stored_whole_or_not_at_all(opened, tmp_path, monkeypatch):
    llm, identity = opened
    file = write_prompts_file(tmp_path / "one.jsonl", 3)
    folder = tmp_path / "data"

    def half(path: Path, prompts: list[TrainingPrompt]) -> None:
        path.write_text('{"id": "q0", "cat')
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_module, "save_prompts", half)
        with pytest.raises(KeyboardInterrupt):
            answer_part(llm, folder, settings(files=(file,)), identity)
    prompts, counts = answer_part(llm, folder, settings(files=(file,)), identity)

    assert prompts == read_prompts(folder / PROMPTS)
    assert 3 == counts.answered


def test_a_folder_that_cannot_be_made_is_named(opened, tmp_path):
    llm, identity = opened
    file = write_prompts_file(tmp_path / "one.jsonl", 1)
    (tmp_path / "data").write_text("a file")
    with pytest.raises(CheckpointError, match="data: cannot be written"):
        answer_part(llm, tmp_path / "data", settings(files=(file,)), identity)


@pytest.mark.parametrize(("name", "value"), [("num_prompts", 0), ("max_tokens", -3)])
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ParameterError, match=f"^{name}: {value}"):
        DataSettings(**{name: value})


def test_the_target_answers_plainly(opened):
    llm, _ = opened

    assert "off" == llm.speculation.method
    assert 256 == llm.max_model_len
