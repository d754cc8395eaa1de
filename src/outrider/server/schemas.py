"""What clients may send: every field with its range, and nothing that would be ignored.

Owns the shape of requests; what a field does is :mod:`.translate`'s business. Validation is strict
(no "1" for 1, no true for 1) and refuses unknown fields. A few fields of OpenAI's have no meaning
here and cannot change an answer; those are listed in ``WITHOUT_EFFECT`` and in the documentation.
Others are accepted only with the value that describes what we do anyway. The OpenAPI document is
made from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_MESSAGES = 2048
MAX_TOOLS = 64
NO_LIMIT = 2**31 - 1

# Accepted so that unchanged clients work; they say who asks or where to keep it, not what to write.
WITHOUT_EFFECT = ("user", "safety_identifier", "metadata", "prompt_cache_key")

Text = Annotated[str, Field(max_length=1 << 20)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """The base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """What a stream carries beside its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="Every event carries the tokens so far, over all choices."
    )
    include_obfuscation: bool | None = Field(
        None, description="Pad every event to a multiple of 256 bytes."
    )


class Speculative(Strict):
    """How much may be drafted for this request; the text does not depend on it."""

    enabled: bool = True
    max_draft_tokens: int | None = Field(None, ge=0, le=1024)


class Sampling(Strict):
    """The fields that chat and text completions share."""

    model: str = Field(min_length=1, max_length=256)
    temperature: float | None = Field(None, ge=0, le=2, description="Without it: 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=NO_LIMIT, description="0 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    max_tokens: int | None = Field(None, ge=1, le=NO_LIMIT)
    min_tokens: int | None = Field(None, ge=0, le=NO_LIMIT)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: Speculative | None = None
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (biases or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise ValueError(f"{token[:40]!r} is not a token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias {bias:g} of token {token} is outside -100 .. 100")
        return biases

    @model_validator(mode="after")
    def _check_stream_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream: true")
        return self


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]


class CalledFunction(Strict):
    """Which function a message called, and with what."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    arguments: Text


class ToolCall(Strict):
    """A call in the history of a conversation."""

    id: str = Field(max_length=128)
    type: Literal["function"]
    function: CalledFunction


class PlainMessage(Strict):
    """What somebody but the model said."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Text | None = None


class AssistantMessage(Strict):
    """What the model said; the fields that its answers have, but only as empty as we send them."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("an assistant's message has content, tool_calls or both")
        return self


class ToolMessage(Strict):
    """What a function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=128)
    name: Text | None = None


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Without effect: arguments always follow the schema."
    )


class Tool(Strict):
    """One entry of ``tools``."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The function of a forced call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")


class NamedTool(Strict):
    """Forces a call of this function."""

    type: Literal["function"]
    function: FunctionName


class PlainFormat(Strict):
    """No constraint, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchema(Strict):
    """A schema with its name."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Without effect: the answer always follows.")


class SchemaFormat(Strict):
    """The answer follows a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class Prediction(Strict):
    """Text that much of the answer is expected to repeat."""

    type: Literal["content"]
    content: Content


class ChatRequest(Sampling):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=NO_LIMIT, description="Takes precedence over max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # Accepted only as what this server does anyway:
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have one name")
        choice = self.tool_choice
        if not names and (choice not in (None, "none") or self.parallel_tool_calls is not None):
            field = "parallel_tool_calls" if choice in (None, "none") else "tool_choice"
            raise ValueError(f"{field}: needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(
                f"tool_choice: {choice.function.name!r} is not one of {', '.join(names)}"
            )
        is_text = self.response_format is None or self.response_format.type == "text"
        if names and choice != "none" and not is_text:
            raise ValueError("response_format: cannot be combined with tools; choose one")
        return self


Ids = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20)]


class CompletionRequest(Sampling):
    """The body of ``/v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError(
                "echo: the prompt has no log probabilities; leave echo or logprobs out"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: answers are not ranked; leave it out, or set it to n")
        return self


class TokenizeRequest(Strict):
    """The body of ``/tokenize``: a text or a conversation."""

    model: str | None = Field(None, min_length=1, max_length=256)
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """The body of ``/detokenize``."""

    model: str | None = Field(None, min_length=1, max_length=256)
    tokens: list[TokenId] = Field(max_length=1 << 20)
