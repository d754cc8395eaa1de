"""How a grammar is written down: every kind brought to the one notation that is compiled.

Owns what can be checked before a compiler sees a grammar, above all its size: the compiler is
native code that recurses over rules and references without looking at its stack, and takes
quadratic time over some expressions. Below :mod:`outrider.grammar`, which compiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.config import GrammarKind, GrammarSpec
from outrider.errors import ParameterError

# Within these limits compiling needs less than half of a common stack of 8 MiB, and at most about a
# second.
MAX_EXPRESSION_CHARS = 4096  # of a regex, of a Lark grammar, of all patterns in a schema together
MAX_DEPTH = 64  # brackets inside brackets
MAX_REFERENCE_DEPTH = 512  # the same over a schema and all that it refers to
MAX_CHOICES = 4096

# Any white space may stand between a JSON text's parts, but a small model must not get lost in it.
_JSON_SPACE = r"[ \n\r\t]{1,16}"


def as_lark(spec: GrammarSpec) -> str:
    """The grammar in Lark's notation, as llguidance reads it.

    The text of ``tagged_json`` is ``{"tags": [{"begin": ..., "schema": ..., "end": ...}, ...],
    "repeats": ..., "or_text": ...}``: JSON that follows one of the schemas, between its tags; with
    ``repeats`` once or several times, with ``or_text`` or else any text that does not start with
    "<", white space aside.

    Raises:
        ParameterError: it is no JSON where it should be, or beyond a limit.
    """
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema_as_lark(_checked_schema(spec.text))
        case GrammarKind.JSON_OBJECT:
            return _schema_as_lark({"type": "object"})
        case GrammarKind.CHOICE:
            return "start: " + " | ".join(json.dumps(text) for text in _choices(spec.text)) + "\n"
        case GrammarKind.REGEX:
            import llguidance

            _check_length("regex", len(spec.text))
            return f"start: /{llguidance.regex_to_lark(spec.text, use_ascii='')}/\n"
        case GrammarKind.LARK:
            _check_length("lark grammar", len(spec.text))
            if "%llguidance" in spec.text:
                raise ParameterError(
                    "grammar: %llguidance sets options of the parser, which are fixed; remove it"
                )
            return spec.text
        case GrammarKind.TAGGED_JSON:
            return _tagged_as_lark(_parsed(wording(spec.kind), spec.text))


def wording(kind: GrammarKind) -> str:
    """What a kind is called in a message; who sends functions has never heard of tagged_json."""
    return "schema in tags" if kind is GrammarKind.TAGGED_JSON else str(kind)


def _tagged_as_lark(wanted: Any) -> str:
    """One rule for each tag; each schema is a root of its own, so that its references hold."""
    _check_tagged(wanted)
    tags = wanted["tags"]
    alternatives = " | ".join(f"tag_{index}" for index in range(len(tags)))
    part = "tag+" if wanted["repeats"] else "tag"
    rules = [f"start: TEXT | {part}" if wanted["or_text"] else f"start: {part}"]
    rules.append(f"tag: {alternatives}")
    if wanted["or_text"]:
        rules.append(r"TEXT: /\s*[^\s<](?s:.*)/")
    num_pattern_chars = 0
    for index, tag in enumerate(tags):
        schema = _checked_schema(json.dumps(tag["schema"]))
        num_pattern_chars += _num_pattern_chars(schema)
        begin, end = json.dumps(tag["begin"]), json.dumps(tag["end"])
        rules.append(f"tag_{index}: {begin} json_{index} {end}")
        rules.append(f"json_{index}: %json {json.dumps(_with_space(schema))}")
    _check_length("schemas' patterns", num_pattern_chars)
    return "\n".join(rules) + "\n"


def _schema_as_lark(schema: dict[str, Any] | bool) -> str:
    return f"start: %json {json.dumps(_with_space(schema))}\n"


def _check_tagged(wanted: Any) -> None:
    """Refuse a ``tagged_json`` of another shape."""
    is_whole = isinstance(wanted, dict) and set(wanted) == {"tags", "repeats", "or_text"}
    tags = wanted["tags"] if is_whole else None
    if not isinstance(tags, list) or not tags:
        raise ParameterError(
            "grammar: a tagged_json has the keys tags (a list that is not empty), repeats and "
            f"or_text, not {_shown(wanted)}"
        )
    for tag in tags:
        is_tag = isinstance(tag, dict) and set(tag) == {"begin", "schema", "end"}
        if not is_tag or not all(
            isinstance(tag[key], str) and tag[key] for key in ("begin", "end")
        ):
            raise ParameterError(
                "grammar: a tag has begin and end, which are not empty, and a schema, not "
                f"{_shown(tag)}"
            )


def _with_space(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """The schema with our bound on white space."""
    if isinstance(schema, bool):
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": _JSON_SPACE}}


def _checked_schema(text: str) -> dict[str, Any] | bool:
    """A JSON schema within our limits; what it says is for the compiler to check."""
    schema = _parsed("json_schema", text)
    if not isinstance(schema, dict | bool):
        raise ParameterError(
            f"grammar: a JSON schema is an object or a boolean, not {_shown(schema)}"
        )
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ParameterError(
            "grammar: x-guidance sets options of the parser, which are fixed; remove it"
        )
    targets: dict[str, int] = {}
    for key, value in _items(schema):
        if key == "$ref" and isinstance(value, str):
            targets[value] = _depth(_target(schema, value))
    _check_length("schema's patterns", _num_pattern_chars(schema))
    depth = _depth(schema) + sum(targets.values())
    if depth > MAX_REFERENCE_DEPTH:
        raise ParameterError(
            f"grammar: the schema and the {len(targets)} places that it refers to are nested "
            f"{depth} deep together; allowed: {MAX_REFERENCE_DEPTH}. Use fewer or flatter ones"
        )
    return schema


def _num_pattern_chars(schema: dict[str, Any] | bool) -> int:
    """Length of all regular expressions in a schema."""
    num_chars = 0
    for key, value in _items(schema):
        if key == "pattern" and isinstance(value, str):
            num_chars += len(value)
        elif key == "patternProperties" and isinstance(value, dict):
            num_chars += sum(map(len, value))
    return num_chars


def _choices(text: str) -> list[str]:
    choices = _parsed("choice", text)
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        what = f"{len(choices)} entries" if isinstance(choices, list) else _shown(choices)
        raise ParameterError(
            f"grammar: a choice is a JSON list of 1 .. {MAX_CHOICES} strings, not {what}"
        )
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ParameterError(f"grammar: choice {_shown(choice)} is not a non-empty string")
    return choices


def _parsed(kind: str, text: str) -> Any:
    """JSON by the book: no NaN, and no deeper than we allow, before anything recurses over it."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
        else:
            in_string = char == '"'
    if deepest > MAX_DEPTH:
        raise ParameterError(
            f"grammar: the {kind} is nested {deepest} deep; allowed: {MAX_DEPTH}. Flatten it"
        )
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError as error:
        raise ParameterError(f"grammar: the {kind} is not JSON: {error}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large")
    return number


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of every object inside."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from _items(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _items(inner)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _target(schema: Any, reference: str) -> Any:
    """What a reference points to; the whole schema where that is not plain to see."""
    value = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or key not in value:
            return schema
        value = value[key]
    return value


def _check_length(what: str, num_chars: int) -> None:
    if num_chars > MAX_EXPRESSION_CHARS:
        raise ParameterError(
            f"grammar: the {what} has {num_chars} characters; allowed: at most "
            f"{MAX_EXPRESSION_CHARS}"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]} ..."
