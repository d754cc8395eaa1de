"""Function calls: how the model is told of them, kept to them, and read back.

Owns the one notation that is used whatever the model's chat template knows about tools::

    <tool_call>{"name": "area", "arguments": {"width": 2, "height": 3}}</tool_call>

A system message lists the functions; a grammar lets the answer be either text or calls whose
arguments follow the function's schema, and the calls are parsed out of the finished text. In the
history, calls and results are written in the same notation.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import MAX_GRAMMAR_CHARS, GrammarKind, GrammarSpec
from outrider.server.errors import refused
from outrider.server.schemas import NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MIDDLE = '", "arguments": '
_START = '{"name": "'


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the model wrote; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The functions that one request may call, and whether it must.

    ``is_forced``: the answer is a call. ``is_single``: it is no more than one.
    """

    tools: tuple[Tool, ...]
    is_forced: bool
    is_single: bool

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | None,
        parallel: bool | None,
    ) -> ToolPlan | None:
        """What a request asks for; None where no function may be called."""
        if not tools or choice == "none":
            return None
        if isinstance(choice, NamedTool):
            chosen = [tool for tool in tools if tool.function.name == choice.function.name]
            return cls(tuple(chosen), is_forced=True, is_single=True)
        return cls(tuple(tools), is_forced=choice == "required", is_single=parallel is False)

    def instruction(self) -> str:
        """What the model is told, as a system message."""
        listed = "\n".join(
            json.dumps(tool.function.model_dump(exclude_none=True, exclude={"strict"}))
            for tool in self.tools
        )
        must = "Answer with a function call" if self.is_forced else "You may call a function"
        example = f"{OPEN}{_START}NAME{_MIDDLE}{{...}}}}{CLOSE}"
        return f"{must}. Write each call as {example}\nFunctions:\n{listed}"

    def grammar(self) -> GrammarSpec:
        """What the answer may be: text to its end, unless it starts like a call.

        Raises:
            ApiError: a schema is nested too deeply, or has numbers that JSON cannot carry; or all
                of them together are too long.
        """
        tags = [
            {
                "begin": f"{OPEN}{_START}{tool.function.name}{_MIDDLE}",
                "schema": tool.function.parameters or {"type": "object"},
                "end": "}" + CLOSE,
            }
            for tool in self.tools
        ]
        wanted = {"tags": tags, "repeats": not self.is_single, "or_text": not self.is_forced}
        text = _json_text(wanted)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise refused(
                f"tools: the {len(tags)} functions' names and parameters have {len(text)} "
                f"characters; allowed: {MAX_GRAMMAR_CHARS}. Send fewer or shorter ones",
                param="tools",
            )
        return GrammarSpec(GrammarKind.TAGGED_JSON, text)

    def parse(self, text: str) -> tuple[Call, ...]:
        """The calls of a complete answer; none if it is text, or was cut off in a call."""
        calls = []
        rest = text
        while rest:
            start, found, behind = rest.partition(CLOSE)
            if not found or not start.startswith(OPEN):
                return ()
            call = _parse_call(start.removeprefix(OPEN))
            if call is None:
                return ()
            calls.append(call)
            rest = behind
        return tuple(calls)


def is_call_start(text: str) -> bool:
    """Whether text that is still being written could become a call."""
    return OPEN.startswith(text[: len(OPEN)])


def call_text(name: str, arguments: str) -> str:
    """A call of the history, as the model would have written it."""
    return f"{OPEN}{_START}{name}{_MIDDLE}{arguments}}}{CLOSE}"


def result_text(content: str) -> str:
    """What a function returned, as the model sees it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def _parse_call(text: str) -> Call | None:
    """Name and arguments; the arguments word for word, since clients may compare them."""
    name, found, rest = text.removeprefix(_START).partition(_MIDDLE)
    if not text.startswith(_START) or not found or not rest.endswith("}"):
        return None
    arguments = rest.removesuffix("}")
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return Call(name, arguments)


def _json_text(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise refused(
            "tools: a function's parameters are nested too deeply or hold a number that JSON "
            "cannot carry",
            param="tools",
        ) from None
