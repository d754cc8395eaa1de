from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.records import ChunkRecord, SpeculativeCounts, TokenSource
from outrider.bench.sse import MAX_EVENT_BYTES, AnswerReader, EventParser, StreamError


def read(*rows: dict[str, Any] | str) -> AnswerReader:
    """An answer whose i-th event arrived at i seconds."""
    reader = AnswerReader()
    for at, row in enumerate(rows):
        reader.feed(row.encode() if isinstance(row, str) else json.dumps(row).encode(), float(at))
    return reader


def said(text: str, total: int | None = None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}, **more}]}
    return row if total is None else {**row, "usage": usage(total)}


def usage(total: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": total}


@given(st.lists(st.integers(1, 9), max_size=20))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]):
    stream = (
        b': hello\r\n\r\ndata: {"a":1}\r\n\r\nevent: x\ndata: one\ndata:two\n\n\n\ndata: [DONE]\n\n'
    )
    parser, events, at = EventParser(), [], 0
    for cut in [*cuts, len(stream)]:
        events += parser.feed(stream[at : at + cut])
        at += cut

    assert [b'{"a":1}', b"one\ntwo", b"[DONE]"] == events


def test_an_event_without_an_end_is_not_read_into_memory_for_ever():
    parser = EventParser()

    with pytest.raises(StreamError, match="larger than 16 MiB"):
        parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES)


def test_running_usage_gives_every_chunk_its_own_tokens():
    reader = read(said("", 0), said("Hello", 2), said(" all", 3), said("", 3), "[DONE]")
    chunks, source = reader.chunks()

    assert TokenSource.CONTINUOUS_USAGE == source
    assert (ChunkRecord(1.0, 2, 5), ChunkRecord(2.0, 1, 4)) == chunks
    assert ("Hello all", 7, 3, True) == (
        reader.text,
        reader.prompt_tokens,
        reader.completion_tokens,
        reader.is_done,
    )


def test_a_counted_token_without_text_is_a_chunk_of_its_own():
    """The end-of-sequence token: without it the chunks would disagree with the usage."""
    chunks, _ = read(said("Hi", 1), said("", 2, finish_reason="stop"), "[DONE]").chunks()

    assert (ChunkRecord(0.0, 1, 2), ChunkRecord(1.0, 1, 0)) == chunks


def test_token_ids_name_an_answer_whichever_chunks_they_come_in():
    """vLLM sends each chunk's own, our server all of them at the end."""
    each = read(said("a", token_ids=[5, 6]), said("b", token_ids=[7]), "[DONE]")
    at_end = read(said("a"), said("b", token_ids=[5, 6, 7]), "[DONE]")
    other = read(said("ab", token_ids=[5, 7, 6]), "[DONE]")

    assert each.token_hash == at_end.token_hash != other.token_hash
    assert read(said("ab"), "[DONE]").token_hash is None


def test_usage_at_the_end_counts_the_answer_but_not_its_chunks():
    reader = read(said("Hi"), said(" all"), {"choices": [], "usage": usage(5)}, "[DONE]")
    chunks, source = reader.chunks()

    assert TokenSource.USAGE == source
    assert (ChunkRecord(0.0, None, 2), ChunkRecord(1.0, None, 4)) == chunks
    assert 5 == reader.completion_tokens


def test_a_running_total_that_falls_counts_nothing():
    chunks, source = read(said("a", 3), said("b", 2), "[DONE]").chunks()

    assert TokenSource.USAGE == source
    assert [None, None] == [chunk.num_tokens for chunk in chunks]


@pytest.mark.parametrize(
    ("first", "second", "source"),
    [
        ({"token_ids": [4, 5]}, {"token_ids": [6]}, TokenSource.TOKEN_IDS),
        (
            {"logprobs": {"content": [{}, {}]}},
            {"logprobs": {"content": [{}]}},
            TokenSource.LOGPROBS,
        ),
        (
            {"logprobs": {"tokens": ["a", "b"]}},
            {"logprobs": {"tokens": ["c"]}},
            TokenSource.LOGPROBS,
        ),
    ],
)
def test_ids_or_logprobs_count_where_usage_does_not(first, second, source):
    chunks, found = read(said("ab", **first), said("c", **second), "[DONE]").chunks()

    assert source == found
    assert [2, 1] == [chunk.num_tokens for chunk in chunks]


def test_counts_that_only_some_chunks_have_count_nothing():
    chunks, source = read(said("ab", token_ids=[1, 2]), said("c"), "[DONE]").chunks()

    assert TokenSource.UNKNOWN == source
    assert [None, None] == [chunk.num_tokens for chunk in chunks]


def test_everything_the_model_wrote_is_text():
    reader = read(
        {"choices": [{"delta": {"reasoning_content": "Hm. ", "reasoning": "Hm. "}}]},
        {"choices": [{"delta": {"content": "Yes"}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"a":'}}]}}]},
        {"choices": [{"text": " and more"}]},
    )

    assert 'Hm. Yes{"a": and more' == reader.text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"speculative": {"drafted": 9, "accepted": 4, "steps": 3, "acceptance_length": 2.3333}},
            SpeculativeCounts(9, 4, 3, 2.3333),
        ),
        (
            {
                "metrics": {
                    "speculative_decoding": {
                        "num_draft_tokens": 9,
                        "num_accepted_tokens": 4,
                        "num_drafts": 3,
                        "accepted_per_position": [3, 1],
                    }
                }
            },
            SpeculativeCounts(9, 4, 3, None, (3, 1)),
        ),
        ({"speculative": {"drafted": -1, "accepted": "4"}}, SpeculativeCounts()),
        ({"speculative": None}, None),
    ],
)
def test_acceptance_is_taken_as_the_server_gives_it(row, expected):
    assert expected == read({"choices": [], **row}).speculative


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ("<html>", "an event is not JSON: '<html>'"),
        ("[1]", "an event is not a JSON object"),
        ('{"error": {"message": "out of memory"}}', "the server reports: out of memory"),
        ('{"choices": ["x"]}', "has a choice that is no object"),
    ],
)
def test_an_event_that_is_no_answer_is_refused_with_its_content(event: str, expected: str):
    with pytest.raises(StreamError, match=expected.replace("[", r"\[")):
        read(event)


def test_a_usage_that_is_no_count_is_none():
    reader = read({"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": True}})

    assert (None, None) == (reader.prompt_tokens, reader.completion_tokens)
