from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from outrider.errors import ParameterError, PromptError
from outrider.training.prompt_book import Category, Entry, Slots, Template, load_book
from outrider.training.prompts import (
    TrainingPrompt,
    load_training_prompts,
    prompts_hash,
    read_prompts,
    save_prompts,
    write_prompts,
)

CATEGORIES = {
    "coding", "translation", "summarization", "qa", "math_reasoning", "rag", "writing", "roleplay",
    "reasoning", "math", "extraction", "stem", "humanities", "rewriting", "instruction", "self",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[TrainingPrompt]:
    return write_prompts(25_000, seed=0)


def template(text: str, **slots: list[str]) -> Template:
    return Template(text, Slots(slots))


def texts(text: str, **slots: list[str]) -> list[str]:
    made = template(text, **slots)
    return [made.expand(i)[0] for i in range(made.size)]


def test_fields_are_filled_in_every_way_once():
    made = texts("{a:1..2} {fruit} or {a} {fruit.2}", fruit=["figs", "plums"])

    assert ["1 figs or 1 plums", "1 plums or 1 figs", "2 figs or 2 plums", "2 plums or 2 figs"] == (
        sorted(made)
    )


def test_a_second_field_of_a_list_never_repeats_the_first():
    made = texts("{n} {n.2} {n.3}", n=["a", "b", "c", "d"])

    assert 24 == len(set(made)) == len(made)
    assert all(3 == len(set(text.split())) for text in made)


def test_listed_texts_have_fields_of_their_own():
    made = texts("{who}!", who=["Ann", "{title} {k:1..2}"], title=["Sir", "Lady"])

    assert {"Ann!", "Sir 1!", "Sir 2!", "Lady 1!", "Lady 2!"} == set(made)
    assert 5 == len(made)


def test_numbers_go_in_steps():
    assert ["10", "40", "70"] == texts("{n:10..90..30}")


def test_double_braces_are_braces_and_late_fields_stay():
    assert ["x = {} {passage1}"] == texts("x = {{}} {passage1}")
    assert 2 == template("{passage1}").passage_count


@pytest.mark.parametrize("text", ["a { b", "{unknown}", "{Name}", "{n} {n.2}"])
def test_a_wrong_template_is_refused_when_the_book_is_read(text: str):
    with pytest.raises(AssertionError):
        template(text, n=["only"])


def test_the_book_has_every_category_and_enough_of_each():
    categories = {category.name: category for category in load_book()}

    assert CATEGORIES == set(categories)
    for category in categories.values():
        takes_passages = any(entry.template.passage_count for entry in category.entries)
        size = sum(entry.template.size for entry in category.entries)
        assert takes_passages or size >= 1_500, category.name


def test_each_category_alone_gives_1500_prompts_without_repeats():
    prompts = write_prompts(90_000, seed=1)
    counts = Counter(prompt.category for prompt in prompts)

    assert 90_000 == len({(prompt.turns, prompt.passages) for prompt in prompts})
    assert 1_500 <= min(counts.values())


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    assert write_prompts(500, seed=3) == write_prompts(500, seed=3)
    assert prompts_hash(write_prompts(500, seed=3)) != prompts_hash(write_prompts(500, seed=4))


@pytest.mark.parametrize("count", [1, 40, 999])
def test_fewer_prompts_are_the_beginning_of_more(prompts: list[TrainingPrompt], count: int):
    assert prompts[:count] == write_prompts(count, seed=0)


def test_no_prompt_is_written_twice(prompts: list[TrainingPrompt]):
    assert 25_000 == len({prompt.id for prompt in prompts})
    assert 25_000 == len({(prompt.turns, prompt.passages) for prompt in prompts})


def test_every_field_is_filled_but_those_of_the_passages(prompts: list[TrainingPrompt]):
    for prompt in prompts:
        text = "\n".join(prompt.turns)
        fields = set(re.findall(r"\{([a-z_]+\d?[^{}'\" ]*)\}", text))

        assert {f"passage{i}" for i in range(len(prompt.passages))} == fields
        assert all(turn.strip() and "<turn>" not in turn for turn in prompt.turns)


def test_passages_are_earlier_prompts_of_article_groups_each_once(prompts: list[TrainingPrompt]):
    earlier: dict[str, TrainingPrompt] = {}
    for prompt in prompts:
        assert len(prompt.passages) == len(set(prompt.passages))
        for passage in prompt.passages:
            assert earlier[passage].category in {"writing", "stem", "humanities"}
            assert not earlier[passage].passages
            assert 1 == len(earlier[passage].turns)
        earlier[prompt.id] = prompt


def test_sources_are_used_about_equally_often(prompts: list[TrainingPrompt]):
    uses = Counter(passage for prompt in prompts for passage in prompt.passages)
    counts = sorted(uses.values())

    assert len(counts) > 1_000
    assert counts[-1] - counts[0] <= 3


def test_a_question_is_about_one_of_its_passages(prompts: list[TrainingPrompt]):
    by_id = {prompt.id: prompt for prompt in prompts}
    asked = [
        prompt for prompt in prompts if "What is the best time to visit" in prompt.turns[0]
        and prompt.passages
    ]  # fmt: skip

    assert asked
    for prompt in asked:
        found = re.search(r"best time to visit ([A-Z][A-Za-z ]+)\?", prompt.turns[0])
        assert found
        town = found[1]
        assert any(town in by_id[passage].turns[0] for passage in prompt.passages)


@pytest.mark.parametrize("start", [1_000, 12_000, 24_500])
def test_every_stretch_has_the_whole_mix(prompts: list[TrainingPrompt], start: int):
    counts = Counter(prompt.category for prompt in prompts[start : start + 500])

    for category in load_book():
        assert counts[category.name] == pytest.approx(500 * category.weight, abs=2)


def test_openers_are_the_self_category(prompts: list[TrainingPrompt]):
    assert {"self"} == {prompt.category for prompt in prompts if prompt.is_opener}
    assert all(prompt.is_opener for prompt in prompts if prompt.category == "self")


def test_ids_number_the_prompts_of_a_category(prompts: list[TrainingPrompt]):
    coding = [prompt.id for prompt in prompts if prompt.category == "coding"]

    assert [f"book/coding/{i:06d}" for i in range(len(coding))] == coding


def test_texts_outside_translation_are_ascii(prompts: list[TrainingPrompt]):
    for prompt in prompts:
        if prompt.category != "translation":
            assert all(turn.isascii() for turn in prompt.turns), prompt


def test_the_stubs_to_complete_are_python(prompts: list[TrainingPrompt]):
    stubs = [
        prompt.turns[0] for prompt in prompts
        if prompt.category == "coding" and prompt.turns[0].startswith("def ")
        and prompt.turns[0].endswith('"""')
    ]  # fmt: skip

    assert len(stubs) > 50
    for stub in stubs:
        compile(stub, "stub", "exec")


def test_a_count_below_one_is_refused():
    with pytest.raises(ParameterError, match="count is 0"):
        write_prompts(0, seed=0)


def test_more_than_the_book_holds_is_refused_and_what_it_holds_is_given(
    monkeypatch: pytest.MonkeyPatch,
):
    def entry(text: str) -> Entry:
        return Entry(template(text), weight=1.0, topic=None, questions=(), is_opener=False)

    # The templates of "a" share a text, so that it has seven; "b" has more than enough.
    book = (
        Category("a", 0.6, (entry("{n:1..6}"), entry("{k:6..7}"))),
        Category("b", 0.4, (entry("b{n:1..90}"),)),
    )
    monkeypatch.setattr("outrider.training.prompts.load_book", lambda: book)
    with pytest.raises(ParameterError, match=r"holds 1\d prompts for seed 0: a is used up"):
        write_prompts(100, seed=0)

    assert 7 == sum(prompt.category == "a" for prompt in write_prompts(11, seed=0))


def test_saved_prompts_come_back_the_same(tmp_path: Path, prompts: list[TrainingPrompt]):
    path = tmp_path / "prompts.jsonl"
    chosen = [
        *prompts[:800],
        TrainingPrompt("u", "x", ("a\u2028b\nc", "Gr\u00fc\u00dfe {passage9}")),
    ]
    save_prompts(path, chosen)

    assert chosen == read_prompts(path)
    assert prompts_hash(chosen) == prompts_hash(read_prompts(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a training prompt"),
        ('{"id":"a","category":"b","turns":["c"]}', "is not a training prompt"),
        ('{"id":"a","category":"b","turns":[],"passages":[],"is_opener":false}', "is not a train"),
        ('{"id":"a","category":"b","turns":[1],"passages":[],"is_opener":false}', "is not a train"),
        ('{"id":"a","category":"b","turns":"c","passages":[],"is_opener":false}', "is not a train"),
        ('{"id":"a","category":"b","turns":["c"],"passages":[],"is_opener":0}', "is not a train"),
        ('{"id":"a","category":"b","turns":["c"],"passages":["z"],"is_opener":false}', "'z' is no"),
    ],
)
def test_a_broken_line_is_refused_by_number(tmp_path: Path, line: str, reason: str):
    path = tmp_path / "prompts.jsonl"
    save_prompts(path, [TrainingPrompt("first", "qa", ("Why?",))])
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")

    with pytest.raises(PromptError, match=f"line 2.*{re.escape(reason)}"):
        read_prompts(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(PromptError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_the_users_files_are_read_in_order_with_their_turns(tmp_path: Path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(json.dumps({"id": "a", "category": "qa", "turns": ["Why?", "And then?"]}))
    two.write_text(json.dumps({"prompt": "How?"}))

    assert [
        TrainingPrompt("a", "qa", ("Why?", "And then?")),
        TrainingPrompt("two.jsonl:1", "other", ("How?",)),
    ] == load_training_prompts([one, two])


def test_an_id_in_two_files_is_refused(tmp_path: Path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for path in (one, two):
        path.write_text(json.dumps({"id": "a", "prompt": "Why?"}))

    with pytest.raises(PromptError, match=r"two\.jsonl: id 'a' is also in an earlier file"):
        load_training_prompts([one, two])
