"""The client against a scripted server on loopback, whose timings and faults are known."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from outrider.bench import client as client_module
from outrider.bench.client import (
    Client,
    Endpoint,
    LoopLag,
    parse_metrics,
    request_body,
)
from outrider.bench.mock_server import Ending, MockChunk, MockReply, MockServer
from outrider.bench.records import Answer, ChunkRecord, SpeculativeCounts, TokenSource
from outrider.bench.selfproof import (
    MAX_GAP_ERROR_P50_S,
    MAX_GAP_ERROR_P99_S,
    judge_client,
    prove_client,
)
from tests.bench_runs import question, sampling

_Result = TypeVar("_Result")

GAP_S = 0.2
# How late a busy machine may wake the client or the server up; far below the gap.
LATE_S = 0.15


def with_server(
    reply: MockReply | Callable[[Mapping[str, Any]], MockReply],
    act: Callable[[Client, MockServer], Awaitable[_Result]],
    *,
    idle_s: float = 20.0,
    pages: dict[str, str] | None = None,
) -> _Result:
    async def run() -> _Result:
        script = reply if callable(reply) else lambda _: reply
        async with MockServer(script, pages=pages or {}) as server, Client(idle_s=idle_s) as client:
            return await act(client, server)

    return asyncio.run(run())


def ask(reply: MockReply, *, running: bool = True, is_chat: bool = True, **more: Any) -> Answer:
    async def act(client: Client, server: MockServer) -> Answer:
        endpoint = Endpoint(url=server.url, model="mock", asks_running_usage=running)
        return await client.ask(endpoint, question(), sampling(is_chat=is_chat), 7)

    return with_server(reply, act, **more)


def test_times_are_those_at_which_the_server_sent():
    """A bundled first chunk, a steady stream, and one stall of three gaps."""
    script = [(2 * GAP_S, "abc ", 3), (GAP_S, "d ", 1), (GAP_S, "e ", 1), (3 * GAP_S, "fg ", 2)]
    answer = ask(MockReply(chunks=[MockChunk(*chunk) for chunk in script]))
    at = [chunk.at_s for chunk in answer.chunks]
    gaps = [later - earlier for earlier, later in pairwise(at)]

    assert TokenSource.CONTINUOUS_USAGE == answer.token_source
    assert [3, 1, 1, 2] == [chunk.num_tokens for chunk in answer.chunks]
    assert [4, 2, 2, 3] == [chunk.num_chars for chunk in answer.chunks]
    assert pytest.approx(2 * GAP_S, abs=LATE_S) == at[0] - answer.sent_s
    assert pytest.approx([GAP_S, GAP_S, 3 * GAP_S], abs=LATE_S) == gaps
    assert answer.headers_s is not None
    assert answer.sent_s <= answer.headers_s < at[0]
    assert pytest.approx(at[-1], abs=LATE_S) == answer.ended_s
    assert ("abc d e fg ", 7, 7) == (answer.text, answer.prompt_tokens, answer.completion_tokens)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_sound_answer_has_its_usage_reason_and_acceptance(is_chat: bool):
    reply = MockReply(
        chunks=[MockChunk(0, "Hi"), MockChunk(0, " all", 2)],
        finish_reason="stop",
        speculative={"drafted": 4, "accepted": 1, "steps": 2, "acceptance_length": 1.5},
        model="served",
    )
    answer = ask(reply, running=False, is_chat=is_chat)

    assert (None, 200, "stop", "Hi all") == (
        answer.error,
        answer.status,
        answer.finish_reason,
        answer.text,
    )
    assert (TokenSource.USAGE, 3) == (answer.token_source, answer.completion_tokens)
    assert SpeculativeCounts(4, 1, 2, 1.5) == answer.speculative
    assert "served" == answer.served_model


def test_a_usage_that_lies_is_recorded_beside_the_chunks_that_contradict_it():
    chunks = [MockChunk(0, "a"), MockChunk(0, "b")]
    answer = ask(MockReply(chunks=chunks, completion_tokens=50))

    assert 50 == answer.completion_tokens
    assert [1, 1, 48] == [chunk.num_tokens for chunk in answer.chunks]
    assert [1, 1, 0] == [chunk.num_chars for chunk in answer.chunks]


@pytest.mark.parametrize(
    ("reply", "status", "expected"),
    [
        (
            MockReply(status=503, body="busy,\n try later"),
            503,
            "HTTP 503: busy, try later",
        ),
        (MockReply(status=500), 500, "HTTP 500: Internal Server Error"),
        (
            MockReply(body="<html><b>It works!</b></html>", content_type="text/html"),
            200,
            "answers text/html instead of a stream (text/event-stream): <html><b>It works!",
        ),
        (
            MockReply(body='{"choices": []}'),
            200,
            "answers application/json instead of a stream",
        ),
        (
            MockReply(chunks=[MockChunk(0, "Half an")], ending=Ending.DROP),
            200,
            "dropped the connection in the middle of an answer",
        ),
        (
            MockReply(chunks=[MockChunk(0, "Half an")], ending=Ending.SILENT),
            200,
            "the stream ended after 7 characters without a finish reason and without [DONE]",
        ),
    ],
)
def test_an_answer_that_failed_says_how(reply: MockReply, status: int, expected: str):
    answer = ask(reply)

    assert status == answer.status
    assert expected in (answer.error or "no error")


def test_what_came_before_a_drop_is_kept():
    answer = ask(MockReply(chunks=[MockChunk(0, "Half an")], ending=Ending.DROP))

    assert ("Half an", 1) == (answer.text, len(answer.chunks))


def test_a_server_that_hangs_is_given_up_after_the_silence_allowed():
    answer = ask(MockReply(chunks=[MockChunk(0, "a")], ending=Ending.HANG), idle_s=0.3)

    assert "silent for 0.3 s; the server hangs, or raise --timeout" in (answer.error or "")
    assert 0.3 <= answer.ended_s - answer.chunks[-1].at_s < 5.0


def test_a_server_that_is_down_is_an_answer_with_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"  # bound, but nobody listens

        async def act() -> Answer:
            async with Client() as client:
                return await client.ask(Endpoint(url=url, model="m"), question(), sampling(), None)

        answer = asyncio.run(act())

    assert answer.status is None
    assert f"{url}: cannot be reached (Connection refused)" == answer.error
    assert () == answer.chunks


def test_a_server_that_accepts_and_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(client_module, "CONNECT_S", 0.3)

    async def act() -> tuple[int | None, str, str | None]:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client() as client:
            return await client.get(Endpoint(url=f"http://127.0.0.1:{port}", model=""), "/x")

    status, _, error = asyncio.run(act())

    assert status is None
    assert "silent for 0.3 s; the server hangs" in (error or "")


def with_raw_server(
    answer: Callable[[asyncio.StreamWriter], Awaitable[None]],
    act: Callable[[Client, Endpoint], Awaitable[_Result]],
    *,
    idle_s: float = 20.0,
) -> _Result:
    """A server of bytes: whatever it is asked, ``answer`` writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        writer.close()

    async def run() -> _Result:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(idle_s=idle_s) as client:
            return await act(client, Endpoint(url=f"http://127.0.0.1:{port}", model="m"))

    return asyncio.run(run())


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def endless(piece: bytes, every_s: float = 0.0) -> Callable[[asyncio.StreamWriter], Any]:
    """A stream of the same bytes for ever."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every_s)

    return answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            endless(b'data: {"choices": [{"delta": {"content": "on and "}}]}\n\n'),
            "events, though max_tokens is 4: the server does not keep to it",
        ),
        (endless(b": ping\n\n", every_s=0.05), "silent for 0.5 s; the server hangs, or raise"),
        (endless(b"x" * (1 << 20)), "an event of the stream is larger than 16 MiB"),
    ],
)
def test_a_stream_that_never_ends_is_given_up(answer, expected: str):
    async def act(client: Client, endpoint: Endpoint) -> Answer:
        return await client.ask(endpoint, question(), sampling(4), None)

    begun = time.monotonic()

    assert expected in (with_raw_server(answer, act, idle_s=0.5).error or "")
    assert time.monotonic() - begun < 30


def test_comments_while_the_first_token_is_awaited_end_nothing():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        for _ in range(4):
            writer.write(b": ping\n\n")
            await writer.drain()
            await asyncio.sleep(0.05)
        said = '{"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}'
        writer.write(f"data: {said}\n\ndata: [DONE]\n\n".encode())
        await writer.drain()

    async def act(client: Client, endpoint: Endpoint) -> Answer:
        return await client.ask(endpoint, question(), sampling(4), None)

    found = with_raw_server(answer, act, idle_s=20.0)

    assert (None, "Hi") == (found.error, found.text)


def test_an_endless_page_is_not_read_into_memory():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while True:
            writer.write(b"[" * (1 << 20))
            await writer.drain()

    async def act(client: Client, endpoint: Endpoint) -> tuple[int | None, str, str | None]:
        return await client.get(endpoint, "/v1/models")

    status, body, error = with_raw_server(answer, act)

    assert (None, "") == (status, body)
    assert "/v1/models is larger than 16 MiB" in (error or "")


def test_what_is_not_http_is_said_to_be_so_in_one_short_line():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff" * 5000 + b"\r\n\r\n")
        await writer.drain()

    async def act(client: Client, endpoint: Endpoint) -> tuple[int | None, str, str | None]:
        return await client.get(endpoint, "/v1/models")

    error = with_raw_server(answer, act)[2] or ""

    assert "answers something that is not HTTP" in error
    assert len(error) < 400
    assert "\n" not in error


def test_a_servers_words_never_reach_the_terminal_as_commands():
    answers = [
        ask(MockReply(status=500, body="\x1b[31mred\x07 alert")),
        ask(MockReply(chunks=[MockChunk(0, "a")], model="\x1b]0;title\x07")),
    ]

    assert "HTTP 500: \ufffd[31mred\ufffd alert" == answers[0].error
    assert "\ufffd]0;title\ufffd" == answers[1].served_model


def test_requests_say_everything_on_which_servers_have_different_defaults():
    endpoint = Endpoint(url="http://x", model="m", asks_running_usage=True)
    body = request_body(endpoint, question("Hi"), sampling(8, ignore_eos=True), 3)

    assert {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "messages": [{"role": "user", "content": "Hi"}],
        "seed": 3,
        "ignore_eos": True,
    } == body


def test_text_completions_are_asked_without_roles():
    body = request_body(
        Endpoint(url="http://x", model="m"), question("Hi"), sampling(is_chat=False), None
    )

    assert "Hi" == body["prompt"]
    assert not body.keys() & {"messages", "seed", "ignore_eos"}
    assert {"include_usage": True} == body["stream_options"]


def test_a_key_is_sent_and_never_shown():
    endpoint = Endpoint(url="http://x", model="m", api_key="s3cret")

    assert "Bearer s3cret" == endpoint.headers()["Authorization"]
    assert "s3cret" not in repr(endpoint)


def test_metrics_are_the_samples_without_buckets_and_comments():
    page = (
        "# HELP a_total x\n"
        'vllm:spec_decode_num_drafts_total{model_name="a b",engine="0"} 12.0\n'
        'lat_bucket{le="0.1"} 3\n'
        "lat_count 4 1700000000000\n"
        "nan_gauge NaN\ninf_gauge +Inf\nbroken line here\n\n"
    )

    assert {
        'vllm:spec_decode_num_drafts_total{model_name="a b",engine="0"}': 12.0,
        "lat_count": 4.0,
    } == parse_metrics(page)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [({}, None), ({"/metrics": "<html>"}, None), ({"/metrics": "a_total 2\n"}, {"a_total": 2.0})],
)
def test_a_server_without_metrics_has_no_snapshot_instead_of_zeros(pages, expected):
    async def act(client: Client, server: MockServer) -> Any:
        return await client.metrics(Endpoint(url=server.url, model=""))

    snapshot = with_server(MockReply(), act, pages=pages)

    assert expected == (None if snapshot is None else snapshot.samples)


def test_a_busy_client_is_noticed_by_its_own_lag():
    async def act() -> float:
        async with LoopLag(time.monotonic) as lag:
            await asyncio.sleep(0.03)
            time.sleep(0.25)  # what must never happen in a client
            await asyncio.sleep(0.03)
        return lag.worst_s

    assert 0.2 <= asyncio.run(act()) < 1.0


def test_the_client_proves_itself_against_a_mock_server_of_its_own(monkeypatch):
    # Somebody else's load is no fault of the client: the limits are tested by themselves below.
    monkeypatch.setattr("outrider.bench.selfproof.MAX_GAP_ERROR_P50_S", 0.5)
    monkeypatch.setattr("outrider.bench.selfproof.MAX_GAP_ERROR_P99_S", 0.5)

    async def act():
        async with Client() as client:
            return await prove_client(client, 3)

    proof = asyncio.run(act())

    assert (True, "") == (proof.is_sound, proof.reason)
    assert (3, 3 * 99) == (proof.concurrency, proof.num_chunks)
    assert 0.0 <= proof.gap_error_p50_s <= proof.gap_error_p99_s < 0.5
    assert proof.max_tokens_per_s > 100.0


def paced(errors_s: list[float]) -> Answer:
    """A stream of a chunk per second of which each gap is seen this much wrong."""
    sent = [float(at) for at in range(len(errors_s) + 1)]
    seen = [0.0]
    for error in errors_s:
        seen.append(seen[-1] + 1.0 + error)
    reply = MockReply(chunks=[MockChunk(0, f"{at:.6f}\n") for at in sent])
    answer = ask(reply)
    chunks = tuple(
        ChunkRecord(at, 1, chunk.num_chars) for at, chunk in zip(seen, answer.chunks, strict=True)
    )
    return replace(answer, chunks=chunks)


@pytest.mark.parametrize(
    ("error_s", "expected"),
    [
        (MAX_GAP_ERROR_P50_S * 0.9, ""),
        (MAX_GAP_ERROR_P50_S * 1.1, "half of the chunk gaps are seen up to 5.5 ms wrong"),
        (MAX_GAP_ERROR_P99_S * 1.5, "99 % of the chunk gaps are seen up to 45.0 ms wrong"),
    ],
)
def test_a_slow_client_is_unsound_and_says_by_how_much(error_s: float, expected: str):
    answer = paced([error_s, -error_s] * 3)
    proof = judge_client([answer], [answer], flood_s=2.0)

    assert (not expected) == proof.is_sound
    assert expected in proof.reason
    assert pytest.approx(error_s, rel=1e-3) == proof.gap_error_p99_s
    assert 3.5 == proof.max_tokens_per_s


def test_a_client_that_loses_streams_of_its_own_server_is_unsound():
    lost = ask(MockReply(chunks=[MockChunk(0, "1.0\n")], ending=Ending.DROP))
    proof = judge_client([lost], [lost], flood_s=1.0)

    assert not proof.is_sound
    assert "lost streams of its own mock server" in proof.reason
