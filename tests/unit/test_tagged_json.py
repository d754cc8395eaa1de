"""JSON between tags: what it allows, and what is refused before a compiler sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.config import GrammarKind, GrammarSpec
from outrider.errors import ParameterError
from outrider.grammar import GrammarCompiler
from outrider.models.loading import load
from outrider.server.errors import ApiError
from outrider.server.schemas import Tool
from outrider.server.tools import ToolPlan
from tests.tiny import write_hf_checkpoint

SCHEMA = {"$defs": {"side": {"enum": ["left", "right"]}}, "$ref": "#/$defs/side"}
OTHER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


NESTED: dict[str, Any] = {}
for _ in range(80):
    NESTED = {"items": NESTED}


def spec(*, repeats: bool = False, or_text: bool = False, **schemas: Any) -> GrammarSpec:
    tags = [
        {"begin": f"<{name}>", "schema": schema, "end": f"</{name}>"}
        for name, schema in schemas.items()
    ]
    text = json.dumps({"tags": tags, "repeats": repeats, "or_text": or_text})
    return GrammarSpec(GrammarKind.TAGGED_JSON, text)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    checkpoint = load(write_hf_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))
    checkpoint.weights.close()
    return GrammarCompiler(checkpoint.tokenizer, checkpoint.config.vocab_size)


def allows(compiler: GrammarCompiler, wanted: GrammarSpec, text: str) -> bool:
    """Whether the whole text is possible, and the answer may end behind it."""
    alphabet = {compiler._tokenizer.token_bytes(i): i for i in range(3, 320)}
    ids = [alphabet[bytes([byte])] for byte in text.encode()]
    constraint = compiler.constraint(wanted)
    if constraint.num_valid([], ids) < len(ids):
        return False
    mask = constraint.mask(ids)
    return any(mask[token] for token in compiler._tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<a>"left"</a>', True),
        ('<a>"up"</a>', False),
        ('<b>{"n": 7}</b>', True),
        ('<b>{"n": "7"}</b>', False),
        ('<a>{"n": 7}</a>', False),
        ('<a>"left"</b>', False),
        ('<a>"left"</a><a>"left"</a>', False),
        ("left", False),
        ("", False),
    ],
)
def test_each_tag_has_its_own_schema_with_its_own_references(compiler, text, expected) -> None:
    assert expected == allows(compiler, spec(a=SCHEMA, b=OTHER), text)


def test_several_are_allowed_where_they_may_repeat(compiler) -> None:
    text = '<a>"left"</a><b>{"n":1}</b><a>"right"</a>'

    assert allows(compiler, spec(repeats=True, a=SCHEMA, b=OTHER), text)
    assert not allows(compiler, spec(repeats=False, a=SCHEMA, b=OTHER), text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No need to ask: 1 < 2.", True),
        ("\n\ttext <a>", True),
        ('<a>"left"</a>', True),
        ("<a>left</a>", False),
        (" <a>", False),
        ("<b", False),
    ],
)
def test_text_is_allowed_unless_it_starts_like_a_tag(compiler, text, expected) -> None:
    assert expected == allows(compiler, spec(or_text=True, a=SCHEMA), text)


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        [],
        {"tags": []},
        {"tags": [], "repeats": True, "or_text": True},
        {"tags": [{"begin": "a"}], "repeats": True, "or_text": True},
        {"tags": [{"begin": "", "schema": {}, "end": "b"}], "repeats": True, "or_text": True},
        {"tags": [{"begin": "a", "schema": 3, "end": "b"}], "repeats": True, "or_text": True},
    ],
    ids=repr,
)
def test_another_shape_is_refused(compiler, wanted) -> None:
    with pytest.raises(ParameterError, match=r"^grammar: "):
        compiler.constraint(GrammarSpec(GrammarKind.TAGGED_JSON, json.dumps(wanted)))


@pytest.mark.parametrize(
    "schema",
    [
        {"x-guidance": {"lenient": True}},
        {"type": "string", "pattern": "a" * 5000},
        {"type": "nothing"},
    ],
    ids=["options", "long pattern", "no type"],
)
def test_what_a_schema_may_not_hold_it_may_not_hold_between_tags(compiler, schema) -> None:
    with pytest.raises(ParameterError, match=r"^grammar: "):
        compiler.constraint(spec(a=schema))


def test_patterns_count_together(compiler) -> None:
    """Compiling takes longer than their sum, whatever schema they are in."""
    schema = {"type": "string", "pattern": "a" * 2000}
    with pytest.raises(ParameterError, match="patterns has 6000 characters"):
        compiler.constraint(spec(a=schema, b=schema, c=schema))


def plan(schema: dict[str, Any]) -> ToolPlan:
    tool = Tool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": schema}}
    )
    found = ToolPlan.of([tool], None, None)

    assert found is not None
    return found


def test_functions_that_are_too_long_are_named_as_such() -> None:
    """Who sends functions has asked for no grammar, and has never heard of its kinds."""
    with pytest.raises(ApiError) as caught:
        plan({"enum": ["x" * 70_000]}).grammar()

    assert "tools" == caught.value.param
    message = r"^tools: the 1 functions' names and parameters have 70\d+ characters; allowed: 65536"
    with pytest.raises(ApiError, match=message):
        plan({"enum": ["x" * 70_000]}).grammar()


@pytest.mark.parametrize("schema", [{"enum": []}, {"type": "nonsense"}, NESTED])
def test_no_message_about_functions_names_a_kind_of_grammar(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    with pytest.raises(ParameterError, match="schema in tags") as caught:
        compiler.constraint(plan(schema).grammar())

    assert "tagged_json" not in str(caught.value)
