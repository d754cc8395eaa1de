from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.prompts import Prompt, load_prompts, prompt_set_hash
from outrider.errors import PromptError

CATEGORIES = {
    "chat",
    "code",
    "code-edit",
    "math",
    "summarize",
    "answer",
    "translate",
    "rewrite",
}


def file_of(tmp_path: Path, *lines: str | bytes) -> Path:
    """A prompt file with these lines."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines) + b"\n")
    return path


def message_of(path: Path) -> str:
    """What loading this file is refused with."""
    with pytest.raises(PromptError) as caught:
        load_prompts(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bundled_prompts_cover_every_category_with_short_inputs():
    prompts = load_prompts()
    per_category = Counter(prompt.category for prompt in prompts)

    assert set(per_category) == CATEGORIES
    assert min(per_category.values()) >= 8
    assert len(prompts) >= 64
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.id.startswith(prompt.category)
        assert 15 <= len(" ".join(prompt.turns).split()) <= 180


def test_turns_prompt_and_messages_are_three_ways_to_say_the_same(tmp_path: Path):
    path = file_of(
        tmp_path,
        '{"id": "a", "category": "chat", "turns": ["One?", "Two?"], "source": "ignored"}',
        "",
        '{"prompt": "One?"}',
        '{"id": "c", "messages": [{"role": "user", "content": "One?"},'
        ' {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]}',
    )

    assert load_prompts(path) == [
        Prompt("a", "chat", ("One?", "Two?")),
        Prompt("prompts.jsonl:3", "other", ("One?",)),
        Prompt("c", "other", ("One?", "Two?")),
    ]


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake(tmp_path: Path):
    path = file_of(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r', b'{"prompt": "b"}\r')

    assert [prompt.turns for prompt in load_prompts(path)] == [("a",), ("b",)]


def test_unicode_line_separators_stay_inside_a_prompt(tmp_path: Path):
    path = file_of(tmp_path, '{"prompt": "one\u2028two\u0085three"}')

    assert load_prompts(path)[0].turns == ("one\u2028two\u0085three",)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON (beyond Python's limits)"),
        ('{"prompt": "a", "n": ' + "1" * 10_000 + "}", "is not JSON (beyond Python's limits)"),
        ("nonsense", "is not JSON"),
        ("[1]", "is a JSON array, not an object"),
        ("null", "is a JSON null, not an object"),
        ("{}", "has none of them"),
        ('{"id": "x", "text": "hello"}', "has none of them"),
        ('{"prompt": "a", "turns": ["b"]}', "has turns and prompt"),
        ('{"prompt": 3}', "prompt: is number, not a string"),
        ('{"prompt": " "}', "prompt: is empty"),
        ('{"turns": "hello"}', "turns is string, not a non-empty list"),
        ('{"turns": []}', "turns is array, not a non-empty list"),
        ('{"turns": ["a", null]}', "turns[1]: is null, not a string"),
        ('{"turns": ["\\ud83d"]}', "half a surrogate pair (\\ud83d)"),
        ('{"messages": ["a"]}', "messages[0]: is string, not an object"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "role 'system' is not one of"),
        ('{"messages": [{"content": "a"}]}', "role None is not one of"),
        ('{"messages": [{"role": "user"}]}', "messages[0]: content: is null, not a string"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message of the role user"),
        ('{"id": 7, "prompt": "a"}', "id: is number, not a string"),
        ('{"category": true, "prompt": "a"}', "category: is boolean, not a string"),
        (b'{"prompt": "caf\xe9"}', "byte 0xe9 at offset 15 is not UTF-8"),
    ],
)
def test_a_wrong_line_is_refused_with_file_and_line(
    tmp_path: Path, line: str | bytes, complaint: str
):
    path = file_of(tmp_path, '{"prompt": "fine"}', line)
    message = message_of(path)

    assert message.startswith(f"{path}, line 2: ")
    assert complaint in message


def test_a_repeated_id_is_refused(tmp_path: Path):
    path = file_of(tmp_path, *['{"id": "same", "prompt": "a"}'] * 2)

    assert "id 'same' is used twice" in message_of(path)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes):
    path = file_of(tmp_path, content)

    assert "holds no prompts" in message_of(path)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path):
    assert "No such file" in message_of(tmp_path / "absent.jsonl")
    assert "cannot be read" in message_of(tmp_path)


def test_a_users_mistake_has_exit_status_2(tmp_path: Path):
    with pytest.raises(PromptError) as caught:
        load_prompts(tmp_path / "absent.jsonl")

    assert caught.value.exit_status == 2


PROMPTS = st.builds(
    Prompt,
    id=st.text(st.characters(codec="utf-8"), min_size=1),
    category=st.text(st.characters(codec="utf-8"), min_size=1),
    turns=st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=3).map(tuple),
)


@given(st.lists(PROMPTS, max_size=3), st.lists(PROMPTS, max_size=3))
def test_sets_have_the_same_hash_only_when_they_are_equal(left: list[Prompt], right: list[Prompt]):
    assert (prompt_set_hash(left) == prompt_set_hash(right)) == (left == right)


def test_the_hash_is_short_and_does_not_change_between_versions():
    """Results written by one version are compared with those of the next by this hash."""
    prompts = [Prompt("a", "chat", ("Grüße", "two")), Prompt("b", "math", ("1+1",))]

    assert prompt_set_hash(prompts) == "dc07eb521e93"
    assert prompt_set_hash(prompts[::-1]) != prompt_set_hash(prompts)


def test_loading_what_was_written_gives_the_same_prompts(tmp_path: Path):
    prompts = load_prompts()
    lines = [
        json.dumps({"id": x.id, "category": x.category, "turns": list(x.turns)}) for x in prompts
    ]

    assert load_prompts(file_of(tmp_path, *lines)) == prompts
