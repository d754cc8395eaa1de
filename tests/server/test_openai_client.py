"""OpenAI's own Python client, unchanged, against a live server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from outrider import LLM, SamplingParams
from tests.server.live import NAME, LiveServer, chat_body

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ford", "bridge"]},
        "is_safe": {"type": "boolean"},
    },
    "required": ["kind", "is_safe"],
    "additionalProperties": False,
}


def tool(name: str, schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def create(client: openai.OpenAI, text: str = "The ford and the bridge", **fields: Any) -> Any:
    extra = {
        name: fields.pop(name)
        for name in ("speculative", "ignore_eos", "top_k", "min_tokens")
        if name in fields
    }
    body = chat_body(text, **fields)
    return client.chat.completions.create(**body, extra_body=extra or None)


def text_of(stream: Any) -> tuple[str, list[Any]]:
    chunks = list(stream)
    return "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices
    ), chunks


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [NAME] == [model.id for model in client.models.list()]
    assert NAME == client.models.retrieve(NAME).id
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert "model_not_found" == caught.value.code


def test_a_chat_answer_is_what_the_model_says_in_process(
    client: openai.OpenAI, own_llm: LLM
) -> None:
    messages = [{"role": "user", "content": "The ford and the bridge"}]
    expected = own_llm.chat(messages, SamplingParams(max_tokens=12))
    answer = create(client)

    assert expected.text == answer.choices[0].message.content
    assert expected.finish_reason.value == answer.choices[0].finish_reason
    assert expected.usage.prompt_tokens == answer.usage.prompt_tokens
    assert expected.usage.completion_tokens == answer.usage.completion_tokens
    assert "assistant" == answer.choices[0].message.role


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_pieces_of_a_stream_add_up_to_the_whole_answer(
    client: openai.OpenAI, temperature: float
) -> None:
    fields = {"temperature": temperature, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    whole = create(client, **fields)
    text, chunks = text_of(
        create(client, **fields, stream=True, stream_options={"include_usage": True})
    )

    assert whole.choices[0].message.content == text
    assert {chunks[0].id} == {chunk.id for chunk in chunks}
    first = chunks[0].choices[0].delta
    assert ("assistant", "") == (first.role, first.content)
    assert [None] * (len(chunks) - 1) == [chunk.usage for chunk in chunks[:-1]]
    assert [] == chunks[-1].choices
    # The second of them may start on the first one's prompt; all other counts are the same.
    usages = [
        usage.model_copy(update={"prompt_tokens_details": None})
        for usage in (whole.usage, chunks[-1].usage)
    ]
    assert usages[0] == usages[1]
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason


def test_a_seed_gives_its_text_whether_drafted_or_not(client: openai.OpenAI) -> None:
    fields = {"temperature": 0.7, "top_k": 2, "seed": 5, "max_tokens": 150, "ignore_eos": True}
    text = "around it and around it and around it"
    drafted = create(client, text, **fields)
    plain = create(client, text, **fields, speculative={"enabled": False})
    narrow = create(client, text, **fields, speculative={"max_draft_tokens": 1})
    other = create(client, text, **{**fields, "seed": 6})
    counts = drafted.speculative

    assert plain.choices[0].message.content == drafted.choices[0].message.content
    assert plain.choices[0].message.content == narrow.choices[0].message.content
    assert plain.choices[0].message.content != other.choices[0].message.content
    assert 0 < counts["accepted"] < counts["drafted"]
    assert counts["steps"] < plain.speculative["steps"] == plain.usage.completion_tokens
    assert 0 == plain.speculative["drafted"]
    assert 0 < narrow.speculative["drafted"] <= narrow.speculative["steps"]
    assert round(1 + counts["accepted"] / counts["steps"], 4) == counts["acceptance_length"]


def test_each_of_n_answers_is_that_of_its_choice(client: openai.OpenAI, own_llm: LLM) -> None:
    fields = {"temperature": 1, "seed": 7, "n": 3}
    answer = create(client, **fields)
    messages = [{"role": "user", "content": "The ford and the bridge"}]
    expected = [
        own_llm.chat(
            messages, SamplingParams(temperature=1, seed=7, choice=choice, max_tokens=12)
        ).text
        for choice in range(3)
    ]
    chunks = list(create(client, **fields, stream=True))
    streamed = [
        "".join(
            choice.delta.content or ""
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == index
        )
        for index in range(3)
    ]

    assert expected == [choice.message.content for choice in answer.choices]
    assert expected == streamed
    assert 3 == len(set(expected))
    assert 3 == sum(chunk.choices[0].finish_reason is not None for chunk in chunks)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": 11}
    whole = create(client, **fields).choices[0].message.content
    stop = whole[len(whole) // 2 :][:2]
    expected = whole[: whole.index(stop)]
    answer = create(client, **fields, stop=[stop])
    streamed, _ = text_of(create(client, **fields, stop=stop, stream=True))

    assert expected == answer.choices[0].message.content
    assert expected == streamed
    assert "stop" == answer.choices[0].finish_reason


def test_max_completion_tokens_goes_before_max_tokens(client: openai.OpenAI) -> None:
    answer = create(client, max_tokens=50, max_completion_tokens=3, ignore_eos=True)

    assert 3 == answer.usage.completion_tokens
    assert "length" == answer.choices[0].finish_reason


def test_log_probabilities_are_the_same_streamed_and_drafted_or_not(
    client: openai.OpenAI,
) -> None:
    fields = {
        "max_tokens": 60,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    answer = create(client, "around it and around it and", **fields)
    entries = answer.choices[0].logprobs.content
    plain = create(client, "around it and around it and", **fields, speculative={"enabled": False})
    chunks = list(create(client, "around it and around it and", **fields, stream=True))
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]

    assert entries == plain.choices[0].logprobs.content == streamed
    assert answer.speculative["accepted"] > 0
    assert answer.usage.completion_tokens == len(entries)
    data = bytes(byte for entry in entries for byte in entry.bytes)
    assert answer.choices[0].message.content == data.decode("utf-8", "replace")
    for entry in entries:
        assert 2 == len(entry.top_logprobs)
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    # Greedy: what was written is the likeliest.
    assert entries[0].logprob == entries[0].top_logprobs[0].logprob


@pytest.mark.parametrize("is_drafted", [True, False])
def test_an_answer_follows_its_json_schema(client: openai.OpenAI, is_drafted: bool) -> None:
    fields = {
        "temperature": 1,
        "seed": 1,
        "max_tokens": 200,
        "speculative": {"enabled": is_drafted},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
        },
    }
    answer = create(client, **fields)
    found = json.loads(answer.choices[0].message.content)
    streamed, _ = text_of(create(client, **fields, stream=True))

    assert {"kind", "is_safe"} == set(found)
    assert found["kind"] in ("ford", "bridge")
    assert isinstance(found["is_safe"], bool)
    assert "stop" == answer.choices[0].finish_reason
    assert answer.choices[0].message.content == streamed


def test_a_schema_is_parsed_into_a_model_by_the_client(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Place(BaseModel):
        is_safe: bool
        is_near: bool

    answer = client.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "Is it safe?"}],
        response_format=Place,
        max_tokens=200,
    )

    assert isinstance(answer.choices[0].message.parsed, Place)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "ask"}}])
def test_a_forced_call_has_arguments_that_follow_the_schema(
    client: openai.OpenAI, choice: Any
) -> None:
    fields = {
        "temperature": 1,
        "seed": 2,
        "max_tokens": 300,
        "tools": [tool("ask"), tool("tell")],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    answer = create(client, **fields).choices[0]
    (call,) = answer.message.tool_calls
    deltas = [
        delta
        for chunk in create(client, **fields, stream=True)
        for choice in chunk.choices
        for delta in choice.delta.tool_calls or ()
    ]

    assert "tool_calls" == answer.finish_reason
    assert answer.message.content is None
    assert call.function.name in (("ask", "tell") if choice == "required" else ("ask",))
    assert set(SCHEMA["properties"]) == set(json.loads(call.function.arguments))
    assert [(0, call.function)] == [
        (delta.index, type(call.function)(**delta.function.model_dump())) for delta in deltas
    ]


def test_a_conversation_goes_on_behind_a_call(client: openai.OpenAI) -> None:
    first = create(
        client,
        temperature=1,
        seed=2,
        max_tokens=300,
        tools=[tool("ask")],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    message = first.choices[0].message
    messages = [
        {"role": "user", "content": "Which way?"},
        message.model_dump(),
        {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "name": "ask",  # other clients than OpenAI's own send it
            "content": "over the bridge",
        },
    ]
    body = {**chat_body(), "messages": messages}
    answer = client.chat.completions.create(**body, tools=[tool("ask")], tool_choice="none")

    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_a_model_that_may_call_may_also_just_talk(client: openai.OpenAI) -> None:
    """Twenty seeds: a random model rarely begins with a call, and its text is not cut."""
    for seed in range(20):
        answer = create(client, temperature=1, seed=seed, tools=[tool("ask")], max_tokens=8)
        message = answer.choices[0].message
        assert (message.content is None) == bool(message.tool_calls)


def test_a_prediction_is_counted_and_does_not_change_the_text(client: openai.OpenAI) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": 4}
    plain = create(client, **fields, speculative={"enabled": False})
    text = plain.choices[0].message.content
    # Right at first, then something else: both counts must move.
    content = text[: len(text) // 2] + "no, this is not what comes"
    answer = create(client, **fields, prediction={"type": "content", "content": content})
    details = answer.usage.completion_tokens_details

    assert text == answer.choices[0].message.content
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens > 0
    assert 0 == plain.usage.completion_tokens_details.accepted_prediction_tokens


def test_text_completions_take_texts_and_ids_and_echo(client: openai.OpenAI, own_llm: LLM) -> None:
    prompts = ["A river does not", "The outrider left"]
    params = SamplingParams(max_tokens=10)
    expected = [each.text for each in own_llm.generate(prompts, params)]
    ids = [own_llm.tokenizer.encode(prompt) for prompt in prompts]

    def texts(prompt: Any, **more: Any) -> list[str]:
        answer = client.completions.create(
            model=NAME, prompt=prompt, max_tokens=10, temperature=0, **more
        )
        return [choice.text for choice in answer.choices]

    assert expected == texts(prompts)
    assert expected == texts(ids)
    assert expected[:1] == texts(prompts[0])
    assert expected[:1] == texts(ids[0])
    assert [prompts[0] + expected[0]] == texts(prompts[0], echo=True)
    stream = client.completions.create(
        model=NAME, prompt=prompts[0], max_tokens=10, temperature=0, stream=True, echo=True
    )
    assert prompts[0] + expected[0] == "".join(chunk.choices[0].text for chunk in stream)


def test_text_completions_have_the_older_log_probabilities(client: openai.OpenAI) -> None:
    def create_text(**more: Any) -> Any:
        return client.completions.create(
            model=NAME,
            prompt="A river does not",
            max_tokens=12,
            temperature=0,
            logprobs=2,
            extra_body={"ignore_eos": True},
            **more,
        )

    choice = create_text().choices[0]
    streamed = [chunk.choices[0].logprobs for chunk in create_text(stream=True)]

    assert 12 == len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    assert 12 == len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset)
    assert 0 == choice.logprobs.text_offset[0]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [value for part in streamed for value in getattr(part, name)]
        assert getattr(choice.logprobs, name) == pieces


def test_a_bias_forces_a_token(client: openai.OpenAI, own_llm: LLM) -> None:
    token = own_llm.tokenizer.encode("e")[0]
    answer = create(client, logit_bias={str(token): 100}, max_tokens=4)

    assert "eeee" == answer.choices[0].message.content


def test_a_client_fault_is_a_bad_request_with_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, temperature=9)
    assert "temperature" == caught.value.param
    with pytest.raises(openai.NotFoundError):
        create(client, model="other")
