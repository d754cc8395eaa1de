"""From a request's fields to what the engine understands: prompts, parameters, expectations.

Owns the meaning of every field of :mod:`.schemas`. Templating, tokenising and compiling a grammar
take time, so all of it runs on a worker thread, never on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import Accept, GrammarKind, GrammarSpec, SamplingParams
from outrider.errors import ParameterError
from outrider.llm import LLM
from outrider.models.loading import Tokenizer
from outrider.request import Request
from outrider.server import tools
from outrider.server.errors import refused
from outrider.server.schemas import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Content,
    Message,
    ResponseFormat,
    Sampling,
    SchemaFormat,
    ToolMessage,
)
from outrider.server.tools import ToolPlan

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for text completions
UNBOUNDED = 2**31 - 1  # the engine stops at the end of the context


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine's requests for one HTTP request: ``n`` for each prompt, prompt by prompt."""

    requests: tuple[Request, ...]
    num_choices: int
    prompts: tuple[tuple[int, ...], ...]
    tool_plan: ToolPlan | None = None


def prepare_chat(llm: LLM, body: ChatRequest, salt: str) -> Prepared:
    """A conversation as requests.

    Raises:
        OutriderError: the prompt or a parameter is refused.
        ApiError: two fields cannot be combined.
    """
    plan = ToolPlan.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    field = "response_format" if plan is None else "tools"
    with _grammar_of(field):
        grammar = _grammar(body.response_format) if plan is None else plan.grammar()
    prompt_ids = llm.tokenizer.encode_chat(template_messages(body.messages, plan))
    limit = body.max_completion_tokens or body.max_tokens or UNBOUNDED
    params = replace(
        _params(body, limit),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    predicted: list[int] = []
    if body.prediction is not None:
        if body.speculative is not None and not body.speculative.enabled:
            raise refused(
                "prediction: is a source of drafts, but speculative.enabled is false; drop one",
                param="prediction",
            )
        predicted = llm.tokenizer.encode(
            joined(body.prediction.content), add_special_tokens=False, allow_special=False
        )
    with _grammar_of(field):
        requests = _requests(llm, body, [prompt_ids], params, salt=salt, prediction_ids=predicted)
    return Prepared(requests, body.n or 1, (tuple(prompt_ids),), plan)


@contextmanager
def _grammar_of(field: str) -> Iterator[None]:
    """A grammar that is refused, by the name of the field that asked for it."""
    try:
        yield
    except ParameterError as problem:
        name, _, rest = str(problem).partition(":")
        if name != "grammar":
            raise
        raise refused(f"{field}:{rest}", param=field) from None


def prepare_completion(llm: LLM, body: CompletionRequest, salt: str, max_choices: int) -> Prepared:
    """Prompts as requests.

    Raises:
        OutriderError: a prompt or a parameter is refused.
        ApiError: too many answers at once.
    """
    prompts = _prompts(llm.tokenizer, body.prompt)
    if len(prompts) * (body.n or 1) > max_choices:
        raise refused(
            f"prompt: {len(prompts)} prompts times n {body.n or 1} is more than {max_choices} "
            "answers; ask in several requests",
            param="prompt",
        )
    params = replace(
        _params(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS), logprobs=body.logprobs
    )
    requests = _requests(llm, body, prompts, params, salt=salt)
    return Prepared(requests, body.n or 1, tuple(tuple(ids) for ids in prompts))


def template_messages(messages: Sequence[Message], plan: ToolPlan | None) -> list[dict[str, Any]]:
    """The conversation as chat templates know it: roles with text.

    Calls and results become text, since most templates have no place for them.
    """
    written = [_template_message(message) for message in messages]
    if plan is None:
        return written
    if written[0]["role"] in ("system", "developer"):
        written[0]["content"] += "\n\n" + plan.instruction()
        return written
    return [{"role": "system", "content": plan.instruction()}, *written]


def joined(content: Content | None) -> str:
    """The text of a message, which may come in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _template_message(message: Message) -> dict[str, Any]:
    role: str = message.role
    content = joined(message.content)
    if isinstance(message, ToolMessage):
        role, content = "user", tools.result_text(content)
    if isinstance(message, AssistantMessage):
        calls = [
            tools.call_text(call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        ]
        content = "\n".join([content, *calls] if content else calls)
    written: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        written["name"] = message.name
    return written


def _params(body: Sampling, max_tokens: int) -> SamplingParams:
    """The fields that chat and text completions share."""
    stop = body.stop if body.stop is not None else ()
    given: dict[str, Any] = {
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "max_draft_tokens": body.speculative.max_draft_tokens if body.speculative else None,
    }
    return SamplingParams(
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        max_tokens=max_tokens,
        seed=None if body.seed is None else body.seed % 2**64,  # OpenAI's seeds are signed
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        accept=Accept.COUPLED,
        **{name: value for name, value in given.items() if value is not None},
    )


def _grammar(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None or wanted.type == "text":
        return None
    if not isinstance(wanted, SchemaFormat):
        return GrammarSpec(GrammarKind.JSON_OBJECT)
    try:
        schema = {} if wanted.json_schema.schema_ is None else wanted.json_schema.schema_
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as problem:
        raise refused(
            f"response_format: the schema cannot be written as JSON: {problem}",
            param="response_format",
        ) from None
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)


def _prompts(
    tokenizer: Tokenizer, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
) -> list[list[int]]:
    """The prompts of a text completion as token ids."""
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt, allow_special=False)]
    if isinstance(prompt[0], int):
        return [[int(token) for token in prompt]]  # type: ignore[arg-type]  # all are
    return [
        tokenizer.encode(item, allow_special=False) if isinstance(item, str) else list(item)  # type: ignore[arg-type]
        for item in prompt
    ]


def _requests(
    llm: LLM,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    salt: str,
    prediction_ids: Sequence[int] = (),
) -> tuple[Request, ...]:
    speculates = body.speculative is None or body.speculative.enabled
    return tuple(
        llm.engine.new_request(
            ids,
            replace(params, choice=choice),
            speculates=speculates,
            salt=salt,
            prediction_ids=prediction_ids,
        )
        for ids in prompts
        for choice in range(body.n or 1)
    )
