"""Chat templates: Jinja from a stranger, rendered in a sandbox with bounds on work and output.

Owns how a conversation becomes one string; what in that string may be a control token is
:mod:`.tokenizer`'s business. Templates see what transformers' templates see: the same environment
options, ``raise_exception``, ``strftime_now``, ``tojson``, loop controls and ``{% generation %}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from outrider.errors import CheckpointError, PromptError

MAX_TEXT = 2**24  # characters of any string a template builds, and of its output
MAX_STEPS = 200_000  # turns of loops and calls of macros together
MAX_REPEAT = 2**20


class ChatTemplate:
    """One compiled template; ``variables`` are the special tokens it may write by name."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile ``source``.

        Raises:
            CheckpointError: it is not a valid template.
        """
        self._variables = dict(variables)
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"chat template is not valid: {_one_line(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The conversation as one string.

        Raises:
            PromptError: the template refuses these messages, fails on them, or does not end.
        """
        self._environment.steps_left = MAX_STEPS
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                **self._variables,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                _bounded(num_chars)
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template refuses: {_one_line(error)}") from None
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            kind = type(error).__name__
            raise PromptError(f"the chat template fails: {kind}: {_one_line(error)}") from None
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox; counts steps and refuses to grow a string past bounds."""

    intercepted_binops = frozenset(["+", "*", "**"])
    steps_left = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(Parser(self, source, name, filename).parse())

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic that could build something huge, checked before it is done."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _bounded(len(left) + len(right))
        elif operator != "+":
            for side in (left, right):
                if isinstance(side, int | float) and abs(side) > MAX_REPEAT:
                    raise SecurityError(f"computes {operator} with a huge number")
                if isinstance(side, str | list | tuple) and len(side) > MAX_REPEAT // 16:
                    raise SecurityError(f"computes {operator} with a huge value")
            if operator == "**" and not -64 <= right <= 64:
                raise SecurityError("computes ** with a huge number")
        return super().call_binop(context, operator, left, right)

    def count_step(self) -> None:
        """Called at every turn of a loop and every call of a macro."""
        self.steps_left -= 1
        if self.steps_left < 0:
            raise SecurityError(f"takes more than {MAX_STEPS} steps")

    def join_bounded(self, *parts: Any) -> str:
        """The ``~`` operator."""
        texts = [str(part) for part in parts]
        _bounded(sum(map(len, texts)))
        return "".join(texts)


class _Bounds(NodeTransformer):
    """Puts the bounds into the template: a step count in every body, a check into every ``~``."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Rewrite ``node`` after everything inside it."""
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.Concat):
            return _environment_call("join_bounded", node.nodes, node.lineno)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            call = _environment_call("count_step", [], node.lineno)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node


def _environment_call(method: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded(num_chars: int) -> None:
    if num_chars > MAX_TEXT:
        raise SecurityError(f"writes more than {MAX_TEXT} characters")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
