"""What a client is told of its tokens: in all, from the cache, and chunk by chunk."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from outrider.bench.records import TokenSource
from outrider.bench.sse import AnswerReader, EventParser
from tests.server.live import LiveServer, chat_body

REPEATING = "around it and around it and around it"


def cached(server: LiveServer, text: str, **fields: Any) -> int:
    usage = server.chat(text, **fields).json()["usage"]
    server.wait_until_idle()  # what was reused is counted by then
    return usage["prompt_tokens_details"]["cached_tokens"]


def events(server: LiveServer, path: str = "/v1/chat/completions", **body: Any) -> list[bytes]:
    """The data of a stream's events, ``[DONE]`` excluded."""
    with httpx.stream("POST", server.url + path, json=body, timeout=60, verify=False) as response:
        found = EventParser().feed(response.read())
    assert b"[DONE]" == found.pop()
    return found


def running(server: LiveServer, options: dict[str, bool], **fields: Any) -> list[dict[str, Any]]:
    fields = {"max_tokens": 60, "ignore_eos": True, "stream": True, **fields}
    body = chat_body(REPEATING, stream_options=options, **fields)
    return [json.loads(data) for data in events(server, **body)]


def test_prompt_tokens_that_an_earlier_request_left_are_counted(server: LiveServer) -> None:
    text = "a text that no other test sends: " + "seven rivers, " * 8
    before = server.stats().prefix_hit_tokens
    first = cached(server, text)
    second = cached(server, text)
    last = running(server, {"include_usage": True}, messages=chat_body(text)["messages"])[-1]
    server.wait_until_idle()

    assert first < 50 < second < len(text) + 100
    assert second == last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first + 2 * second == server.stats().prefix_hit_tokens - before


def test_answers_of_one_request_do_not_count_each_others_prompt(server: LiveServer) -> None:
    text = "another text that no other test sends: " + "nine rivers, " * 8

    assert cached(server, text, n=3) < 50 < cached(server, text, n=3)


@pytest.mark.parametrize("includes_usage", [True, False])
def test_every_chunk_says_how_many_tokens_there_are_so_far(
    server: LiveServer, includes_usage: bool
) -> None:
    options = {"continuous_usage_stats": True, "include_usage": includes_usage}
    found = running(server, options, logprobs=True)
    totals = [event["usage"]["completion_tokens"] for event in found]
    entries = [
        sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in event["choices"])
        for event in found
    ]

    assert [sum(entries[: place + 1]) for place in range(len(entries))] == totals
    assert max(entries) > 1  # a step that accepted drafts
    assert 60 == totals[-1]
    for event in found:
        usage = event["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert includes_usage == (found[-1]["choices"] == [])
    assert includes_usage == ("completion_tokens_details" in found[-1]["usage"])


def test_tokens_so_far_are_those_of_all_choices(server: LiveServer) -> None:
    found = running(server, {"continuous_usage_stats": True}, n=3, temperature=1, seed=1)
    totals = [event["usage"]["completion_tokens"] for event in found]

    assert sorted(totals) == totals
    assert (0, 180) == (totals[0], totals[-1])


def test_usage_comes_only_where_it_is_asked_for(server: LiveServer) -> None:
    assert {False} == {"usage" in event for event in running(server, {})}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_bench_counts_tokens_by_chunk(server: LiveServer, path: str) -> None:
    body = chat_body(
        REPEATING,
        stream=True,
        max_tokens=60,
        ignore_eos=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    if path == "/v1/completions":
        del body["messages"]
        body["prompt"] = REPEATING
    reader = AnswerReader()
    for place, event in enumerate(events(server, path, **body)):
        reader.feed(event, float(place))
    chunks, source = reader.chunks()

    assert TokenSource.CONTINUOUS_USAGE == source
    assert 60 == reader.completion_tokens == sum(chunk.num_tokens or 0 for chunk in chunks)
