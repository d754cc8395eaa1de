"""Grammars: masks against trying all texts, whatever was asked before; limits; clear refusals."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import grammar
from outrider.config import GrammarKind, GrammarSpec
from outrider.errors import ParameterError
from outrider.grammar import GrammarCompiler, GrammarConstraint
from outrider.grammar_notation import MAX_DEPTH, MAX_EXPRESSION_CHARS
from tests.grammars import Spelled, allowed_by_trying
from tests.tiny import complaint

# "a" .. "c" as single letters and in longer tokens, two ends, a token without bytes.
END, OTHER_END = 3, 7
TOY = Spelled(
    (b"a", b"b", b"c", b"<end>", b"ab", b"abc", b"cc", b"<other>", b"", b"ca"),
    frozenset({END, OTHER_END}),
)
NUM_ROWS = 13  # a few more than there are tokens, and not a whole number of bytes
COMPILER = GrammarCompiler(TOY, NUM_ROWS)
ASCII = Spelled((*(bytes([byte]) for byte in range(128)), b"<end>"), frozenset({128}))
ASCII_COMPILER = GrammarCompiler(ASCII, 129)

EXPRESSIONS = ["(ab|ba)*c?", "a{3}", "abcabc", "a*", "(a|b)*ca", "abc|ab|b", "(abc){1,2}(c|ca)?"]


def regex(expression: str, **options: Any) -> GrammarConstraint:
    return COMPILER.constraint(GrammarSpec(GrammarKind.REGEX, expression), **options)


def allowed(constraint: GrammarConstraint, output: list[int]) -> set[int]:
    mask_V = constraint.mask(output)

    assert (NUM_ROWS,) == mask_V.shape
    assert np.bool_ == mask_V.dtype
    return set(np.flatnonzero(mask_V).tolist())


def expected(expression: str, output: list[int]) -> set[int]:
    return allowed_by_trying(expression, TOY, output, alphabet="abc", max_len=9)


# --- masks --------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data(), expression=st.sampled_from(EXPRESSIONS))
def test_masks_are_those_of_trying_all_texts_whatever_was_asked_before(
    data: st.DataObject, expression: str
) -> None:
    """Outputs of up to four tokens in any order: on, back, aside, past an end, into nonsense."""
    constraint = regex(expression)
    for _ in range(data.draw(st.integers(1, 12))):
        output = data.draw(st.lists(st.integers(0, 9), max_size=4))
        if data.draw(st.booleans()):  # mostly a text of the grammar
            output = []
            for _ in range(data.draw(st.integers(0, 4))):
                choices = sorted(expected(expression, output) - TOY.eos_ids)
                if choices:
                    output.append(data.draw(st.sampled_from(choices)))
        if len(TOY.text(output)) > 4:
            continue  # trying ends at nine: a token of three and the two that an end may need more

        assert expected(expression, output) == allowed(constraint, output)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_how_much_of_a_path_is_valid_is_what_the_masks_say(expression: str) -> None:
    constraint = regex(expression)
    paths = [[0], [0, 1], [4, 2], [5, 5], [0, 0, 0], [0, 0, 0, END], [4, END, 0], [END], [], [8]]
    for output in ([], [0], [4]):
        for path in paths:
            num_valid = 0
            while num_valid < len(path) and path[num_valid] in expected(
                expression, [*output, *path[:num_valid]]
            ):
                num_valid += 1

            assert num_valid == constraint.num_valid(output, path), (output, path)


def test_a_wrong_twin_that_forgets_to_go_back_is_caught() -> None:
    """The property above sees a matcher whose answers depend on what was asked before."""
    constraint = regex("(ab|ba)*c?")
    constraint.mask([0])
    constraint._matcher._consumed = []  # as if nothing had to be taken back

    assert expected("(ab|ba)*c?", [1]) != allowed(constraint, [1])


# Two kinds of brackets that a token may close together with what stands in them.
BRACKETS = Spelled((b"(", b"[", b"a", b")", b"]", b"a)", b"a]", b"<end>"), frozenset({7}))
BRACKETS_COMPILER = GrammarCompiler(BRACKETS, 8)
NESTED = GrammarSpec(GrammarKind.LARK, 'start: e\ne: "(" i+ ")" | "[" i+ "]"\ni: "a" | e\n')


def test_a_mask_is_not_that_of_another_place_with_the_same_expectations() -> None:
    """After either bracket the parser is in a row of the same number and a lexer's same state."""
    constraint = BRACKETS_COMPILER.constraint(NESTED)

    assert [0, 1, 2, 5] == np.flatnonzero(constraint.mask([0])).tolist()
    assert [0, 1, 2, 6] == np.flatnonzero(constraint.mask([1])).tolist()


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=2, max_size=12))
def test_masks_in_nested_grammars_are_those_of_who_was_asked_nothing_else(
    outputs: list[list[int]],
) -> None:
    asked = BRACKETS_COMPILER.constraint(NESTED)
    for wanted in outputs:
        fresh = BRACKETS_COMPILER.constraint(NESTED)
        output: list[int] = []
        for token in wanted:  # mostly a text of the grammar
            choices = np.flatnonzero(fresh.mask(output)).tolist()
            output.append(choices[token % len(choices)] if choices else token)

        assert np.array_equal(fresh.mask(output), asked.mask(output))


def test_every_split_of_a_forced_text_is_allowed() -> None:
    assert {0, 4, 5} == allowed(regex("abcabc"), [])


def test_an_end_is_allowed_only_where_the_grammar_may_end() -> None:
    constraint = regex("(ab)*")

    assert {0, 4, END, OTHER_END} == allowed(constraint, [])
    assert {1} == allowed(constraint, [0])
    assert set() == allowed(constraint, [0, END])


def test_ignoring_the_end_of_sequence_never_allows_it() -> None:
    constraint = regex("a{1,2}", ignores_eos=True)

    assert {0} == allowed(constraint, [0])
    assert not constraint.is_complete([0])
    assert constraint.is_complete([0, 0])
    assert 0 == constraint.num_valid([0], [END])


def test_complete_is_what_nothing_can_follow() -> None:
    constraint = regex("ab|abc")

    assert not constraint.is_complete([0])
    assert not constraint.is_complete([0, 1])
    assert constraint.is_complete([0, 1, 2])
    assert constraint.is_complete([5])
    assert not constraint.is_complete([5, END])


def test_a_vocabulary_without_an_end() -> None:
    endless = GrammarCompiler(Spelled((b"a", b"b")), 5)
    constraint = endless.constraint(GrammarSpec(GrammarKind.REGEX, "ab*"))

    assert [True, False, False, False, False] == constraint.mask([]).tolist()
    assert [False, True, False, False, False] == constraint.mask([0]).tolist()
    assert not constraint.is_complete([0])


def test_tokens_beyond_the_model_s_rows_are_never_allowed() -> None:
    compiler = GrammarCompiler(Spelled((b"b", b"a", b"a", b"<end>"), frozenset({3})), 2)
    constraint = compiler.constraint(GrammarSpec(GrammarKind.REGEX, "a{1,2}"))

    assert [False, True] == constraint.mask([]).tolist()
    assert constraint.is_complete([1, 1])


# --- the kinds ----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = {
    "json_schema": (json.dumps(SCHEMA), '{"name": "abc", "age": -7}', '{"name": "abcd"'),
    "json_object": ("", '{"a":[1,{"b":null}],\n"c":true}', "[1"),
    "regex": (r"\d{3}-[a-z]+", "123-abc", "12-"),
    "choice": ('["yes", "no", "a \\"b\\" \\\\ c"]', 'a "b" \\ c', "maybe"),
    "lark": ('start: e\ne: "(" e ")" | "x"\n', "((x))", "((x)))"),
    "tagged_json": (
        '{"tags": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], '
        '"repeats": true, "or_text": false}',
        "<a>1</a><a>-22</a>",
        '<a>"1"</a>',
    ),
}


@pytest.mark.parametrize("kind", GrammarKind)
def test_each_kind_takes_its_texts_and_no_others(kind: GrammarKind) -> None:
    text, right, wrong = KINDS[kind]
    constraint = ASCII_COMPILER.constraint(GrammarSpec(kind, text))

    assert len(right) == constraint.num_valid([], list(right.encode()))
    assert constraint.mask(list(right.encode()))[128] or constraint.is_complete(
        list(right.encode())
    )
    assert len(wrong) > constraint.num_valid([], list(wrong.encode()))


def test_white_space_in_json_is_allowed_but_not_without_end() -> None:
    constraint = ASCII_COMPILER.constraint(GrammarSpec(GrammarKind.JSON_OBJECT))

    assert 3 == constraint.num_valid([], list(b"{ \n"))
    assert 100 > constraint.num_valid([], list(b"{" + b" " * 100))


# --- refusals -----------------------------------------------------------------------------------

MALFORMED = {
    "json_schema": [
        "{",
        "[1]",
        "7",
        '{"type": "nonsense"}',
        '{"type": "string", "pattern": "("}',
        '{"$ref": "http://example.com/schema"}',
        '{"$ref": "#/$defs/missing"}',
        '{"$ref": "#"}',
        '{"oneOf": [{"type": "string"}, {"minLength": 1}]}',
        '{"type": "number", "minimum": NaN}',
        '{"type": "number", "minimum": 1e999}',
        '{"enum": ["\\ud800"]}',
        '{"x-guidance": {"lenient": true}}',
        "false",
        '{"enum": []}',
    ],
    "regex": ["(", "[", "a(?=b)", "(?<name", "\\"],
    "choice": ["", "yes", "[]", '["a", 1]', '[""]', '{"a": 1}', '["a"'],
    "lark": [
        "nonsense",
        "start: missing",
        "start: start",
        'start: ""',
        'start: "a',
        "%llguidance {}",
    ],
}


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in MALFORMED.items() for text in texts]
)
def test_a_malformed_grammar_is_refused_also_after_a_valid_one(kind: str, text: str) -> None:
    valid = GrammarSpec(GrammarKind.REGEX, "ab")
    ASCII_COMPILER.constraint(valid)
    with pytest.raises(ParameterError, match=r"^grammar: "):
        ASCII_COMPILER.constraint(GrammarSpec(GrammarKind(kind), text))

    assert 2 == ASCII_COMPILER.constraint(valid).num_valid([], list(b"ab"))


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def chained(num_links: int) -> str:
    """Each definition refers to the next; half the length of one that ends the process."""
    links = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(num_links)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{num_links}": {}}})


OVERSIZED = {
    "deep": (GrammarKind.JSON_SCHEMA, nested(MAX_DEPTH), "nested 129 deep"),
    "very deep": (GrammarKind.JSON_SCHEMA, nested(3000), "nested 6001 deep"),
    "chained": (GrammarKind.JSON_SCHEMA, chained(500), "501 places that it refers to"),
    "long pattern": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"type": "string", "pattern": "a?" * 2049}),
        "patterns has 4098 characters",
    ),
    "many patterns": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"patternProperties": {f"^{'a' * 100}{i}$": {} for i in range(100)}}),
        "patterns has",
    ),
    "long regex": (GrammarKind.REGEX, "a" * (MAX_EXPRESSION_CHARS + 1), "regex has 4097"),
    "long lark": (GrammarKind.LARK, "x: y\n" * 1000, "lark grammar has 5000"),
    "many choices": (GrammarKind.CHOICE, json.dumps(["a"] * 5000), "5000 entries"),
    "deep choice": (GrammarKind.CHOICE, "[" * 9000, "nested 9000 deep"),
    "wide all-of": (
        GrammarKind.JSON_SCHEMA,
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(20)
                ]
            }
        ),
        "does not compile",
    ),
}


@pytest.mark.parametrize(("kind", "text", "message"), OVERSIZED.values(), ids=OVERSIZED)
def test_an_oversized_grammar_is_refused_with_the_numbers(
    kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        ASCII_COMPILER.constraint(GrammarSpec(kind, text))


def test_a_text_beyond_all_limits_is_refused_before_anything_reads_it() -> None:
    with pytest.raises(ParameterError, match=r"70000 characters; allowed: 1 \.\. 65536"):
        GrammarSpec(GrammarKind.JSON_SCHEMA, " " * 70000)
    with pytest.raises(ParameterError, match="takes no text"):
        GrammarSpec(GrammarKind.JSON_OBJECT, "{}")
    with pytest.raises(ParameterError, match="not one of json_schema, json_object"):
        GrammarSpec("xml")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="lone surrogate at character 1"):
        GrammarSpec(GrammarKind.REGEX, "a\ud800")
    with pytest.raises(ParameterError, match="is 7, not a string"):
        GrammarSpec(GrammarKind.REGEX, 7)  # type: ignore[arg-type]


def test_the_largest_that_is_allowed_compiles_in_processor_seconds() -> None:
    """Quadratic or recursive as they are, within the limits they end."""
    largest = [
        GrammarSpec(GrammarKind.REGEX, "a?" * (MAX_EXPRESSION_CHARS // 2)),
        GrammarSpec(GrammarKind.JSON_SCHEMA, nested(MAX_DEPTH // 2 - 1)),
        GrammarSpec(GrammarKind.JSON_SCHEMA, chained(120)),
        GrammarSpec(GrammarKind.CHOICE, json.dumps([f"w{i}" for i in range(4000)])),
    ]
    started = time.process_time()
    for spec in largest:
        ASCII_COMPILER.constraint(spec)

    assert 20 > time.process_time() - started


# --- the cache ----------------------------------------------------------------------------------


def test_the_cache_keeps_the_last_grammars_by_number_and_by_length() -> None:
    few = GrammarCompiler(TOY, NUM_ROWS, max_entries=3)
    short = GrammarCompiler(TOY, NUM_ROWS, max_chars=25)
    for length in range(1, 9):
        spec = GrammarSpec(GrammarKind.REGEX, "a" * length)
        few.constraint(spec)
        short.constraint(spec)

    assert 3 == few.num_known
    assert 3 == short.num_known  # 8 + 7 + 6 characters; 5 more would be too many


def test_a_dropped_grammar_goes_on_for_the_request_that_has_it() -> None:
    single = GrammarCompiler(TOY, NUM_ROWS, max_entries=1)
    first = single.constraint(GrammarSpec(GrammarKind.REGEX, "ab"))
    single.constraint(GrammarSpec(GrammarKind.REGEX, "c"))

    assert {0, 4} == allowed(first, [])


def test_two_requests_with_one_grammar_do_not_disturb_each_other() -> None:
    one, other = regex("(ab|ba)*c?"), regex("(ab|ba)*c?")
    one.mask([0])

    assert {0, 1, 2, 4, END, OTHER_END} | expected("(ab|ba)*c?", []) == allowed(other, [])
    assert {1} == allowed(one, [0]) - {4}


# --- dead ends and limits -----------------------------------------------------------------------


def test_a_parser_that_gives_up_says_so_and_recovers_for_other_outputs() -> None:
    """What one path does to the matcher must not reach another."""
    constraint = regex("abc")

    assert constraint.failure([1]) == "the grammar allows no token after 1 of output"
    assert constraint.failure([0]) is None
    assert {1} == allowed(constraint, [0])
    assert constraint.failure([0, 1, 2]) is None  # the end


def test_an_output_beyond_the_parser_s_limits_fails_with_the_reason_and_alone() -> None:
    """So ambiguous a grammar that each token costs more than the one before it."""
    spec = GrammarSpec(GrammarKind.LARK, 'start: e\ne: e e e e e e | e e | "a" | "b" e\n')
    constraint = COMPILER.constraint(spec)
    length = next(n for n in range(1, 400) if constraint.failure([0] * n) is not None)

    assert "max is 500" in (constraint.failure([0] * length) or "")
    assert 0 in allowed(constraint, [0] * (length - 1))
    assert 0 in allowed(COMPILER.constraint(spec), [0])


def test_a_full_memory_is_nobody_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one grammar remember together; what fits by itself must not fail for others."""
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 150)
    compiler = GrammarCompiler(ASCII, 129)
    spec = GrammarSpec(GrammarKind.REGEX, "(.*a.{8})b")
    compiled = []
    compile_afresh = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda spec: compiled.append(spec) or compile_afresh(spec)
    )
    for n in range(1, 200):
        output = list(f"{n:b}".replace("1", "a").replace("0", "c").encode())

        assert compiler.constraint(spec).failure(output) is None
    assert len(compiled) > 1, "it never got full: nothing was tested"


LOOKS_BACK = GrammarSpec(GrammarKind.REGEX, "(.*a.{8})b")


class Counted(GrammarCompiler):
    """Counts how often it compiles; each compiled grammar remembers few states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_states: int) -> None:
        super().__init__(ASCII, 129)
        monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", max_states)
        self.num_compiled = 0

    def _compile(self, spec: GrammarSpec) -> Any:
        self.num_compiled += 1
        return super()._compile(spec)


def letters_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).choice([97, 99], length).tolist()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), max_states=st.integers(60, 200))
def test_a_full_memory_changes_no_answer(
    seed: int, max_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests, guesses, drafts: where they fill it up, the answers are those of a new one."""
    draw = np.random.default_rng(seed)
    shared = Counted(monkeypatch, max_states)
    one, other = shared.constraint(LOOKS_BACK), shared.constraint(LOOKS_BACK)
    for _ in range(12):
        output = letters_of(int(draw.integers(1000)), int(draw.integers(120)))
        one.num_valid(output, letters_of(int(draw.integers(1000)), 16))
        other.for_drafts().mask(letters_of(int(draw.integers(1000)), 40))
        found = one.state(output) if draw.random() < 0.5 else other.state(output)
        expected = Counted(monkeypatch, max_states).constraint(LOOKS_BACK).state(output)

        assert expected.problem == found.problem
        assert np.array_equal(expected.allowed, found.allowed)
        assert expected.may_end == found.may_end
    assert shared.num_compiled > 1, "it never got full: nothing was tested"


def test_what_a_neighbour_has_renewed_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Counted(monkeypatch, 150)
    constraints = [compiler.constraint(LOOKS_BACK) for _ in range(4)]
    seed = 0
    while compiler.num_compiled == 1:
        assert constraints[0].failure(letters_of(seed, 20)) is None
        seed += 1
    for constraint in constraints:
        assert constraint.failure([97]) is None

    assert 2 == compiler.num_compiled


def test_guesses_compile_nothing_and_end_until_the_next_real_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Counted(monkeypatch, 150)
    constraint = compiler.constraint(LOOKS_BACK)
    guesses = constraint.for_drafts()
    masks = [guesses.mask(letters_of(seed, 20)) for seed in range(50)]

    assert 1 == compiler.num_compiled
    assert masks[0].any()
    assert not masks[-1].any()
    assert not guesses.mask([99]).any()
    assert constraint.mask([97]).any()
    assert 2 == compiler.num_compiled
    assert guesses.mask([99]).any()


def test_what_is_too_ambiguous_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many items a row has depends on the output alone, so another memory would not help."""
    compiler = Counted(monkeypatch, 20_000)
    arrays = [{"type": "array", "items": {"$ref": "#/$defs/x"}}] * 200
    schema = {"$defs": {"x": {"anyOf": arrays}}, "$ref": "#/$defs/x"}
    constraint = compiler.constraint(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for n in range(8):
        assert "max is 500" in (constraint.failure([ord("["), n]) or "")

    assert 1 == compiler.num_compiled


def test_what_follows_a_dead_end_is_answered_without_the_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constraint = Counted(monkeypatch, 150).constraint(GrammarSpec(GrammarKind.REGEX, "ab"))

    assert constraint.failure([98]) == "the grammar allows no token after 1 of output"
    monkeypatch.setattr(grammar.Matcher, "state", lambda *_: pytest.fail("it was asked"))

    assert not constraint.mask([98, 97]).any()


def test_compiled_grammars_are_shared_within_a_salt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Counted(monkeypatch, 150)
    for salt in ("one", "other", "one", "other"):
        compiler.constraint(LOOKS_BACK, salt=salt)

    assert 2 == compiler.num_compiled


@settings(max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_text_does_more_than_be_refused(data: st.DataObject) -> None:
    """Order matters: one compiler sees them all, valid or not, and goes on working."""
    kind = data.draw(st.sampled_from(GrammarKind))
    piece = st.sampled_from(
        ["start", ":", " ", "\n", "a", '"', "{", "}", "[", "]", "(", ")", "|", "*", "+", "?", "\\",
         "/", "1", ",", "%json", "$ref", "#", '"type"', '"a"', "é", "\x00", "\ud800", "<", ">"]
    )  # fmt: skip
    schema = st.recursive(
        st.sampled_from([True, {"type": "string"}, {"enum": [1, "a", None]}, {"$ref": "#"}, {}]),
        lambda inner: st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["object", "array", "number", "x"]),
                "properties": st.dictionaries(st.text(max_size=3), inner, max_size=3),
                "items": inner,
                "anyOf": st.lists(inner, max_size=3),
                "allOf": st.lists(inner, max_size=2),
                "required": st.lists(st.text(max_size=3), max_size=2),
                "minimum": st.integers(-(2**70), 2**70),
                "pattern": st.text("ab(|)*\\[", max_size=5),
                "maxLength": st.integers(-1, 2**40),
            },
        ),
        max_leaves=6,
    )
    texts = [st.lists(piece, max_size=12).map("".join)]
    if kind is GrammarKind.JSON_SCHEMA:
        texts.append(schema.map(json.dumps))
    text = "" if kind is GrammarKind.JSON_OBJECT else data.draw(st.one_of(texts))
    message = complaint(lambda: ASCII_COMPILER.constraint(GrammarSpec(kind, text)))
    if message is None:
        constraint = ASCII_COMPILER.constraint(GrammarSpec(kind, text))
        # Some match nothing, such as a schema that is only itself: then it says so.
        assert constraint.mask([]).any() or constraint.failure([]) is not None
    else:
        assert message.startswith("grammar: ")
        assert "\n" not in message
    valid = GrammarSpec(GrammarKind.REGEX, "ab")

    assert 2 == ASCII_COMPILER.constraint(valid).num_valid([], list(b"ab"))


def test_threads_may_compile_and_ask_at_once() -> None:
    """Each with a constraint of its own; copies of one grammar are at work in all of them."""
    spec = GrammarSpec(GrammarKind.REGEX, "(ab|ba)*c?")
    outputs = [[], [0], [0, 1], [4], [4, 0], [1, 0], [2], [4, 4, 2]]
    wanted = [expected("(ab|ba)*c?", output) for output in outputs]

    def ask(seed: int) -> bool:
        order = np.random.default_rng(seed)
        for _ in range(40):
            constraint = COMPILER.constraint(spec)
            COMPILER.constraint(GrammarSpec(GrammarKind.REGEX, "ab" * (1 + seed) + "c?"))
            for place in order.permutation(len(outputs)).tolist():
                if wanted[place] != set(np.flatnonzero(constraint.mask(outputs[place])).tolist()):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert [True] * 4 == list(pool.map(ask, range(4)))
