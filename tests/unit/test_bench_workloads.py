from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from outrider.bench.workloads import Question, Selection, load_workload, looks_random
from outrider.errors import ParameterError, PromptError

ALL = Selection()


def file_of(tmp_path: Path, *rows: object, name: str = "prompts.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in rows) + "\n")
    return path


def only(tmp_path: Path, row: object) -> Question:
    """The question that this one line is."""
    return load_workload(file_of(tmp_path, row), ALL).questions[0]


def refusal(path: Path, selection: Selection = ALL) -> str:
    with pytest.raises(PromptError) as caught:
        load_workload(path, selection)
    return str(caught.value)


def test_the_bundled_prompts_come_one_of_each_category_in_turn():
    workload = load_workload(None, ALL)
    num_categories = len(workload.record.categories)

    assert "the bundled set" == workload.record.source
    assert len(workload.questions) == workload.record.num_prompts
    for start in range(0, 3 * num_categories, num_categories):
        stretch = workload.questions[start : start + num_categories]
        assert num_categories == len({question.category for question in stretch})
    assert not workload.record.is_random


def test_a_set_is_named_by_its_file_and_not_by_whose_folder_that_is_in(tmp_path: Path):
    path = file_of(tmp_path, {"prompt": "Hi"})

    assert path.name == load_workload(path, ALL).record.source


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "Hi"}, [("user", "Hi")]),
        ({"turns": ["Hi", "And then?"]}, [("user", "Hi")]),
        (
            {"turns": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Oh"}]},
            [("user", "Hi"), ("user", "Oh")],
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello."},
                    {"role": "user", "content": "Bye"},
                    {"role": "assistant", "content": "left out: it is what is asked for"},
                ]
            },
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello."},
                    {"from": "human", "value": "Bye"},
                ]
            },
            [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye")],
        ),
    ],
)
def test_every_shape_is_asked_up_to_its_last_user_message(tmp_path, row, messages):
    assert tuple(messages) == only(tmp_path, row).messages


def test_a_question_is_named_by_its_file_where_it_has_no_name(tmp_path: Path):
    assert "prompts.jsonl:1" == only(tmp_path, {"prompt": "Hi"}).id
    assert "81" == only(tmp_path, {"question_id": 81, "category": "qa", "turns": ["Hi"]}).id


def test_a_json_array_is_read_as_lines_are(tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    rows = [{"id": "a", "conversations": [{"from": "human", "value": text}]} for text in "xy"]
    rows[1]["id"] = "b"
    path.write_text(json.dumps(rows, indent=1))

    assert ["a", "b"] == [question.id for question in load_workload(path, ALL).questions]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"prompt": "Hi"}', "{"], "line 2: is not JSON"),
        (['{"prompt": "Hi"}', "", "[1]"], "line 3: is a JSON array"),
        (['{"turns": []}'], "line 1: turns is array, not a non-empty list"),
        (['{"prompt": " "}'], "line 1: prompt: is empty"),
        (['{"text": "Hi"}'], "line 1: needs exactly one of prompt, turns"),
        (['{"prompt": "a", "turns": ["a"]}'], "has prompt and turns"),
        (['{"messages": [{"role": "tool", "content": "x"}]}'], "role 'tool' is not one of"),
        (['{"messages": [{"role": "system", "content": "x"}]}'], "has no message of the user"),
        (['{"conversations": [{"from": "x", "value": "y"}]}'], "from 'x' is not one of"),
        (['{"messages": ["Hi"]}'], "messages[0]: is string, not an object"),
        (['{"id": "a", "prompt": "x"}', '{"id": "a", "prompt": "y"}'], "id 'a' is used twice"),
        ([""], "holds no prompts"),
        (["[1]"], "item 1: is a JSON number"),
        (["[1"], "begins like a JSON array and is none"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path: Path, lines: list[str], expected: str):
    message = refusal(file_of(tmp_path, *lines))

    assert expected in message
    assert "prompts.jsonl" in message


def test_placeholders_are_refused(tmp_path: Path):
    """The public files of one benchmark hold this in place of every prompt."""
    path = file_of(tmp_path, *[{"turns": ["FETCH THE REAL DATA"]}] * 3, {"prompt": "Hi"})

    assert "3 of 4 prompts say the same ('FETCH THE REAL DATA')" in refusal(path)


def test_prompts_are_chosen_by_category_and_length(tmp_path: Path):
    rows = [
        {"id": f"{category}{length}", "category": category, "prompt": "x" * length}
        for category in ("code", "chat")
        for length in (5, 50, 500)
    ]
    path = file_of(tmp_path, *rows)

    def ids(**fields) -> list[str]:
        return [q.id for q in load_workload(path, Selection(**fields)).questions]

    assert ["code5", "code50", "code500"] == ids(categories=("code",))
    assert ["code50", "chat50"] == ids(min_chars=6, max_chars=50)
    assert ["code5", "chat5", "code50"] == ids(max_prompts=3)


def test_length_buckets_take_the_place_of_categories(tmp_path: Path):
    rows = [{"id": str(length), "prompt": "x" * length} for length in (1, 9, 10, 99, 100, 999)]
    workload = load_workload(file_of(tmp_path, *rows), Selection(buckets=(10, 100)))

    assert {"0-9 chars": 2, "10-99 chars": 2, "100+ chars": 2} == workload.record.categories
    assert ["1", "10", "100"] == [question.id for question in workload.questions[:3]]


def test_a_choice_that_leaves_nothing_says_what_there_is(tmp_path: Path):
    path = file_of(tmp_path, {"category": "chat", "prompt": "Hello"})
    message = refusal(path, Selection(categories=("code",)))

    assert "none of 1 prompts is left by {'categories': ['code']}" in message
    assert "the categories chat and 5 to 5 characters" in message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_chars": -1}, "--min-chars: -1"),
        ({"min_chars": 9, "max_chars": 8}, "--max-chars: 8"),
        ({"max_prompts": 0}, "--max-prompts: 0"),
        ({"buckets": (5, 5)}, "--length-buckets: 5,5"),
        ({"buckets": (0,)}, "--length-buckets: 0"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(fields, expected: str):
    with pytest.raises(ParameterError, match=expected):
        Selection(**fields)


def test_the_hash_names_what_is_asked_and_in_which_order(tmp_path: Path):
    def name(*rows: dict[str, str]) -> str:
        return load_workload(file_of(tmp_path, *rows), ALL).record.prompt_hash

    first, second = {"id": "a", "prompt": "Hi"}, {"id": "b", "prompt": "Ho"}

    assert name(first, second) == name(first, second)
    assert 3 == len(
        {name(first, second), name(second, first), name(first, {**second, "prompt": "Hu"})}
    )


def words(num_words: int, vocabulary: int) -> list[Question]:
    """Questions of random 'words' of one vocabulary."""
    source = random.Random(1)
    text = " ".join(f"w{source.randrange(vocabulary)}" for _ in range(num_words))
    return [Question("q", "x", (("user", text),))]


def test_random_tokens_are_told_from_text_in_any_language():
    chinese = "今天天气很好我们去公园散步吧今天的书很好看我想去买一本好书" * 6

    assert looks_random(words(400, vocabulary=49152))
    assert looks_random(words(20000, vocabulary=49152))
    assert not looks_random(words(400, vocabulary=500))
    assert not looks_random([Question("q", "x", (("user", chinese),))])
    assert not looks_random(words(20, vocabulary=49152)), "too little to tell by"


def test_every_category_of_the_bundled_prompts_is_text_by_itself():
    questions = load_workload(None, ALL).questions
    categories = Counter(question.category for question in questions)

    for category in categories:
        assert not looks_random([q for q in questions if q.category == category])
